"""Autocast inside of kernels. It converts operands before an operator comes to a remote tensor, which sees it switched off
then. A kernel that itself calls operators has these converted, too: its worker has to know of it."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_NAMES = ("_trilinear", "_cdist_forward", "_transformer_encoder_layer_fwd")


class _Inside(threading.local):
    dtype: torch.dtype | None = None


inside = _Inside()
"""``dtype``: what autocast converts to within the kernel that this thread runs or posts."""
_library = torch.library.Library("aten", "IMPL")


def watch(remote: type[torch.Tensor]) -> None:
    """Have this module know when such kernels run under autocast on tensors of this class. Call it once."""
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.AutocastCPU)

    def run(op: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        before = inside.dtype
        if any(isinstance(each, remote) for each in tree_leaves((args, kwargs))):
            inside.dtype = torch.get_autocast_dtype("cpu")
        try:
            return op.redispatch(keys & below, *args, **kwargs)
        finally:
            inside.dtype = before

    for name in _NAMES:
        op = getattr(torch.ops.aten, name).default
        _library.impl(name, functools.partial(run, op), "AutocastCPU", with_keyset=True)
