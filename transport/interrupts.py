"""Signal handlers, kept out of the middle of what this package does.

Python runs a signal handler between any two instructions of the main thread. One that raises (Ctrl-C, an alarm, the time limit
of a test), or that makes a call itself, would leave half done what it interrupts: a message that is taken and not handled, a
frame that is written and not counted. Once a device is open, a handler therefore runs only

* in code of the user, also where this package has called it,
* where this package waits: functions that are ``interruptible``, and waits of ``threading``,
* or ``LIMIT_S`` after its signal, wherever that is.

A signal that comes elsewhere is raised again and again until then, so its handler runs as soon as the user's code goes on.
Handlers that Python code sets later are kept in the same way, and ``signal.getsignal`` still returns what the user has set.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import repeat
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, TypeVar

import torch

LIMIT_S = 1.0
_INSIST_S = 0.01
_PACKAGE = __name__.partition(".")[0]
_PROGRAMS = tuple(f"{_PACKAGE}.{name}" for name in ("experiments", "cli", "__main__"))
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
        self._waiting: list[int] = []  # the signal that is still to be handled
        self._since = 0.0  # when it came
        self._settles = False

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if self._settles:
            return None
        now = time.monotonic()
        if not _at_work(frame) or (self._waiting and self._since < now - LIMIT_S):
            if self._waiting:
                self._settle()
            with _around(frame):
                return self.handler(number, frame)
        if not self._waiting:
            self._since = now
            self._waiting.append(number)
            with contextlib.suppress(RuntimeError):  # no more threads
                # Not one of ``threading``, which may be what was interrupted.
                _thread.start_new_thread(self._insist, ())
        # The signal comes again, and finds its handler at the next instruction of the interrupted code that lets handlers run.
        # After a call such an instruction would be this one: an iterator calls from within C.
        (_,) = map(_thread.interrupt_main, (number,))  # type: ignore[arg-type]  # typeshed: only named signals
        return None

    def _settle(self) -> None:
        """The signal is about to be handled. As often as it was sent again since this call began, it would be once more."""
        self._waiting.clear()  # nobody sends it again from here on
        self._settles = True
        signal.pthread_kill(threading.get_ident(), 0)  # sends nothing, and has Python run the handlers of what has come
        self._settles = False

    def _insist(self) -> None:
        """Send the signal until it is handled: the user's code may have gone on with a system call, which nothing else ends."""
        main = threading.main_thread().ident or 0
        while self._waiting:
            time.sleep(_INSIST_S)
            if any(signal.getsignal(number) is not self.handler for number in self._waiting):
                self._waiting.clear()
            # From within C: between a look and the sending, the main thread could handle it, and would then do so twice.
            deque(map(signal.pthread_kill, repeat(main), self._waiting), maxlen=0)


def _at_work(frame: FrameType | None) -> bool:
    """Whether the main thread, at this instruction, does something of this package that must not be left half done."""
    waits = False
    while frame is not None:
        code, module = frame.f_code, str(frame.f_globals.get("__name__"))
        if (found := _waits.get(code)) is not None:
            return found[0](frame.f_locals)
        if module == _PACKAGE or module.startswith(f"{_PACKAGE}."):
            return not waits and not module.startswith(_PROGRAMS)
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


_STDLIB = os.path.join(sysconfig.get_path("stdlib"), "")
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")


def _of_library(file: str) -> bool:
    """Whether code lies in Python's own library, or in torch: this package calls it, and it may call this package."""
    return file.startswith((_TORCH, "<")) or (file.startswith(_STDLIB) and "-packages" not in file)


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
