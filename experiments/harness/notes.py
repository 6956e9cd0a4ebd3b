"""What processes tell each other by files in a folder that all of them see."""

from __future__ import annotations

import time
from pathlib import Path

_PAUSE_S = 0.002


def write(path: Path, text: str | bytes) -> None:
    """Make the file at once, for those who look for it."""
    hidden = path.with_name(f".{path.name}")
    hidden.write_bytes(text.encode() if isinstance(text, str) else text)
    hidden.rename(path)


def wait_for(path: Path, deadline: float, otherwise: str) -> Path:
    """Return the path when the file is there. Raises ``RuntimeError(otherwise)`` after ``deadline`` (``time.monotonic``)."""
    while not path.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(otherwise)
        time.sleep(_PAUSE_S)
    return path
