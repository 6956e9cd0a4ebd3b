"""Functions that the tests call at other workers."""

from __future__ import annotations

import ctypes
import os
import signal
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


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_gil(seconds: float) -> str:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return "held"
