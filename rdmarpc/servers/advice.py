"""Warnings at the line of the user's program, however deep in this package and in torch their reason is found."""

from __future__ import annotations

import sys
import warnings
from types import FrameType


def warn(text: str) -> None:
    """A ``UserWarning`` where the user's code called: each line of it is told once."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _inside(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def _inside(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("rdmarpc", "torch")
