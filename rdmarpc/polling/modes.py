"""Modes of torch in the threads of users, where our own operations run too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..transport import NotSupported

_native: Any = torch._C
_FAKE = _native._TorchDispatchModeKey.FAKE


def check_real() -> None:
    """Raise ``NotSupported`` where tensors have no data, so that what is sent, or has come, could not be read; and where what
    comes would be taken for a constant."""
    if _native._is_tracing():
        raise NotSupported(
            "a call within torch.jit.trace: it is no part of the trace, which would have its result as a constant",
            hint="trace what is before and behind the call, or put it into a function with torch.jit.ignore and use torch.jit.script",
        )
    if _native._len_torch_dispatch_stack() and _native._get_dispatch_mode(_FAKE) is not None:
        raise NotSupported(
            "a call within a FakeTensorMode: tensors have no data there",
            hint="call outside of it, or leave it for the call (torch.utils._python_dispatch._disable_current_modes)",
        )


def intercepted() -> bool:
    """Whether this thread is in a ``TorchDispatchMode`` or ``TorchFunctionMode``, which would see our operations, and might
    change what they give (``torch.device("cuda")`` is one)."""
    return bool(_native._len_torch_function_stack() or _native._len_torch_dispatch_stack())


@contextmanager
def unseen() -> Iterator[None]:
    """Leave all these modes for the block."""
    left = [_native._pop_torch_function_stack() for _ in range(_native._len_torch_function_stack())]
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(left):
            _native._push_on_torch_function_stack(mode)
