"""The reason why this process ends, told to the workers that will lose it: their ``PeerLost`` names it."""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import sys
import traceback
from collections.abc import Callable
from multiprocessing import util
from typing import Any

from ..transport import RdmaError

_HEAD, _TAIL = 300, 500
"""Characters of a text that is too long. A loss that was caused by another loss has the first cause at its end."""
INTERRUPTED = KeyboardInterrupt.__name__
_ENDINGS = {("multiprocessing.process", "_bootstrap"), ("torch.multiprocessing.spawn", "_wrap")}
"""Functions that print or keep the exception that ends a process of ``multiprocessing``."""


def reason() -> tuple[str, str]:
    """The type and the text of the exception that ends this process, as far as it can be seen: one that is being handled, or
    the one that reached the top of the main thread. Two empty texts if there is none."""
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):  # at a prompt, errors end nothing
        error = getattr(sys, "last_value", None)
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return "", ""
        # ``except ...: sys.exit(1)``, as in torch.multiprocessing.spawn.
        error = error.__context__ or error
    return ("", "") if error is None else (type(error).__name__, _text(error))


def _text(error: BaseException) -> str:
    try:
        if isinstance(error, RdmaError):
            text = f"{type(error).__name__}: {error.message}"
        else:
            text = "".join(traceback.format_exception_only(error)).strip()
    except Exception:
        return type(error).__name__  # its own methods fail
    text = text.split("\nTraceback", 1)[0]  # that of another worker, where the error came from
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]} ... {text[-_TAIL:]}"


def when_a_child_ends(tell: Callable[[], object]) -> util.Finalize | None:
    """Have ``tell`` called when the function of this ``multiprocessing`` process has returned or raised. ``reason`` sees the
    exception then, and not later, as it ends there. Returns ``None`` in any other process."""
    if multiprocessing.parent_process() is None:
        return None
    if sys.version_info >= (3, 14):  # finalizers run when the exception has been dealt with, and is not to be seen any more
        for name in ("print_exc", "format_exc"):
            setattr(traceback, name, _telling(inspect.unwrap(getattr(traceback, name)), tell))
    return util.Finalize(None, tell, exitpriority=0)


def _telling(function: Callable[..., Any], tell: Callable[[], object]) -> Callable[..., Any]:
    """A function of ``traceback``, which calls ``tell`` first where it is called for the exception that ends this process."""

    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        if (caller.f_globals.get("__name__"), caller.f_code.co_name) in _ENDINGS:
            tell()
        return function(*args, **kwargs)

    return told
