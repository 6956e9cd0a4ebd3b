"""Modes of torch: in the threads of users, where our own operations run too, and what functions leave in the pool's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _device
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode

from ...transport import NotSupported

_native: Any = torch._C
_FAKE = _native._TorchDispatchModeKey.FAKE
_AUTOCAST_DTYPES = {"cpu": torch.bfloat16, "cuda": torch.float16}
_outdone: list[object] = []
"""What ended inference modes that were never left: each holds to the end of the process."""


tracing: Callable[[], bool] = _native._is_tracing
function_modes: Callable[[], int] = _native._len_torch_function_stack
"""How many ``TorchFunctionMode`` this thread is in, and (``dispatch_modes``) ``TorchDispatchMode``. They would see our
operations, and might change what they give (``torch.device("cuda")`` is one): see ``unseen``."""
dispatch_modes: Callable[[], int] = _native._len_torch_dispatch_stack


def check_real() -> None:
    """Raise ``NotSupported`` where tensors have no data, so that what is sent, or has come, could not be read; and where what
    comes would be taken for a constant. Needs to be called only where ``tracing`` or ``dispatch_modes`` say something."""
    if tracing():
        raise NotSupported(
            "a call within torch.jit.trace: it is no part of the trace, which would have its result as a constant",
            hint="trace what is before and behind it, or torch.jit.script it, the call in a function with torch.jit.ignore",
        )
    if dispatch_modes() and _native._get_dispatch_mode(_FAKE) is not None:
        raise NotSupported(
            "a call within a FakeTensorMode: tensors have no data there",
            hint="call outside of it, or leave it for the call (torch.utils._python_dispatch._disable_current_modes)",
        )


@contextmanager
def unseen() -> Iterator[None]:
    """Leave all these modes for the block."""
    left = [_native._pop_torch_function_stack() for _ in range(function_modes())]
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(left):
            _native._push_on_torch_function_stack(mode)


def left(
    _recorded: Callable[[], bool] = torch.is_grad_enabled,
    _inference: Callable[[], bool] = torch.is_inference_mode_enabled,
    _functions: Callable[[], int] = function_modes,
    _dispatches: Callable[[], int] = dispatch_modes,
    _autocast: Callable[[], bool] = _native._is_any_autocast_enabled,
) -> bool:
    """Whether this thread, which has run a function of users, is not as a new thread is."""
    return not _recorded() or _inference() or bool(_functions() or _dispatches()) or _autocast()


def clear() -> None:
    """Make this thread as a new one is: what a function leaves behind is not for the next one."""
    if torch.is_inference_mode_enabled():
        guard = _native._InferenceMode(False)
        guard.__enter__()
        _outdone.append(guard)
    _native._set_grad_enabled(True)
    device = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    if device is not None:
        torch._GLOBAL_DEVICE_CONTEXT.device_context = None
        _device.CURRENT_DEVICE = device.old_device
    while function_modes():
        _native._pop_torch_function_stack()
    while dispatch_modes():
        _pop_mode()
    if _native._is_any_autocast_enabled():
        for kind in torch._C._autocast_supported_devices():
            torch.set_autocast_enabled(kind, False)
        for kind, dtype in _AUTOCAST_DTYPES.items():
            torch.set_autocast_dtype(kind, dtype)
        while torch.autocast_decrement_nesting() > 0:
            pass
        torch.clear_autocast_cache()
