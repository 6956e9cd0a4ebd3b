"""What a forward prints, logs, writes to a file, sends, starts or sleeps through: a trace does it once and a graph never. It is
refused before it is done."""

from __future__ import annotations

import _io
import _queue
import _socket
import builtins
import contextlib
import csv
import io
import logging
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...transport import NotSupported
from ..guards.content import foreign, package_of

_WRITERS = (_io._IOBase, _socket.socket, _queue.SimpleQueue, type(csv.writer(io.StringIO())))
_WRITES = frozenset(["write", "writelines", "writerow", "writerows", "send", "sendall", "sendto", "put"])
_ACTS = frozenset(
    [os.write, os.kill, os.system, os.remove, os.rename, os.replace, os.mkdir, os.rmdir, signal.raise_signal, time.sleep]
)
ACT_NAMES = _WRITES | {function.__name__ for function in _ACTS}
"""The names of functions that may be such as ``acts`` tells of."""
_ONCE = frozenset(f"{level}_once" for level in ("debug", "info", "log", "warn", "warning", "error"))
"""What libraries call functions that log a text once in a process."""
_PACKAGES = {
    "queue": "put get put_nowait get_nowait",
    "multiprocessing": "send recv send_bytes recv_bytes put get put_nowait get_nowait start set clear acquire release wait",
    "threading": "start set clear acquire release wait notify notify_all",
    "concurrent": "submit map result",
    "asyncio": "run run_until_complete",
    "subprocess": "run call check_call check_output __init__",
    "pathlib": "open write_text write_bytes touch mkdir unlink rename replace rmdir",
    "shutil": "copy copy2 copyfile copytree move rmtree",
    "urllib": "urlopen urlretrieve",
    "torch": "save",
}
_ACTING = {package: frozenset(names.split()) for package, names in _PACKAGES.items()}


def called_to_act(frame: types.FrameType) -> types.FrameType | None:
    """Who has just called a function of Python's library or of torch that does what ``acts`` tells of, if it is neither."""
    caller = frame.f_back
    if frame.f_code.co_name not in _ACTING.get(package_of(frame), ()) or caller is None:
        return None
    return None if foreign(caller.f_globals.get("__name__")) else caller


def acts(function: Any) -> bool:
    """Whether a call of this function of C is seen outside of the process: it writes, sends, sleeps or signals."""
    writes = getattr(function, "__name__", "") in _WRITES and isinstance(getattr(function, "__self__", None), _WRITERS)
    return writes or function in _ACTS


def done_once(what: str, frame: types.FrameType) -> str:
    """Why a forward whose frame this is cannot be captured."""
    return f"{what} at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}, which a trace would do once"


@contextlib.contextmanager
def no_output(here: Callable[[], bool], refuse: Callable[[str], NotSupported]) -> Iterator[None]:
    """While this lasts, ``refuse`` is told what this thread prints, logs or opens where ``here()``, and it is not done. What
    torch and Python print or log is, and so is what a library logs once in a process (``warning_once``). ``vars()`` of a
    tensor is told, too."""
    thread = threading.get_ident()
    say, begin, variables, handle = builtins.print, builtins.open, builtins.vars, logging.Logger.handle

    def own(frame: Any) -> bool:
        return threading.get_ident() == thread and here() and not foreign(frame.f_globals.get("__name__"))

    def printed(*args: Any, **kwargs: Any) -> None:
        if not own(sys._getframe(1)):
            say(*args, **kwargs)
        else:
            refuse(done_once("prints", sys._getframe(1)))

    def opened(*args: Any, **kwargs: Any) -> Any:
        if own(sys._getframe(1)):
            raise refuse(done_once("opens a file", sys._getframe(1)))
        return begin(*args, **kwargs)

    def listed(*given: Any) -> Any:
        if given and isinstance(given[0], torch.Tensor) and own(sys._getframe(1)):
            refuse("asks for vars() of a tensor, which has others in a trace")
        return variables(*given) if given else sys._getframe(1).f_locals

    def handled(logger: logging.Logger, record: logging.LogRecord) -> None:
        frame: Any = sys._getframe(1)
        while frame.f_globals.get("__name__") == "logging":
            frame = frame.f_back
        if frame.f_code.co_name in _ONCE or not own(frame):
            handle(logger, record)
        else:
            refuse(done_once("logs", frame))

    builtins.print, builtins.open, builtins.vars = printed, opened, listed
    logging.Logger.handle = handled  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        builtins.print, builtins.open, builtins.vars = say, begin, variables
        logging.Logger.handle = handle  # type: ignore[method-assign]
