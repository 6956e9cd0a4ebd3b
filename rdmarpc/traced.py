"""Both sides of calling, with everything they do noted for a timeline.

An agent that records has its ``caller`` and ``callee`` turned into these classes, and back at the end (their class is their
state, and nothing of this is on the way of a call when none records). What is noted are facts of one moment or of one span on
one thread, as tuples; which of them belong to one call is found out when they are written down (``trace_events``). A call is
named by its caller's rank and number at both ends. Times: ns of ``time.monotonic_ns``.

    ("sent", rank, call, track, begin, end, kind, future, function, peer, bytes)    the calling side: pickled and written
    ("waited", rank, call, track, begin, end)                                the same: in ``Future.wait``
    ("done", rank, call, track, begin, end, error)                           the same: the answer read back
    ("came", rank, call, track, at, caller)                                  the called side: read from the ring
    ("served", rank, call, track, begin, unpickled, returned, end, function)
    ("span", rank, 0, track, begin, end, name, category, about)      part of no call, see ``traced_steps``
    ("replied", rank, call, track, begin, end, bytes, error)                 the same: pickled and written, whenever that was
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import torch

from .bulks import Kept
from .callee import Callee
from .caller import Caller
from .frames import LONE, REQUEST, RESPONSE, Frame
from .future import Answer, Future, Pending
from .grad_context import Context
from .link import Link
from .profiled import kind_of, name_of
from .tensors import Outgoing, traffic

if TYPE_CHECKING:
    from .timeline import Timeline


class Message(threading.local):
    """What the message that this thread is about to send carries, and the request that it serves."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self.serving: Serving | None = None


class Serving:
    """A request that a thread serves. Written by that thread."""

    def __init__(self, rank: int, call: int, track: int) -> None:
        self.key, self.track = (rank, call), track
        self.begin = monotonic_ns()
        self.unpickled = self.returned = 0
        self.function = "?"

    @property
    def begun(self) -> bool:
        """Whether it was unpickled, or has failed before."""
        return bool(self.unpickled or self.returned)

    def spans(self, end: int) -> tuple[Any, ...]:
        returned = self.returned or end
        return self.begin, self.unpickled or returned, returned, end, self.function


def _inline(nbytes: int) -> dict[str, int]:
    """The traffic (``tensors.traffic``) of a message with one small tensor, or none."""
    return {"inline": nbytes, "direct": 0, "read": 0, "handed": 0}


def _short(values: Sequence[Any]) -> dict[str, int]:
    """What a message carried that did not go by ``Caller.send``: one small tensor has a shorter way."""
    lone = len(values) == 1 and type(values[0]) is torch.Tensor
    nbytes = values[0].numel() * values[0].element_size() if lone else 0
    return _inline(nbytes) | {"tensors": int(lone), "pickle": 0}


class TracedCaller(Caller):
    timeline: Timeline

    def request(
        self,
        link: Link,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        timeout: float,
        flags: int,
        future: bool,
        rref: int,
        fork: int,
        context: Context | None,
    ) -> Pending:
        line = self.timeline
        line.message.bytes = {}
        begin = monotonic_ns()
        pending = super().request(link, function, args, kwargs, timeout, flags, future, rref, fork, context)
        end = monotonic_ns()
        bytes_sent, line.message.bytes = line.message.bytes or _short(args), {}
        what = kind_of(function, flags, future), future, name_of(function, args), link.name, bytes_sent
        line.note("sent", line.rank, pending.call, begin, end, *what)
        if pending.future is not None:
            pending.future.__class__ = TracedFuture
        return pending

    def send(
        self,
        link: Link,
        kind: int,
        call: int,
        flags: int,
        out: Outgoing,
        function: bytes,
        payload: bytes,
        keep: Pending | Kept | None,
        dropped: Callable[[], None] | None = None,
    ) -> Any:
        if kind == REQUEST or kind == RESPONSE:
            carried = _inline(len(out.data)) if flags & LONE else traffic(out)
            held = self.timeline.message.bytes
            held.update(carried, tensors=out.tensors, pickle=len(payload))
        return super().send(link, kind, call, flags, out, function, payload, keep, dropped)

    def decode(self, pending: Pending, answer: Answer) -> Any:
        error = ""
        begin = monotonic_ns()
        try:
            return super().decode(pending, answer)
        except BaseException as reason:
            error = type(reason).__name__
            raise
        finally:
            self.timeline.note("done", self.timeline.rank, pending.call, begin, monotonic_ns(), error)


class TracedFuture(Future):
    def wait(self) -> Any:
        caller, pending = self._caller, self._pending
        if pending is None or not isinstance(caller, TracedCaller):
            return super().wait()
        begin = monotonic_ns()
        try:
            return super().wait()
        finally:
            caller.timeline.note("waited", caller.timeline.rank, pending.call, begin, monotonic_ns())


class TracedCallee(Callee):
    timeline: Timeline

    def accept(self, link: Link, frame: Frame) -> None:
        self.timeline.note("came", link.rank, frame.call, monotonic_ns(), link.name)
        super().accept(link, frame)

    def _serve(self, link: Link, frame: Frame, *references: Any) -> None:
        line = self.timeline
        outer, serving = line.message.serving, Serving(link.rank, frame.call, line.track())
        line.message.serving = line.serving[serving.key] = serving
        try:
            super()._serve(link, frame, *references)
        finally:
            if serving.begun:  # else it was held, and another thread may be serving it by now
                line.note("served", link.rank, frame.call, *serving.spans(monotonic_ns()))
            if line.serving.get(serving.key) is serving:
                del line.serving[serving.key]
            line.message.serving = outer

    def _decode(self, link: Link, frame: Frame, *references: Any) -> Any:
        decoded = super()._decode(link, frame, *references)
        serving = self.timeline.message.serving
        if serving is not None:
            serving.unpickled, serving.function = monotonic_ns(), name_of(*decoded[:2])
        return decoded

    def _reply(self, link: Link, call: int, control: int, answer: list[Any], *rest: Any) -> None:
        begin = self._returned(link, call)
        short = _short(answer)
        super()._reply(link, call, control, answer, *rest)
        self._note_reply(link, call, begin, "", short)

    def _fail(self, link: Link, call: int, control: int, error: BaseException, rref: int | None) -> None:
        begin = self._returned(link, call)
        super()._fail(link, call, control, error, rref)
        if rref is None:  # else it has replied
            self._note_reply(link, call, begin, type(error).__name__, {})

    def _returned(self, link: Link, call: int) -> int:
        """The function of this call has ended; on its own thread or, of an asynchronous one, on any."""
        now = monotonic_ns()
        self.timeline.message.bytes = {}
        serving = self.timeline.message.serving
        if serving is not None and serving.key == (link.rank, call):
            serving.returned = serving.returned or now
        return now

    def _note_reply(self, link: Link, call: int, begin: int, error: str, short: dict[str, int]) -> None:
        """``short``: what was carried if the reply did not go by ``Caller.send``."""
        message = self.timeline.message
        carried, message.bytes = message.bytes or short, {}
        self.timeline.note("replied", link.rank, call, begin, monotonic_ns(), carried, error)
