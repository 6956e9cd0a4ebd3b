"""The worker that this process is, and what the rooms below ``calls`` may know of it and of its calls.

``current()`` is the whole agent (``calls/agent``), for rooms that need more of it than ``Agent`` has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from . import forked
from .worker_info import WorkerInfo

_NOT_INITIALIZED = "RPC has not been initialized. Call rdmarpc.init_rpc first."


class Peer(Protocol):
    """The worker that a call was made to."""

    @property
    def worker(self) -> int:
        """The worker's number."""


class Call(Protocol):
    """A call under way, or over. The code that started it may read all of this from any thread."""

    keep: Any
    """Objects that are kept alive until the answer has come, however late."""
    expired: bool
    """Whether it was given up. The answer may still come."""
    created: bool
    """Whether it was to create a value (``remote``), and the owner has done so."""
    fork: Callable[[], Any] | None
    """A weak reference to the reference of that value."""

    @property
    def done(self) -> bool:
        """Whether the answer is there."""

    @property
    def deadline(self) -> float | None:
        """When the call times out (``time.monotonic``); ``None``: never."""

    @property
    def link(self) -> Peer | None:
        """The link by which it was sent; ``None`` if it could not be sent."""

    @property
    def future(self) -> torch.futures.Future[Any] | None:
        """The future of the result, if the call was started with one."""

    @property
    def refused(self) -> bool:
        """Whether a call with a future was answered by an error, not merely given up."""

    def result(self) -> Any:
        """Wait for the answer of a call without a future, once. Raises the error of the call."""

    def expose(self) -> None:
        """Note that users' code may depend on the completion of the call's future from now on."""

    def abandon(self) -> None:
        """Give up a call without a future, whose answer nobody wants any more."""


class Awaited(Protocol):
    @property
    def done(self) -> bool: ...


class Waits(Protocol):
    """Waiting that makes progress."""

    def wait_for(self, awaited: Awaited, deadline: float | None = None) -> bool:
        """Wait until ``awaited.done``; ``False`` if ``deadline`` (``time.monotonic``) passed first."""


class Group(Protocol):
    """The workers by their numbers."""

    def worker(self, number: int) -> WorkerInfo:
        """The worker of that number. ``PeerLost`` for one that had left before anything was known of it here."""

    def name_of(self, number: int) -> str:
        """A worker's name, for texts."""


class Agent(Protocol):
    """A worker that makes calls. Thread-safe."""

    @property
    def name(self) -> str: ...

    @property
    def number(self) -> int:
        """This worker's number in the group; no other worker ever gets it."""

    @property
    def me(self) -> WorkerInfo: ...

    @property
    def group(self) -> Group: ...

    @property
    def progress(self) -> Waits: ...

    def resolve(self, worker: Any) -> WorkerInfo:
        """The worker that a name, a rank or a ``WorkerInfo`` means."""

    def start(
        self, to: WorkerInfo, function: Any, args: Any, kwargs: Any, timeout: float, flags: int = 0, future: bool = False
    ) -> Call:
        """Send a call. ``timeout`` in seconds: -1 = the default, 0 = none; ``flags``: see ``links/frames``. Raises what
        pickling raises; all other errors are the answer's."""

    def call(self, to: WorkerInfo, function: Any, args: Any, kwargs: Any, timeout: float, *, control: bool = False) -> Any:
        """Call and wait. ``control``: of our own, not counted as a user's."""

    def call_async(
        self, to: WorkerInfo, function: Any, args: Any, kwargs: Any, timeout: float, *, control: bool = False
    ) -> torch.futures.Future[Any]: ...


class Forkable(Protocol):
    def forked(self) -> object:
        """In a forked child, let go of what the parent owns, without a lock. Returns what has to be kept for ever."""


_current: Any = None
_parents: list[object] = []
"""The agents of this forked child's ancestors. They are kept alive here, because the child must not give back what they own."""
_inherited = False
"""Whether this process was forked while RPC was up, and has not used RPC itself since."""


def current() -> Any:
    """This process's agent. ``RuntimeError`` before ``init_rpc``, after ``shutdown``, and in a forked child."""
    if _current is None:
        raise RuntimeError(forked.TEXT if _inherited else _NOT_INITIALIZED)
    return _current


def require(message: str) -> Any:
    """As ``current``, with the caller's text for the error."""
    if _current is None:
        raise RuntimeError(forked.TEXT if _inherited else message)
    return _current


def found() -> Any:
    """This process's agent; ``None`` if there is none."""
    return _current


def set_current(agent: Forkable | None) -> None:
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
