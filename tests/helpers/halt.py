"""Stopping a process for certain: it goes on for a moment after ``os.kill(pid, SIGSTOP)`` has returned."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_LIMIT_S = 10.0


def halt(pid: int) -> None:
    """Send SIGSTOP, and return when no thread of that process runs any more."""
    os.kill(pid, signal.SIGSTOP)
    limit = time.monotonic() + _LIMIT_S
    while any(_state(task) not in "TtZX" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < limit, f"process {pid} does not stop"
        time.sleep(0.001)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has ended
        return "X"
