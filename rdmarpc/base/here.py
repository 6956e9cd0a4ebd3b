"""The worker that this process is, for all rooms: ``calls`` makes it, and sets it here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import forked

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
        raise RuntimeError(forked.TEXT if _inherited else message)
    return _current


def found() -> Any:
    """This process's agent; ``None`` if there is none."""
    return _current


def set_current(agent: Any) -> None:
    """``None``: there is none any more. In a forked child ``agent.forked()`` lets go of what the parent owns, without a lock,
    and returns what has to be kept for ever."""
    global _current, _inherited
    _current, _inherited = agent, False


def _in_child() -> None:
    global _current, _inherited
    if _current is not None:
        _parents.append(_current.forked())
        _current, _inherited = None, True


forked.in_child(_in_child)

explained: list[Callable[[], list[str]]] = []
"""What rooms above add to ``rdmarpc.explain``: each gives lines for people. Called in any thread."""
