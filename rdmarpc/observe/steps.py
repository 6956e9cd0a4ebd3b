"""Steps of wrapped models in a timeline: their segments, and what accelerators compute and copy meanwhile.

Spans of threads are noted where they happen. Spans of a stream are measured by events, one in front of and one behind the
enqueued work. A thread of that row waits for the events, so no other thread does. A copy on a side stream begins when its
source is there and the copy before it is over.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..transport import RdmaError
from ..transport.peers.guard import Guard

if TYPE_CHECKING:
    from ..graph.outlets.observer import Copy
    from ..graph.plan.place import Edge

_DRAIN_S = 5.0


class Notes(Protocol):
    """The timeline in which spans are noted (``timeline.Timeline``). Tracks are the rows of the picture. Thread-safe."""

    def track(self) -> int:
        """The track of the calling thread."""

    def new_track(self, name: str, /) -> int:
        """A new track for something other than a thread, such as a stream."""

    def span(self, track: int, name: str, category: str, begin: int, end: int, about: dict[str, Any], /) -> None: ...


class Enqueued:
    """Work on a stream. It may begin when ``ready`` has come, and has ended when the function given to ``launched`` returns."""

    def __init__(self, name: str, gpu: str, about: dict[str, Any]) -> None:
        self.name, self.about, self.ready = name, about, _mark(torch.device(gpu))
        self._over: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()

    def launched(self, over: Callable[[], Any]) -> None:
        self._over.put(over)

    def wait(self) -> None:
        self._over.get()()


class Row:
    """One stream in the picture, and the thread that waits for it."""

    def __init__(self, line: Notes, name: str) -> None:
        self._line, self._track = line, line.new_track(name)
        self._queue: queue.SimpleQueue[Enqueued | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._follow, name=f"rdmarpc-timeline {name}", daemon=True)
        self._thread.start()

    def add(self, what: Enqueued) -> Enqueued:
        self._queue.put(what)
        return what

    def end(self) -> None:
        self._queue.put(None)
        self._thread.join(_DRAIN_S)

    def _follow(self) -> None:
        last, guard = 0, Guard("rdmarpc-timeline")
        while (what := self._queue.get()) is not None:
            try:
                what.ready.synchronize()
                begin = max(last, monotonic_ns())
                what.wait()
            except (RuntimeError, RdmaError):
                continue  # it never ended: the code that needed it raises that
            except BaseException as error:
                guard.note(error, "waiting for a stream")
                continue
            last = monotonic_ns()
            self._line.span(self._track, what.name, "gpu", begin, last, what.about)


def attach(line: Notes) -> Steps:
    """Record what wrapped models do from now on. One at a time."""
    from ..graph.outlets import observer  # a program that only calls does not load ``graph`` before it is recorded

    steps = observer.current = Steps(line)
    return steps


class Steps:
    """Observes the wrapped models of this process (``graph.outlets.observer``) from ``attach`` to ``end``."""

    def __init__(self, line: Notes) -> None:
        self._line = line
        self._rows: dict[str, Row] = {}
        self._lock = threading.Lock()

    def end(self) -> None:
        """Idempotent. Waits for the streams, some seconds at most."""
        from ..graph.outlets import observer

        if observer.current is self:
            observer.current = None
        with self._lock:
            rows, self._rows = list(self._rows.values()), {}
        for row in rows:
            row.end()

    @contextmanager
    def span(self, name: str, about: dict[str, Any], gpus: Sequence[str] = ()) -> Iterator[None]:
        """See ``graph.outlets.observer.Observer``."""
        there = [(gpu, self._row(gpu).add(Enqueued(name, gpu, about))) for gpu in gpus]
        begin = monotonic_ns()
        try:
            yield
        finally:
            self._line.span(self._line.track(), name, "model", begin, monotonic_ns(), about)
            for gpu, what in there:
                what.launched(_mark(torch.device(gpu)).synchronize)

    @contextmanager
    def copy(self, edge: Edge, gpu: str, sequence: int) -> Iterator[Copy]:
        """See ``graph.outlets.observer.Observer``."""
        from ..graph.outlets.observer import Copy

        row = self._row(f"{gpu} copies to {edge.target}")
        about = {"forward": sequence, "bytes": edge.nbytes}
        what, copy = row.add(Enqueued(f"{edge.kind} {edge.value} -> {edge.target}", gpu, about)), Copy()
        try:
            yield copy
        finally:
            what.launched(copy.work.wait)

    def _row(self, name: str) -> Row:
        with self._lock:
            if name not in self._rows:
                self._rows[name] = Row(self._line, name)
            return self._rows[name]


def _mark(gpu: torch.device) -> torch.Event:
    """An event behind what this thread's current stream was given."""
    event = torch.Event(gpu)
    event.record(torch.accelerator.current_stream(gpu))
    return event
