"""A timeline: what both sides of calling note, and the trace events that this becomes.

``Calls`` is the observer (``Post.observer``) of an agent that records. What is noted are facts of one moment or of one span on
one thread, as tuples; which of them belong to one call is found out when they are written down. A call is named by its caller's
rank and number at both ends. Times: ns of ``time.monotonic_ns``.

    ("sent", rank, call, track, begin, end, kind, future, function, peer, bytes)    the calling side: pickled and written
    ("waited", rank, call, track, begin, end)                                the same: in ``Future.wait``
    ("done", rank, call, track, begin, end, error)                           the same: the answer read back
    ("came", rank, call, track, at, caller)                                  the called side: read from the ring
    ("served", rank, call, track, begin, unpickled, returned, end, function)
    ("replied", rank, call, track, begin, end, bytes, error)                 the same: pickled and written, whenever that was
    ("span", rank, 0, track, begin, end, name, category, about)              part of no call

``trace_of`` makes of them Chrome's trace events, which Perfetto reads: spans, arrows and names. One process track a worker
(``pid`` is its rank), one thread track a thread. A blocking call is a span on its thread around ``send``, ``wait`` and
``unpack``; a call with a future is an asynchronous span, with ``send``, ``wait`` and ``unpack`` on the threads where they
happened. At the called side a request is ``queued`` (asynchronous), then a span on the thread that serves it around
``unpickle``, ``run`` and ``reply``; the reply of an asynchronous function stands alone. Arrows: from ``send`` to the serving
span, from ``reply`` to ``unpack``.

Format: "Trace Event Format" (Google, 2016). ``ts`` and ``dur`` in us, of the monotonic clock, which the workers of one host
share. Those of several hosts are brought together by what the arrows say (``clock_offsets``).
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
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
        if serving.unpickled or serving.returned:  # else it waits for its references, and another thread may serve it by now
            self.note("served", *serving.key, *serving.spans(monotonic_ns()))
        if self.serving_now.get(serving.key) is serving:
            del self.serving_now[serving.key]
        self.message.serving = serving.outer


# -- trace events

Event = dict[str, Any]
Trace = dict[str, Any]
"""``{"traceEvents": [...], "otherData": {"workers": [...]}}``"""

_INSIDE = 1
"""ns: how far inside of its span an arrow begins or ends."""


def trace_of(worker: dict[str, Any], records: Iterable[tuple[Any, ...]], tracks: dict[int, str], last: int) -> Trace:
    """``worker``: what is known of it: ``rank``, ``name``, ``pid``, ``host``, ``wall`` (ns from the monotonic clock to that on
    the wall), ``dropped``. ``tracks``: number -> thread name. ``last``: until when calls are shown that did not end."""
    rank = worker["rank"]
    events: list[Event] = [
        _named("process_name", rank, 0, f"{worker['name']} (process {worker['pid']})"),
        {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}},
        *[_named("thread_name", rank, track, name) for track, name in sorted(tracks.items())],
    ]
    calls: dict[tuple[int, int], dict[str, tuple[Any, ...]]] = {}
    for record in records:
        kind, caller, call, *fields = record
        if kind == "waited":
            events.append(_span("wait", "wait", rank, *fields, call=f"{caller}.{call}"))
        elif kind == "span":
            track, begin, end, name, category, about = fields
            events.append(_span(name, category, rank, track, begin, end, **about))
        else:
            calls.setdefault((caller, call), {})[kind] = tuple(fields)
    for (caller, call), noted in calls.items():
        known = f"{caller}.{call}"
        if "sent" in noted:
            events.extend(_calling(rank, known, noted["sent"], noted.get("done"), last))
        if "came" in noted or "served" in noted or "replied" in noted:
            events.extend(_called(rank, known, noted, last))
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"workers": [worker]}}


def _calling(rank: int, known: str, sent: tuple[Any, ...], done: tuple[Any, ...] | None, last: int) -> Iterator[Event]:
    track, begin, written, kind, future, function, peer, carried = sent
    arguments = {"call": known, "to": peer, "sent": carried}
    if done is None:
        arguments["unfinished"] = True
        back, end = last, last
    else:
        back, end = done[1], done[2]
        if done[3]:
            arguments["error"] = done[3]
    title = f"{kind} {function} -> {peer}"
    if not future:
        yield _span(title, kind, rank, track, begin, end, **arguments)
        yield _span("send", "send", rank, track, begin, written, call=known)
        yield _span("wait", "wait", rank, track, written, back, call=known)
    else:
        yield from _apart(title, kind, rank, known, begin, end, arguments)
        yield _span(f"send {function}", "send", rank, track, begin, written, call=known, sent=carried)
    yield _arrow("s", "request", rank, track, begin, known)
    if done is not None:
        yield _span("unpack", "unpack", rank, done[0], back, end, call=known)
        yield _arrow("f", "answer", rank, done[0], back, known)


def _called(rank: int, known: str, noted: dict[str, tuple[Any, ...]], last: int) -> Iterator[Event]:
    came, served, replied = noted.get("came"), noted.get("served"), noted.get("replied")
    if came is not None:
        yield from _apart("queued", "queue", rank, known, came[1], served[1] if served else last, {"call": known})
    if served is not None:
        track, begin, unpickled, returned, end, function = served
        arguments: dict[str, Any] = {"call": known}
        caller = "?"
        if came is not None:
            caller = came[2]
            arguments |= {"from": caller, "queued_us": (begin - came[1]) / 1e3}
        if replied is not None and replied[4]:
            arguments["error"] = replied[4]
        yield _span(f"{function} <- {caller}", "serve", rank, track, begin, end, **arguments)
        yield _span("unpickle", "unpickle", rank, track, begin, unpickled, call=known)
        yield _span(f"run {function}", "run", rank, track, unpickled, returned, call=known)
        yield _arrow("f", "request", rank, track, begin, known)
        until = replied[1] if replied is not None else last
        if until > end:  # an asynchronous function: no thread waits for its future
            yield from _apart(f"deferred {function}", "deferred", rank, known, returned, until, {"call": known})
    if replied is not None:
        yield _span("reply", "reply", rank, replied[0], replied[1], replied[2], call=known, sent=replied[3])
        yield _arrow("s", "answer", rank, replied[0], replied[1], known)


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _span(name: str, category: str, pid: int, tid: int, begin: int, end: int, **arguments: Any) -> Event:
    times = {"ts": begin / 1e3, "dur": max(0, end - begin) / 1e3}
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, **times, "args": arguments}


def _apart(name: str, category: str, pid: int, known: str, begin: int, end: int, arguments: dict[str, Any]) -> Iterator[Event]:
    """A span that belongs to no thread."""
    same = {"name": name, "cat": category, "pid": pid, "tid": 0, "id": f"{category} {known}"}
    yield {"ph": "b", "ts": begin / 1e3, **same, "args": arguments}
    yield {"ph": "e", "ts": max(begin, end) / 1e3, **same, "args": {}}


def _arrow(phase: str, what: str, pid: int, tid: int, at: int, known: str) -> Event:
    event = {"ph": phase, "name": what, "cat": what, "pid": pid, "tid": tid, "ts": (at + _INSIDE) / 1e3}
    return event | {"id": f"{what} {known}"} | ({"bp": "e"} if phase == "f" else {})


# -- several workers


def merge(traces: list[Trace]) -> Trace:
    """One trace of several workers' (each of one or more), on the clock of the first. Raises ``ValueError`` if a worker is
    there twice."""
    events: list[Event] = []
    workers: list[dict[str, Any]] = []
    for trace, offset in zip(traces, clock_offsets(traces)):
        workers.extend(trace["otherData"]["workers"])
        for event in trace["traceEvents"]:
            events.append(event | {"ts": event["ts"] - offset / 1e3} if offset and "ts" in event else event)
    ranks = [worker["rank"] for worker in workers]
    if twice := {rank for rank in ranks if ranks.count(rank) > 1}:
        raise ValueError(f"two of these timelines are of the worker of rank {min(twice)}: are they of one run?")
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"workers": workers}}


def clock_offsets(traces: list[Trace]) -> list[int]:
    """The nanoseconds by which each trace's clock is ahead of the first one's. 0 on the same host.

    Across hosts every call is a ping: a request arrives after it was sent, an answer likewise, so the quickest of each
    direction bound the offset from both sides, and the middle is taken (as NTP does, RFC 5905: the error is at most half of
    the two delays). Hosts that no call connects, not even through others, are brought together by their wall clocks.
    """
    hosts = [trace["otherData"]["workers"][0]["host"] for trace in traces]
    least = _quickest(traces)
    offsets: dict[int, int] = {}
    for first in range(len(traces)):
        if first in offsets:
            continue
        walls = [trace["otherData"]["workers"][0]["wall"] for trace in traces]
        offsets[first] = 0 if first == 0 else walls[0] - walls[first]
        reached = deque([first])
        while reached:
            here = reached.popleft()
            for there in range(len(traces)):
                if there in offsets:
                    continue
                if hosts[here] == hosts[there]:
                    offsets[there] = offsets[here]
                elif (here, there) in least and (there, here) in least:
                    offsets[there] = offsets[here] + round((least[here, there] - least[there, here]) / 2)
                else:
                    continue
                reached.append(there)
    return [offsets[at] for at in range(len(traces))]


def _quickest(traces: list[Trace]) -> dict[tuple[int, int], float]:
    """The least nanoseconds from the beginning of an arrow in one trace to its end in another, by their own clocks, for pairs
    of traces."""
    every = [(at, event) for at, trace in enumerate(traces) for event in trace["traceEvents"]]
    begun = {event["id"]: (at, event["ts"]) for at, event in every if event["ph"] == "s"}
    least: dict[tuple[int, int], float] = {}
    for there, event in every:
        if event["ph"] == "f" and event["id"] in begun:
            here, ts = begun[event["id"]]
            taken = (event["ts"] - ts) * 1e3
            least[here, there] = min(taken, least.get((here, there), taken))
    return least


def load(path: Path) -> Trace:
    """A trace that we wrote. Raises ``ValueError`` naming the file if it is none."""
    try:
        trace = json.loads(path.read_text())
        trace["traceEvents"], trace["otherData"]["workers"][0]["host"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{path} is no timeline of rdmarpc ({error!r})") from None
    return trace


def save(trace: Trace, path: Path) -> None:
    """Written beside, then renamed: a file of this name is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(trace))
    beside.rename(path)
