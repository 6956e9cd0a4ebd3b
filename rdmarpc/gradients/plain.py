"""Completing futures: any thread may do it, and users' callbacks must not find out which one did."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from ..links.polling import modes
from .context import Context, current

T = TypeVar("T")
_native: Any = torch._C


def plainly(run: Callable[[], T], context: Context | None = None) -> T:
    """``run()`` as on a thread of our own, in that autograd context: whoever waits may do so under ``no_grad``, say."""
    outer, recorded = current.context, torch.is_grad_enabled()
    current.context = None if context is None or context.ended else context
    try:
        if modes.intercepted() or torch.is_inference_mode_enabled() or _native._is_any_autocast_enabled():
            with ExitStack() as left:
                left.enter_context(torch.inference_mode(False))
                left.enter_context(_native._DisableAutocast())
                left.enter_context(modes.unseen())
                left.enter_context(torch.enable_grad())
                return run()
        if not recorded:
            with torch.enable_grad():
                return run()
        return run()
    finally:
        current.context = outer
