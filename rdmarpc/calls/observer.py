"""The events of a call that an observer is told of. Each side of calling looks once at its ``observer``, usually ``None``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..links.frames import Frame
from ..links.ring import Link
from .pending import Answer, Pending

Noted = tuple[int, dict[str, int]]
"""The time when a function ended, and the byte counts of its answer, if ``packed`` is not called for it."""


class Request(Protocol):
    """A request that is being served."""

    link: Link
    call: int


class Calling(Protocol):
    """Sees the calling side."""

    def begin(self) -> int:
        """A call begins on this thread. The time, for ``sent``."""

    def sent(self, begin: int, pending: Pending, function: Any, args: Sequence[Any], flags: int, future: bool) -> None:
        """The call's request was pickled and written."""

    def waiting(self, wait: Callable[[], None], pending: Pending) -> None:
        """``wait()`` for a future of this thread's."""

    def reading(self, decode: Callable[[Pending, Answer], Any], pending: Pending, answer: Answer) -> Any:
        """``decode(pending, answer)``: an answer is read back."""


class Serving(Protocol):
    """Sees the called side."""

    def came(self, link: Link, frame: Frame) -> None:
        """A request was read from the ring."""

    def serving(self, request: Request) -> None:
        """The request begins on this thread, or goes on."""

    def unpickled(self, request: Request, function: Any, args: Sequence[Any]) -> None: ...

    def returned(self, request: Request, values: Sequence[Any] | None) -> Noted:
        """The request's function has ended: on its own thread or, if it is asynchronous, on any thread. The answer will be
        ``values`` (one value), or (``None``) an error."""

    def replied(self, request: Request, noted: Noted, error: str) -> None:
        """The request was answered. ``error``: the name of the error's type, if the answer is one."""

    def served(self, request: Request) -> None:
        """This thread has finished its work on the request."""


class Observer(Calling, Serving, Protocol):
    """Sees both sides of calls."""


class Recorder(Protocol):
    """Records a whole run."""

    def gather(self, deadline: float | None) -> None:
        """Bring the records of all workers together. Called in a graceful shutdown, when no call is under way any more."""

    def close(self) -> None:
        """This worker has ended."""
