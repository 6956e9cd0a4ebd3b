"""Functions that the tests call at other workers."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time


def identity(value):
    return value


def both(first, second):
    return first, second


def no_result():
    return None


def slow(seconds, value=None):
    time.sleep(seconds)
    return value


def double(tensor):
    return tensor * 2


_gates: dict[str, threading.Event] = {}


def held(gate, value=None):
    """Ends when ``let_go`` of the same name has been called here."""
    assert _gates.setdefault(gate, threading.Event()).wait(60), "nobody lets it go"
    return value


def let_go(gate) -> None:
    _gates.setdefault(gate, threading.Event()).set()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_gil(seconds: float) -> str:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return "held"


def with_frames_left(count, call):
    """``call()`` where some ``count`` frames more are too many."""
    depth, frame = count, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back

    def down(left):
        return call() if left <= 0 else down(left - 1)

    return down(sys.getrecursionlimit() - depth)
