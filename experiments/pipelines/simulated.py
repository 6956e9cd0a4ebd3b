"""How long a batch takes where nothing but layers takes time, by the agenda that the workers use (``graph/work/tasks``).

A chain of levels, each at one worker; messages take no time. What is longer than the theory of a schedule's paper is the
order: a task that has begun is not interrupted, and the caller's thread has the loss beside what else it has.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rdmarpc.graph.schedules.rounds import Rounds
from rdmarpc.graph.wire.header import MicroBatch
from rdmarpc.graph.work.tasks import FIRST, SECOND, WHOLE, Agenda, Batch, Task


@dataclass(frozen=True)
class Level:
    """``owner``: its worker, 0 is the caller. ``forward``, ``inputs`` and ``parameters``: how long a forward takes, and a
    backward for gradients of inputs and of parameters. ``sink``: no gradient goes further; then all of a split backward is its
    second half. ``backward``: gradients come to it."""

    owner: int
    forward: float = 0.0
    inputs: float = 0.0
    parameters: float = 0.0
    sink: bool = False
    backward: bool = True

    def takes(self, task: Task) -> float:
        if not task.backward:
            return self.forward
        first, second = (0.0, self.inputs + self.parameters) if self.sink else (self.inputs, self.parameters)
        return {WHOLE: self.inputs + self.parameters, FIRST: first, SECOND: second}[task.half]


def length(levels: Sequence[Level], count: int, rounds: Rounds | None = None, split: bool = False) -> float:
    """Of a batch of so many micro-batches, in the unit of the levels."""
    return _Batch(levels, count, rounds, split).length()


class _Batch:
    def __init__(self, levels: Sequence[Level], count: int, rounds: Rounds | None, split: bool) -> None:
        self.levels, self.count, self.split = levels, count, split
        owners = sorted({level.owner for level in levels} | {0})
        self.agendas = {owner: Agenda() for owner in owners}
        mine = {owner: [at for at, level in enumerate(levels) if level.owner == owner] for owner in owners}
        self.batches = {owner: Batch(1, count, len(levels), len(mine[owner]), rounds, split) for owner in owners}
        self.duties: list[Any] = [
            SimpleNamespace(
                at=mine[level.owner].index(at), level=at, backward=level.backward, segment=SimpleNamespace(number=at)
            )
            for at, level in enumerate(levels)
        ]
        self.running: dict[int, Task] = {}
        self.ends: list[tuple[float, int]] = []
        self.begun = self.returned = 0
        self.left = count * sum(1 + level.backward * (1 + split) for level in levels)

    def length(self) -> float:
        now = 0.0
        while self.left:
            self.start_all(now)
            now, owner = heapq.heappop(self.ends)
            self.end(self.running.pop(owner))
        return now

    def start_all(self, now: float) -> None:
        for owner, agenda in self.agendas.items():
            if owner in self.running:
                continue
            if owner == 0:  # between two tasks it looks whether another micro-batch may begin
                while self.begun < self.count and self.begun - self.returned < len(self.levels):
                    self.add(0, self.begun, False)
                    self.begun += 1
            task = agenda.next(0)
            if task is not None:
                self.batches[owner].ran(task)
                self.running[owner] = task
                heapq.heappush(self.ends, (now + self.levels[task.duty.level].takes(task), owner))

    def add(self, level: int, index: int, backward: bool, half: int = WHOLE) -> None:
        owner = self.levels[level].owner
        run: Any = SimpleNamespace(
            micro=MicroBatch(index, self.count, len(self.levels)), sequence=1 + index, batch=self.batches[owner]
        )
        self.agendas[owner].add(Task(run, self.duties[level], backward, 0, half))

    def end(self, task: Task) -> None:
        level, index = task.duty.level, task.run.micro.number
        self.left -= 1
        if task.half == SECOND:
            return
        if not task.backward:
            last = level + 1 == len(self.levels)
            self.add(*((level, index, True, self.half) if last else (level + 1, index, False)))
            return
        if task.half == FIRST:
            self.add(level, index, True, SECOND)
        if level and self.levels[level - 1].backward:
            self.add(level - 1, index, True, self.half)
        else:
            self.returned += 1

    @property
    def half(self) -> int:
        return FIRST if self.split else WHOLE
