"""Modes of torch under which no message can be written or read."""

from __future__ import annotations

from typing import Any

import torch

from ..transport import NotSupported

_native: Any = torch._C
_FAKE = _native._TorchDispatchModeKey.FAKE


def check_real() -> None:
    """Raise ``NotSupported`` where tensors have no data: what is sent, or has come, could not be read."""
    if _native._get_dispatch_mode(_FAKE) is not None:
        raise NotSupported(
            "a call within a FakeTensorMode: tensors have no data there",
            hint="call outside of it, or leave it for the call (torch.utils._python_dispatch._disable_current_modes)",
        )
