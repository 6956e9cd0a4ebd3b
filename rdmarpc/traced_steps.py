"""What wrapped models do while a timeline is recorded: their segments, and what accelerators compute and copy meanwhile.

Spans of threads are taken where they happen. A stream is asked by events: one in front of and one behind what was enqueued,
for which a thread of that row waits, so nobody else does. A copy on a side stream begins when its source is there and the copy
before it is over. The methods of ``graph`` are replaced while a timeline records, in this process; otherwise nothing of this is
on their way.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import torch

from .graph.caller import Caller
from .graph.outlet import Target
from .graph.stage import Pass, Stage
from .graph.tasks import Task
from .transport import RdmaError
from .transport.channel import DONE, Work
from .transport.guard import Guard

if TYPE_CHECKING:
    from .timeline import Timeline

_DRAIN_S = 5.0


class Enqueued:
    """Something on a stream: it may begin when ``ready`` has come, and has ended when what ``launched`` was given returns."""

    def __init__(self, name: str, gpu: str, about: dict[str, Any]) -> None:
        self.name, self.about, self.ready = name, about, _mark(torch.device(gpu))
        self._over: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()

    def launched(self, over: Callable[[], Any]) -> None:
        self._over.put(over)

    def wait(self) -> None:
        self._over.get()()


class Row:
    """One stream in the picture, and the thread that waits for it."""

    def __init__(self, line: Timeline, name: str) -> None:
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
                continue  # it never ended: whoever needed it says so
            except BaseException as error:
                guard.note(error, "waiting for a stream")
                continue
            last = monotonic_ns()
            self._line.span(self._track, what.name, "gpu", begin, last, what.about)


class Steps:
    """While it lasts, wrapped models of this process are recorded. One at a time."""

    def __init__(self, line: Timeline) -> None:
        self._line = line
        self._rows: dict[str, Row] = {}
        self._lock = threading.Lock()
        methods: list[tuple[Any, str]] = [(Task, "start"), (Target, "write")]
        methods += [(Caller, "forward"), (Caller, "exchange"), (Caller, "exchange_gradients")]
        self._originals = [(owner, name, getattr(owner, name)) for owner, name in methods]
        start, write, forward, exchange, back = (original for _, _, original in self._originals)

        def task(task: Task) -> None:
            way = "backward" if task.backward else "forward"
            about = {"forward": task.run.sequence, "segment": str(task.duty.segment)}
            self._around(lambda: start(task), f"{way} segment {task.duty.segment.number}", about, task.run.flow.gpus)

        def step(caller: Caller, *args: Any) -> Any:
            return self._around(lambda: forward(caller, *args), "model", {})

        def there_and_back(caller: Caller, run: Pass, stage: Stage, tensors: Any) -> Any:
            return self._around(lambda: exchange(caller, run, stage, tensors), "wait for workers", {"forward": run.sequence})

        def gradients(caller: Caller, run: Pass, stage: Stage, grads: Any) -> Any:
            about = {"forward": run.sequence}
            return self._around(lambda: back(caller, run, stage, grads), "wait for workers' backward", about)

        for (owner, name, _), new in zip(self._originals, (task, self._writer(write), step, there_and_back, gradients)):
            setattr(owner, name, new)

    def end(self) -> None:
        """Idempotent. Waits for the streams, some seconds at most."""
        for owner, name, original in self._originals:
            setattr(owner, name, original)
        with self._lock:
            rows, self._rows = list(self._rows.values()), {}
        for row in rows:
            row.end()

    def _around(self, call: Callable[[], Any], name: str, about: dict[str, Any], gpus: tuple[str, ...] = ()) -> Any:
        there = [(gpu, self._row(gpu).add(Enqueued(name, gpu, about))) for gpu in gpus]
        begin = monotonic_ns()
        try:
            return call()
        finally:
            self._line.span(self._line.track(), name, "model", begin, monotonic_ns(), about)
            for gpu, what in there:
                what.launched(_mark(torch.device(gpu)).synchronize)

    def _writer(self, write: Callable[..., None]) -> Callable[..., None]:
        def traced(target: Target, header: Any, payload: torch.Tensor | None, timeout: float) -> None:
            edge = target.outlet.edge
            gpu = edge.origin if payload is not None and not payload.is_cpu else edge.device
            if payload is None or not gpu or not target.outlet.direct:
                write(target, header, payload, timeout)
                return
            about = {"forward": header.sequence, "bytes": edge.nbytes}
            row = self._row(f"{gpu} copies to {edge.target}")
            what = row.add(Enqueued(f"{edge.kind} {edge.value} -> {edge.target}", gpu, about))
            work: Work | None = None
            try:
                write(target, header, payload, timeout)
                work = target.work
            finally:
                what.launched(DONE.wait if work is None else work.wait)

        return traced

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
