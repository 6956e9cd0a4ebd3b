"""Both sides of calling, with everything they do noted for a timeline.

``Calls`` is the observer (``observer``) of an agent that records. What is noted are facts of one moment or of one span on one
thread, as tuples; which of them belong to one call is found out when they are written down (``events``). A call is named
by its caller's rank and number at both ends. Times: ns of ``time.monotonic_ns``.

    ("sent", rank, call, track, begin, end, kind, future, function, peer, bytes)    the calling side: pickled and written
    ("waited", rank, call, track, begin, end)                                the same: in ``Future.wait``
    ("done", rank, call, track, begin, end, error)                           the same: the answer read back
    ("came", rank, call, track, at, caller)                                  the called side: read from the ring
    ("served", rank, call, track, begin, unpickled, returned, end, function)
    ("span", rank, 0, track, begin, end, name, category, about)      part of no call
    ("replied", rank, call, track, begin, end, bytes, error)                 the same: pickled and written, whenever that was
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Any

import torch

from ..calls.callee import Answering
from ..calls.pending import Answer, Pending
from ..calls.profiled import kind_of, name_of
from ..gradients.waves import deliver
from ..links.frames import GRADIENTS, LONE, REQUEST, RESPONSE, Frame
from ..links.ring import Link
from ..message.tensors import Outgoing, traffic

_LIMIT = 300_000


class Message(threading.local):
    """The byte counts of the message that this thread is about to send, and the request that it serves."""

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
        self.outer: Serving | None = None
        """The request that this thread was serving when this one began; ``None``: none."""

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
    """The byte counts of a message that did not go by ``Post.send``, as one small tensor does not."""
    lone = len(values) == 1 and type(values[0]) is torch.Tensor
    nbytes = values[0].numel() * values[0].element_size() if lone else 0
    return _inline(nbytes) | {"tensors": int(lone), "pickle": 0}


class Calls:
    """The facts of one worker, the last ``_LIMIT`` of them: ``Post.observer``, which both sides of calling look at once.
    Thread-safe; any thread may be in here when the recording ends."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.message = Message()
        self.serving_now: dict[tuple[int, int], Serving] = {}
        """The requests whose functions run."""
        self._records: deque[tuple[Any, ...]] = deque(maxlen=_LIMIT)
        self._count = itertools.count()
        self._tracks: dict[int, str] = {}
        self._numbers = itertools.count(1)
        self._local = threading.local()

    def note(self, kind: str, rank: int, call: int, *fields: Any) -> None:
        """One fact, on the track of this thread."""
        next(self._count)
        self._records.append((kind, rank, call, self.track(), *fields))

    def span(self, track: int, name: str, category: str, begin: int, end: int, about: dict[str, Any]) -> None:
        """Something that is part of no call, on any track."""
        next(self._count)
        self._records.append(("span", self.rank, 0, track, begin, end, name, category, about))

    def track(self) -> int:
        """The number of this thread."""
        try:
            return self._local.track
        except AttributeError:
            track = self._local.track = self.new_track(threading.current_thread().name)
            return track

    def new_track(self, name: str) -> int:
        """A number for what is no thread."""
        track = next(self._numbers)
        self._tracks[track] = name
        return track

    # -- the calling side

    def sending(
        self, request: Callable[..., Pending], link: Link, function: Any, args: Any, kwargs: Any, limit: float, *more: Any
    ) -> Pending:
        """``request(link, function, ...)``: a call is pickled and written."""
        self.message.bytes = {}
        begin, (flags, future, *_) = monotonic_ns(), more
        pending = request(link, function, args, kwargs, limit, *more)
        end = monotonic_ns()
        bytes_sent, self.message.bytes = self.message.bytes or _short(args[1] if function is deliver else args), {}
        what = kind_of(function, flags, future), future, name_of(function, args), pending.link.name, bytes_sent
        self.note("sent", self.rank, pending.call, begin, end, *what)
        return pending

    def packed(self, kind: int, flags: int, out: Outgoing, nbytes: int) -> None:
        """A message of ``kind`` goes out on this thread, with a pickle of so many bytes."""
        if kind in (REQUEST, RESPONSE, GRADIENTS):
            carried = _inline(len(out.data)) if flags & LONE else traffic(out)
            self.message.bytes.update(carried, tensors=out.tensors, pickle=nbytes)

    def waiting(self, wait: Callable[[], None], pending: Pending) -> None:
        """``wait()`` for a future of this thread's."""
        begin = monotonic_ns()
        try:
            wait()
        finally:
            self.note("waited", self.rank, pending.call, begin, monotonic_ns())

    def reading(self, decode: Callable[[Pending, Answer], Any], pending: Pending, answer: Answer) -> Any:
        """``decode(pending, answer)``: an answer is read back."""
        error = ""
        begin = monotonic_ns()
        try:
            return decode(pending, answer)
        except BaseException as reason:
            error = type(reason).__name__
            raise
        finally:
            self.note("done", self.rank, pending.call, begin, monotonic_ns(), error)

    # -- the called side

    def came(self, link: Link, frame: Frame) -> None:
        """A request was read from the ring."""
        self.note("came", link.rank, frame.call, monotonic_ns(), link.name)

    def serving(self, request: Answering) -> None:
        """The request begins on this thread, or goes on."""
        serving = Serving(request.link.rank, request.call, self.track())
        serving.outer, self.message.serving = self.message.serving, serving
        self.serving_now[serving.key] = serving

    def unpickled(self, request: Answering, function: Any, args: Sequence[Any]) -> None:
        serving = self.message.serving
        if serving is not None:
            serving.unpickled, serving.function = monotonic_ns(), name_of(function, args)

    def replying(self, reply: Callable[[Answering, Any], None], request: Answering, answer: list[Any] | BaseException) -> None:
        """``reply(request, answer)``: the request's function has ended, on its own thread or, if it is asynchronous, on any
        thread. ``answer``: a list of one value, which it takes out, or an error."""
        begin = monotonic_ns()
        self.message.bytes = {}
        serving = self.message.serving
        if serving is not None and serving.key == (request.link.rank, request.call):
            serving.returned = serving.returned or begin
        short: dict[str, int] = {}
        error = ""
        if isinstance(answer, BaseException):
            error = type(answer).__name__
        else:
            short = _short(answer[0][1] if request.frame.kind == GRADIENTS else answer)
        reply(request, answer)
        if error and request.rref is not None:
            return  # it has replied without one
        carried, self.message.bytes = self.message.bytes or short, {}
        self.note("replied", request.link.rank, request.call, begin, monotonic_ns(), carried, error)

    def served(self, request: Answering) -> None:
        """This thread has finished its work on the request."""
        serving = self.message.serving
        if serving is None or serving.key != (request.link.rank, request.call):
            return  # it began before the recording
        if serving.begun:  # else it waits for its references, and another thread may be serving it by now
            self.note("served", *serving.key, *serving.spans(monotonic_ns()))
        if self.serving_now.get(serving.key) is serving:
            del self.serving_now[serving.key]
        self.message.serving = serving.outer
