"""Arguments and results: what crosses between workers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...transport import NotSupported
from .sizes import Number


def check_result(what: str, result: Any) -> None:
    """``NotSupported`` for a result that is made of more than tensors and constants."""
    for leaf in pytree.tree_leaves(result):
        if not isinstance(leaf, (torch.Tensor, *Number, *_CONSTANTS)) and leaf is not None:
            raise NotSupported(
                f"{what} gives a {type(leaf).__name__}, which cannot cross between workers",
                hint="tensors in tuples, lists and dicts can",
            )


_CONSTANTS = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, slice)
