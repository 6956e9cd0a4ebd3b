"""Signal handlers, kept out of the middle of what this package does.

Python runs a signal handler between any two instructions of the main thread. One that raises (Ctrl-C, an alarm, the time limit
of a test), or that makes a call itself, would leave half done what it interrupts: a message that is taken and not handled, a
frame that is written and not counted. Once a device is open, a handler therefore runs only

* in code of the user, also where this package has called it,
* where this package waits: functions that are ``interruptible``, and waits of ``threading``,
* or after ``LIMIT_S`` of that, wherever it is. Time in which this process does not run does not count.

A signal that comes elsewhere is raised again at each instruction until then, so its handler runs as soon as the user's code
goes on. One that comes more often than every ``_INSIST_S`` (the timer of a sampling profiler) would slow all work down. It is
raised so for a moment, and for a moment more every ``_INSIST_S``. Signals that come while one waits are one signal.

Handlers that Python code sets later are kept in the same way, and ``signal.getsignal`` still returns what the user has set.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from importlib.util import find_spec
from itertools import repeat
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, TypeVar

import torch

LIMIT_S = 1.0
_INSIST_S = 0.01
_AT_ONCE = 200
"""So many times a signal that comes often is raised at once: 0.4 ms, in which a small call ends."""

_PACKAGE = __name__.partition(".")[0]
_PROGRAMS = tuple(f"{_PACKAGE}.{name}" for name in ("experiments", "__main__"))
"""Modules of this package that are programs: their code is the user's."""

_WAITING = ("wait", "wait_for", "join")
"""Functions of ``threading``."""

F = TypeVar("F", bound=Callable[..., Any])
Local = dict[str, Any]
Around = Callable[[Local], contextlib.AbstractContextManager[None]]
_waits: dict[CodeType, tuple[Callable[[Local], bool], Around]] = {}


def interruptible(
    unless: Callable[[Local], bool] = lambda local: False, around: Around = lambda local: contextlib.nullcontext()
) -> Callable[[F], F]:
    """Decorates a function that waits: handlers may run, and raise, between any two of its own instructions, ``unless`` that is
    true of its local variables. ``around`` is entered meanwhile: a handler may take long, and wait for other threads."""

    def enter(function: F) -> F:
        _waits[function.__code__] = unless, around
        return function

    return enter


class Kept:
    """A handler of the user, as Python knows it. Main thread only."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        self._waiting: list[int] = []  # the signal that is still to be handled; a list of its own for each
        self._since = self._looked = 0.0  # when it came; when it was last counted that it waits
        self._looks = 0
        self._at_once = self._left = 0  # so many times it is raised at once; so many are left
        self._decides = False

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if self._decides:  # the same signal, within these lines: they are about to see to it
            return None
        self._decides = True
        try:
            due = self._due(number, frame)
        finally:
            self._decides = False
        if due:
            with _around(frame):
                return self.handler(number, frame)
        if self._left > 0:
            self._left -= 1
            # The signal comes again, and finds its handler at the next instruction of the interrupted code that lets handlers
            # run. After a call such an instruction would be this one: an iterator calls from within C.
            (_,) = map(_thread.interrupt_main, (number,))  # type: ignore[arg-type]  # typeshed: only named signals
        return None

    def _due(self, number: int, frame: FrameType | None) -> bool:
        """Whether the handler runs now. If not, its signal will come again."""
        now = time.monotonic()
        if now >= self._looked + _INSIST_S:
            self._looked, self._looks = now, self._looks + 1
        if not _at_work(frame) or (self._waiting and self._looks * _INSIST_S >= LIMIT_S):
            self._waiting.clear()  # nobody sends it again from here on
            signal.pthread_kill(threading.get_ident(), 0)  # sends nothing, and has Python run the handlers of what has come
            return True
        if not self._waiting:
            often, self._since, self._waiting = now - self._since < _INSIST_S, now, [number]
            self._looks, self._looked = 0, now
            self._at_once = self._left = _AT_ONCE if often else sys.maxsize
            try:
                # Not one of ``threading``, which may be what was interrupted.
                _thread.start_new_thread(self._insist, (self._waiting,))
            except RuntimeError:  # no more threads: nobody else sends it
                self._left = sys.maxsize
        return False

    def _insist(self, waiting: list[int]) -> None:
        """Send the signal until it is handled: the user's code may have gone on with a system call, which nothing else ends."""
        main = threading.main_thread().ident or 0
        while waiting:
            time.sleep(_INSIST_S)
            if any(signal.getsignal(number) is not self.handler for number in waiting):
                waiting.clear()
            self._left = self._at_once
            # From within C: between a look and the sending, the main thread could handle it, and would then do so twice.
            deque(map(signal.pthread_kill, repeat(main), waiting), maxlen=0)


def _at_work(frame: FrameType | None) -> bool:
    """Whether the main thread, at this instruction, does something of this package that must not be left half done."""
    waits = False
    while frame is not None:
        code, module = frame.f_code, str(frame.f_globals.get("__name__"))
        if (found := _waits.get(code)) is not None:
            return found[0](frame.f_locals)
        if module == _PACKAGE or module.startswith(f"{_PACKAGE}."):
            return not waits and not module.startswith(_PROGRAMS)
        if module == "weakref":  # a finalizer: what is raised there is printed, and lost
            return True
        if module == "__main__" or not _of_library(code.co_filename):
            return False
        waits = module == "threading" and code.co_name in _WAITING
        frame = frame.f_back
    return False


def _around(frame: FrameType | None) -> contextlib.AbstractContextManager[None]:
    """What the wait of this package that a signal has come in wants around the handler."""
    if frame is None or (found := _waits.get(frame.f_code)) is None:
        return contextlib.nullcontext()
    return found[1](frame.f_locals)


_STDLIB = os.path.join(os.path.dirname(os.__file__), "")
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_FOUND = [found.origin for name in ("filelock", "llvmlite", "numba") if (found := find_spec(name)) is not None and found.origin]
_OTHERS = tuple(os.path.join(os.path.dirname(origin), "") for origin in _FOUND)
"""Torch's locks of files, whose audit hook runs in the midst of anything; what loads and compiles kernels, under a lock."""


def _of_library(file: str) -> bool:
    """Whether code lies in Python's own library, in torch or in ``_OTHERS``: this package calls it, and it may call this
    package."""
    return file.startswith((_TORCH, *_OTHERS, "<")) or (file.startswith(_STDLIB) and "-packages" not in file)


def protect() -> None:
    """Keep all handlers of Python code from now on. Only the main thread can do that: on others nothing happens."""
    if threading.current_thread() is not threading.main_thread():
        return
    real = getattr(signal, "_signal")  # noqa: B009  the functions in C, which those in ``signal`` look up here at every call
    if isinstance(real, SimpleNamespace):
        return

    def set_handler(number: int, handler: Any) -> Any:
        return _users(real.signal(number, _kept(handler)))

    def handler_of(number: int) -> Any:
        return _users(real.getsignal(number))

    for number in real.valid_signals():
        if callable(handler := real.getsignal(number)):
            real.signal(number, _kept(handler))
    setattr(signal, "_signal", SimpleNamespace(**vars(real) | {"signal": set_handler, "getsignal": handler_of}))  # noqa: B010


def _kept(handler: Any) -> Any:
    return Kept(handler) if callable(handler) and not isinstance(handler, (Kept, int)) else handler


def _users(handler: Any) -> Any:
    return handler.handler if isinstance(handler, Kept) else handler
