"""What comes about after a while, and signals that are sent by and by."""

from __future__ import annotations

import signal
import subprocess
import sys
import time


def eventually(look, wanted=True, limit=30.0):
    """``look()`` gives what is wanted, after a while."""
    deadline = time.monotonic() + limit
    while (found := look()) != wanted:
        assert time.monotonic() < deadline, f"{found} instead of {wanted}"
        time.sleep(0.01)


def after(seconds: float, *kill: tuple[int, signal.Signals]) -> None:
    """A process that sends signals by and by, each after ``seconds``."""
    script = (
        "import os, sys, time\n"
        "for each in sys.argv[2:]:\n    time.sleep(float(sys.argv[1])); os.kill(*map(int, each.split(',')))"
    )
    subprocess.Popen([sys.executable, "-c", script, str(seconds), *(f"{pid},{int(number)}" for pid, number in kill)])
