"""Where the time of a batch goes: the tasks that its end waited for, one after another, and what lay between them.

A task starts when the one before it at its worker has ended, and what it is given has been made. Whichever ended last is what
it waited for. So from the last task a way leads back to the first one, and its parts add up to the batch.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from rdmarpc.graph.outlets import observer

FORWARD, BACKWARD, SECOND = "forward", "backward", "weight gradients"
PARTS = ("layers", "computing", "off_core", "between", "crossing", "ends")
"""``layers``: what they sleep; ``computing``: processor time of tasks; ``off_core``: the rest of tasks (a core that another
process had, a sleep that took longer); ``between`` a task and the next one at its worker: the agenda, messages sent and taken;
``crossing``: from the end of a task, or what it has sent before that, to the start of one at another worker; ``ends``: before
the first task and after the last one."""


@dataclass(frozen=True)
class Span:
    """A task that ran. ``level`` of its segment, ``index`` of its micro-batch; ``begin``, ``end``: seconds, by a clock that
    all processes of a host share; ``processor``: seconds that its thread computed."""

    worker: int
    way: str
    level: int
    index: int
    begin: float
    end: float
    processor: float


class Recorder:
    """The observer of one process (``graph/outlets/observer``)."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.spans: list[Span] = []
        """``index`` is the sequence of the micro-batch here."""

    @contextmanager
    def span(self, name: str, about: dict[str, Any], gpus: Sequence[str] = ()) -> Iterator[None]:
        begin, computed = time.perf_counter(), time.thread_time()
        yield
        end, now = time.perf_counter(), time.thread_time()
        way, _, segment = name.partition(" segment ")
        found = re.search(r" level (\d+)", about.get("segment", ""))
        if segment and found:
            self.spans.append(Span(self.worker, way, int(found[1]), about["forward"], begin, end, now - computed))

    def copy(self, edge: Any, gpu: str, sequence: int) -> AbstractContextManager[observer.Copy]:
        raise NotImplementedError("this experiment has no accelerators")


def watch(worker: int) -> None:
    """Record what this process runs from now on."""
    observer.current = Recorder(worker)


def watched() -> list[Span]:
    """What it has run since; nothing is recorded any more."""
    seen, observer.current = observer.current, None
    assert isinstance(seen, Recorder)
    return seen.spans


def parts(spans: list[Span], began: float, ended: float, sleeps: Callable[[Span], float]) -> dict[str, float]:
    """Seconds of a batch that began and ended then, by ``PARTS``. ``sleeps``: for how long the layers of a task do."""
    found = dict.fromkeys(PARTS, 0.0)
    way = critical_way(spans)
    found["ends"] = way[0].begin - began + ended - way[-1].end
    for span, after in zip(way, [*way[1:], None]):
        # What is sent before the end of a task may be used before it.
        takes = (span.end if after is None else min(span.end, after.begin)) - span.begin
        computing = min(span.processor, takes)
        found["layers"] += sleeps(span)
        found["computing"] += computing
        found["off_core"] += takes - sleeps(span) - computing
        if after is not None:
            found["between" if after.worker == span.worker else "crossing"] += after.begin - span.begin - takes
    return found


def critical_way(spans: list[Span]) -> list[Span]:
    """The tasks that the last one waited for, the first one first. ``spans``: of a chain of levels."""
    first = min(span.index for span in spans)
    of = {(span.way, span.level, span.index - first): span for span in spans}
    levels = max(span.level for span in spans) + 1
    sink = min(span.level for span in spans if span.way == BACKWARD)
    earlier: dict[Span, Span] = {}
    for worker in {span.worker for span in spans}:
        mine = sorted((span for span in spans if span.worker == worker), key=lambda span: span.begin)
        earlier |= dict(zip(mine[1:], mine))
    way = [max(spans, key=lambda span: span.end)]
    while True:
        span = way[-1]
        index = span.index - first
        given = {
            FORWARD: of.get((FORWARD, span.level - 1, index)) or of.get((BACKWARD, sink, index - levels)),
            BACKWARD: of.get((BACKWARD, span.level + 1, index)) or of.get((FORWARD, span.level, index)),
            SECOND: of.get((BACKWARD, span.level, index)),
        }[span.way]
        before = [each for each in (given, earlier.get(span)) if each is not None]
        if not before:
            return way[::-1]
        way.append(max(before, key=lambda each: each.end))
