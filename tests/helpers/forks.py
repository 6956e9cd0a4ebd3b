"""The process that worker processes of all tests are forked from: there is one in a test run, whoever starts it first."""

from __future__ import annotations

import fcntl
import functools
import multiprocessing as mp
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

_output = -1
"""Where the server and its processes write, once ``keep_output`` has been called: a file that they append to."""
_SHOWN_BYTES = 1 << 18


def keep_output() -> None:
    """Before the server starts: what worker processes print (mostly tracebacks of errors that a test expects) is kept here,
    not shown."""
    global _output
    if _output < 0:
        _output = os.memfd_create("workers-output")
        fcntl.fcntl(_output, fcntl.F_SETFL, os.O_APPEND)


def forget_output() -> None:
    if _output >= 0:
        os.ftruncate(_output, 0)


def output() -> str:
    """The end of what was printed since ``forget_output``."""
    if _output < 0:
        return ""
    return os.pread(_output, _SHOWN_BYTES, max(0, os.fstat(_output).st_size - _SHOWN_BYTES)).decode(errors="replace")


@contextmanager
def _printing_there() -> Iterator[None]:
    """Processes that are started meanwhile inherit the file as both of their outputs."""
    if _output < 0:
        yield
        return
    before = os.dup(1), os.dup(2)
    for stream in (1, 2):
        os.dup2(_output, stream)
    try:
        yield
    finally:
        for stream, old in zip((1, 2), before, strict=True):
            os.dup2(old, stream)
            os.close(old)


@functools.cache
def forks() -> ForkServerContext:
    """The context of a server that has imported ``warm``: new processes in milliseconds."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    # The server finds modules by its environment alone.
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([path] if path else [])])
    try:
        with _printing_there():
            forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if path is not None:
            os.environ["PYTHONPATH"] = path
    return context


def warm_up() -> None:
    """Return when that server has imported everything."""
    process = forks().Process(target=int)
    process.start()
    process.join()
