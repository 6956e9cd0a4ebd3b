"""A forked child of a worker. It has none of the parent's threads, and its use of the parent's rings, sockets and store would
disturb the parent. So every use of them raises an error in the child, which may call ``init_rpc`` for itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import traceback
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

TEXT = (
    "RPC was initialized in the process that this one is a fork of: a fork cannot use it. "
    "Call rdmarpc.init_rpc here (under another name and rank), or make calls in the parent."
)

_stores: weakref.WeakSet[dist.Store] = weakref.WeakSet()


def share(store: dist.Store) -> None:
    """Keep this store for ever in children that are forked while it exists. Its destructor would wait there for threads that do
    not exist, or abort, and speak to the server through the parent's connection."""
    _stores.add(store)


def in_child(job: Callable[[], None]) -> None:
    """Have ``job`` run in every forked child. It must take no lock: another thread may have held it."""
    os.register_at_fork(after_in_child=job)


def leave(error: BaseException | None) -> NoReturn:
    """End a child that a function of a peer's request has forked and not ended: its thread would go on with the parent's work.
    ``error``: what the function raised there; it is printed, and the status is 1 then, or that of a ``SystemExit``."""
    code: Any = error.code if isinstance(error, SystemExit) else None if error is None else 1
    try:
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        elif code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
    finally:  # whatever became of the output: this thread must not answer with the parent's connection
        os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))


def _never_destroy() -> None:
    for store in list(_stores):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))


in_child(_never_destroy)
