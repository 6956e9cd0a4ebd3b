"""The worker that this process is, for all rooms: ``calls`` makes it, and sets it here. And what rooms that others must not
import say of themselves to these.

A forked child of a worker has none of the parent's threads, and its use of the parent's rings, sockets and store would disturb
the parent. So every use of them raises an error in the child, which may call ``init_rpc`` for itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist

_MAX_ID = 2**15 - 1
_NAME = re.compile(r"[A-Za-z0-9_:-]+")


@dataclass(frozen=True)
class WorkerInfo:
    """A worker's name and id (its rank). Immutable, hashable, picklable."""

    name: str
    id: int
    number: int = field(default=-1, compare=False, repr=False)
    """The worker's number (``members.Record``), which torch's class does not have."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or len(self.name) >= 128:
            raise RuntimeError(
                "Worker name must match ^[A-Za-z0-9-_:]*$, and must be non-empty and shorter than 128 chars, "
                f"but got {self.name}"
            )
        if not -_MAX_ID - 1 <= self.id <= _MAX_ID:
            raise TypeError(f"a worker's id is a number of 16 bits, got {self.id}")

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


FORKED = (
    "RPC was initialized in the process that this one is a fork of: a fork cannot use it. "
    "Call rdmarpc.init_rpc here (under another name and rank), or make calls in the parent."
)

_stores: weakref.WeakSet[dist.Store] = weakref.WeakSet()


def share(store: dist.Store) -> None:
    """Keep this store for ever in children that are forked while it exists. Its destructor would wait there for threads that do
    not exist, or abort, and speak to the server through the parent's connection."""
    _stores.add(store)


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


NO_AGENT = "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"
_NOT_INITIALIZED = "RPC has not been initialized. Call rdmarpc.init_rpc first."
Agent = Any
"""A worker that makes calls (``calls/agent``). Rooms below ``calls`` do not import its class."""
Call = Any
"""A call under way, or over (``calls/pending``). The code that started it may read it from any thread."""

_current: Any = None
_parents: list[object] = []
"""The agents of this forked child's ancestors. They are kept alive here, because the child must not give back what they own."""
_inherited = False
"""Whether this process was forked while RPC was up, and has not used RPC itself since."""


def current(message: str = _NOT_INITIALIZED) -> Any:
    """This process's agent. ``RuntimeError`` before ``init_rpc``, after ``shutdown`` (``message``), and in a forked child."""
    if _current is None:
        raise RuntimeError(FORKED if _inherited else message + _other_agent())
    return _current


def _other_agent() -> str:
    """What the error for want of an agent says besides where torch's own ``init_rpc`` was called."""
    theirs = getattr(torch._C, "_distributed_rpc", None)
    if theirs is None or not theirs._is_current_rpc_agent_set():
        return ""
    return " What is up is torch's own RPC: import rdmarpc in its place, or start the program by python -m rdmarpc run."


def found() -> Any:
    """This process's agent; ``None`` if there is none."""
    return _current


def set_current(agent: Any) -> None:
    """``None``: there is none any more. In a forked child ``agent.forked()`` lets go of what the parent owns, without a lock,
    and returns what has to be kept for ever."""
    global _current, _inherited
    _current, _inherited = agent, False


def _in_child() -> None:
    """As all that runs there it takes no lock: another thread may have held it."""
    global _current, _inherited
    for store in list(_stores):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    if _current is not None:
        _parents.append(_current.forked())
        _current, _inherited = None, True


os.register_at_fork(after_in_child=_in_child)


# -- what rooms above say of themselves

explained: list[Callable[[], list[str]]] = []
"""What rooms above add to ``rdmarpc.explain``: each gives lines for people. Called in any thread."""
remote_classes: list[type[torch.Tensor]] = []
"""Those of tensors that lie at workers; empty until there may be some."""
refusals: list[Callable[[str], None]] = []


def lies_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory in this process."""
    return type(tensor) in remote_classes


def refuse(why: str) -> None:
    """What happens is no operation of torch: a capture that is under way (``graphed``) cannot repeat it."""
    for each in refusals:
        each(why)
