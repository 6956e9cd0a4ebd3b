"""Autocast inside of kernels. It converts operands before an operator comes to ``__torch_dispatch__``, which sees it switched
off then. A kernel that itself calls operators has these converted, too: whoever runs it has to know of it."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import torch

_NAMES = ("_trilinear", "_cdist_forward", "_transformer_encoder_layer_fwd")


class _Inside(threading.local):
    dtype: torch.dtype | None = None


inside = _Inside()
"""``dtype``: what autocast converts to within the kernel that this thread runs or posts."""
_library = torch.library.Library("aten", "IMPL")


def run(func: Any, args: Any, kwargs: Any, dtype: torch.dtype | None) -> Any:
    """Call an operator on plain tensors below ``__torch_dispatch__``, with autocast to ``dtype`` within its kernel."""
    with contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype, cache_enabled=False):
        return func(*args, **kwargs)


def _watch() -> None:
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.AutocastCPU)

    def kernel(op: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        before, inside.dtype = inside.dtype, torch.get_autocast_dtype("cpu")
        try:
            return op.redispatch(keys & below, *args, **kwargs)
        finally:
            inside.dtype = before

    for name in _NAMES:
        op = getattr(torch.ops.aten, name).default
        _library.impl(name, functools.partial(kernel, op), "AutocastCPU", with_keyset=True)


_watch()
