"""The order of tasks at one worker.

Invariants:
1. A task starts when the commands that come before it have been applied.
2. Every segment takes the micro-batches of a batch in their order, forward and backward. So gradients add up, statistics run
   and random numbers are drawn per segment as if they went one after another.
3. At most ``max(1, window - level)`` micro-batches are between the forward and the backward of a segment.
4. Among the tasks that may start, backwards come before forwards, and earlier sequences first.

Rules 2 to 4 are the 1F1B order (PipeDream-Flush, Megatron-LM), driven by what arrives instead of by a table: with the caller's
``window`` of as many micro-batches as the pipeline has levels, the last level alternates, and level l first runs window - l
forwards. None of them can block: what a task waits for under 2 and 3 belongs to an earlier micro-batch, and so does what holds
a slot that a message of this one waits for, as every edge carries the micro-batches in their order. By induction over the index
all of them finish, with whatever number of slots; the second one is for what outlives its micro-batch: an input that a part
keeps until the next one, a gradient that stays some parameter's ``.grad``.

Interleaved (``schedules/rounds``), 3 and 4 are others for stages: a forward starts when so many backwards have run that the
table allows it, and comes before backwards; groups of micro-batches go through the stages of a worker in turn. Nothing blocks
either: before micro-batch i in stage s the table asks for position(s, i) - ahead(s) + 1 backwards, which is never more than i
times the stages of the worker, and so many belong to earlier micro-batches.

With split backwards (``schedules/halves``) rules 1 to 4 hold for first halves. Second halves come last, so they fill what was
idle: micro-batch by micro-batch in each segment, and before a whole backward of it. At most ``window`` micro-batches are
between the forward and the second half of a segment. Nothing blocks: a second half waits for nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from ..outlets import observer
from ..schedules.rounds import Rounds
from ..wire.header import MicroBatch
from .flow import Duty, Flow


class Runs(Protocol):
    """One forward and backward at one worker: ``run.Run``."""

    flow: Flow
    sequence: int
    micro: MicroBatch
    batch: Batch | None

    def forward(self, duty: Duty, /) -> object: ...
    def backward(self, duty: Duty, /) -> None: ...
    def finish_backward(self, duty: Duty, /) -> None: ...


WHOLE, FIRST, SECOND = range(3)
"""Which half of a backward a task is."""


class Batch:
    """The micro-batches of one batch at one worker: how many have been through each of its segments. ``first``: sequence of
    the first of ``count``. ``rounds``: the batch is interleaved; ``split``: backwards run in halves where they can.
    ``counts`` takes how many cannot, and why."""

    __slots__ = (
        "_stage_backwards",
        "backwards",
        "count",
        "counts",
        "first",
        "forwards",
        "rounds",
        "seconds",
        "split",
        "window",
    )

    def __init__(
        self,
        first: int,
        count: int,
        window: int,
        duties: int,
        rounds: Rounds | None = None,
        split: bool = False,
        counts: Counter[str] | None = None,
    ) -> None:
        self.first, self.count, self.window, self.rounds, self.split = first, count, window, rounds, split
        self.counts: Counter[str] = Counter() if counts is None else counts
        self.forwards = [0] * duties
        self.backwards = [0] * duties
        self.seconds = [0] * duties
        """Second halves, those in whole backwards too."""
        self._stage_backwards = 0

    def __contains__(self, sequence: int) -> bool:
        return self.first <= sequence < self.first + self.count

    def allows(self, task: Task) -> bool:
        duty, index = task.duty, task.run.micro.number
        done = self.backwards[duty.at]
        if task.backward:
            finished = self.seconds[duty.at]
            return finished == index if task.half == SECOND else done == index and (finished == index or task.half == FIRST)
        begun = self.forwards[duty.at]
        if begun != index or not duty.backward:
            return begun == index
        stage = None if self.rounds is None else self.rounds.stages.get(duty.segment.number)
        if self.rounds is None or stage is None:
            return begun - done < max(1, self.window - duty.level) and begun - self.seconds[duty.at] < max(1, self.window)
        return self.rounds.position(stage, index, self.count) - self._stage_backwards < self.rounds.ahead(stage)

    def ran(self, task: Task) -> None:
        at = task.duty.at
        if not task.backward:
            self.forwards[at] += 1
            return
        if task.half != SECOND:
            self.backwards[at] += 1
        if task.half != FIRST:
            self.seconds[at] += 1
        if self.rounds is not None and task.duty.segment.number in self.rounds.stages:
            self._stage_backwards += 1

    def turn(self, task: Task) -> tuple[int, int, int, int]:
        """The lowest one starts first."""
        index = task.run.micro.number
        stage = None if self.rounds is None else self.rounds.stages.get(task.duty.segment.number)
        if task.half == SECOND:
            return 2, task.run.sequence, 0, 0
        if self.rounds is None or stage is None:
            # Interleaved, this is no stage: others wait for it, and it takes no time.
            return (0 if task.backward else 1) - 2 * (self.rounds is not None), task.run.sequence, 0, 0
        return int(task.backward), index // self.rounds.workers, -stage if task.backward else stage, index


@dataclass(slots=True, eq=False)
class Task:
    """A segment whose inputs (backward: whose gradients) are here; it may start once ``commands`` commands have been
    applied. ``half``: of a backward."""

    run: Runs
    duty: Duty
    backward: bool
    commands: int
    half: int = WHOLE

    def turn(self) -> tuple[int, int, int, int]:
        """The lowest one starts first."""
        batch = self.run.batch
        return (0 if self.backward else 1, self.run.sequence, 0, 0) if batch is None else batch.turn(self)

    @property
    def way(self) -> str:
        return "weight gradients" if self.half == SECOND else "backward" if self.backward else "forward"

    def __str__(self) -> str:
        return f"{self.way} of {self.duty.segment}"

    def start(self) -> None:
        go = self.run.finish_backward if self.half == SECOND else self.run.backward if self.backward else self.run.forward
        seen = observer.current
        if seen is None:
            go(self.duty)
            return
        segment = self.duty.segment
        about = {"forward": self.run.sequence, "segment": str(segment)}
        with seen.span(f"{self.way} segment {segment.number}", about, self.run.flow.gpus):
            go(self.duty)


class Agenda:
    """The tasks of one worker. Belongs to one thread."""

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        self._tasks: list[Task] = []

    def add(self, task: Task) -> None:
        self._tasks.append(task)

    def next(self, commands: int) -> Task | None:
        """Take the task that is to start now, after so many commands."""
        best: Task | None = None
        for task in self._tasks:
            if task.commands > commands or (task.run.batch is not None and not task.run.batch.allows(task)):
                continue
            if best is None or task.turn() < best.turn():
                best = task
        if best is not None:
            self._tasks.remove(best)
        return best

    def forget(self, run: Runs) -> None:
        """Its tasks never start."""
        self._tasks = [task for task in self._tasks if task.run is not run]

    def clear(self) -> None:
        self._tasks.clear()


ALONE = MicroBatch(0, 0, 0)
"""A forward of its own."""
