"""How many messages a step takes, and the order of tasks, over transport alone."""

from __future__ import annotations

import copy
import random
import struct
import time
from types import SimpleNamespace
from typing import Any

import torch
from cluster import Cluster, Split
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rdmarpc.graph.caller.pipeline import Part
from rdmarpc.graph.schedules.rounds import Rounds
from rdmarpc.graph.wire.header import MicroBatch
from rdmarpc.graph.work.command import STEP, TO_NONE, TO_ZERO, Command
from rdmarpc.graph.servers.updates import numbers_of
from rdmarpc.graph.work.tasks import FIRST, SECOND, WHOLE, Agenda, Batch, Task

PLACEMENT = {"0": "w1", "1": "w1", "2": "w2"}


def posts(split: Split) -> dict[str, int]:
    counts = split.cluster.ask("counters", dict.fromkeys(split.counts, ()))
    return {"w0": split.cluster.device.counters()["posts"], **{w: counter["posts"] for w, counter in counts.items()}}


def settled(split: Split) -> int:
    """All posts, when no more come: a worker gives a credit back after it has said that a command is done."""
    count, since = -1, time.monotonic()
    while time.monotonic() - since < 0.3:
        if (found := sum(posts(split).values())) != count:
            count, since = found, time.monotonic()
        time.sleep(0.02)
    return count


class Trainer:
    """A split model, its twin here, and a step of both."""

    def __init__(self, cluster: Cluster) -> None:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        self.twin = copy.deepcopy(net)
        self.split = Split(cluster, net, PLACEMENT)
        self.caller = self.split.caller
        self.optimizer = torch.optim.SGD(self.twin.parameters(), 0.1)
        for worker, count in self.split.counts.items():
            group = {**self.optimizer.defaults, "params": list(range(count))}
            cluster.ask(
                "optimizer", {worker: (1, torch.optim.SGD, self.optimizer.defaults, [group], self.caller.control.sync())}
            )
        numbers, _ = numbers_of(self.optimizer.param_groups)
        self.command = Command(STEP, 1, struct.pack(f"<{len(numbers)}d", *numbers))

    def zero(self, how: int = TO_NONE) -> None:
        for worker, count in self.split.counts.items():
            for position in range(count):
                self.caller.control.zero(worker, position, how)

    def step(self, chunks: int = 0) -> None:
        x = torch.randn(8, 16)
        if chunks:
            pieces = x.chunk(chunks)
            signature = ("part", tuple(pieces[0].shape))
            plan = self.caller.plan(signature, lambda: self.split.graph(pieces[:1]))
            self.caller.forward_backward([Part(plan, [piece], lambda out: out.pow(2).sum(), [piece]) for piece in pieces], 1)
        else:
            self.split(x).pow(2).sum().backward()
        self.caller.control.step(dict.fromkeys(self.split.counts, self.command))
        for piece in x.chunk(chunks or 1):
            self.twin(piece).pow(2).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check(self) -> None:
        self.caller.control.sync()
        for at, worker in ((0, "w1"), (2, "w2")):
            [state] = self.split.cluster.ask("state", {worker: (str(at), False, self.caller.ledger.commands)}).values()
            assert torch.equal(state["weight"], self.twin[at].weight)


def test_a_step_costs_a_worker_one_command_and_the_caller_one_report(cluster):
    trainer = Trainer(cluster)
    caller = trainer.caller
    crossing = 3 + 2  # the input and two activations; gradients of the two
    for chunks in (0, 1, 4):
        for _ in range(3):
            trainer.zero()
            trainer.step(chunks)
        trainer.check()
        before, commands = settled(trainer.split), caller.ledger.commands
        for _ in range(5):
            trainer.zero()
            trainer.step(chunks)
        trainer.check()
        assert caller.ledger.commands - commands == 5
        # Per worker STEP, and DONE of the whole batch; one more of each micro-batch from where backwards end. Every write has
        # its credit, and there is nothing else.
        reports = 2 + max(0, chunks - 1)
        made = settled(trainer.split) - before
        assert made == 5 * 2 * (max(1, chunks) * crossing + 2 + reports), chunks
    # What is not the same for all parameters of a worker goes by a command of its own.
    for of_bias in (TO_ZERO, TO_NONE):
        commands = caller.ledger.commands
        trainer.zero(TO_ZERO)
        for worker in trainer.split.counts:
            caller.control.zero(worker, 1, of_bias)
        trainer.step()
        assert caller.ledger.commands - commands == 2
        trainer.check()
    caller.close()


# -- the order of tasks, with the real ``Agenda`` and ``Batch`` and everything else in miniature


class Pipe:
    """A chain of levels, the first and the last at the caller, with ``slots`` on every edge; what can happen next is drawn."""

    def __init__(
        self,
        owners: list[int],
        count: int,
        slots: int,
        draw: random.Random,
        rounds: Rounds | None = None,
        whole: set[int] | None = None,
    ) -> None:
        """``whole``: backwards are split but at these levels, and sometimes there too."""
        self.owners, self.count, self.slots, self.draw, self.whole = owners, count, slots, draw, whole
        self.levels = len(owners)
        self.agendas = {owner: Agenda() for owner in owners}
        mine = {owner: [level for level, at in enumerate(owners) if at == owner] for owner in owners}
        self.duties = [
            SimpleNamespace(at=mine[o].index(level), level=level, backward=True, segment=SimpleNamespace(number=level))
            for level, o in enumerate(owners)
        ]
        self.batches = {owner: Batch(1, count, self.levels, len(mine[owner]), rounds, whole is not None) for owner in owners}
        # By (from level, to level): micro-batches that wait for a slot, that lie in one unseen, that hold one.
        pairs = [(a, a + 1) for a in range(self.levels - 1)] + [(a + 1, a) for a in range(self.levels - 1)]
        self.waiting: dict[tuple[int, int], list[int]] = {pair: [] for pair in pairs}
        self.landed: dict[tuple[int, int], list[int]] = {pair: [] for pair in pairs}
        self.held: dict[tuple[int, int], set[int]] = {pair: set() for pair in pairs}
        self.log: list[list[tuple[bool, int]]] = [[] for _ in owners]
        self.seconds: list[list[tuple[int, int]]] = [[] for _ in owners]
        """By level: micro-batches whose backward is finished, and how many forwards came before."""
        self.begun = 0

    def add(self, level: int, index: int, backward: bool) -> None:
        owner = self.owners[level]
        run = SimpleNamespace(micro=MicroBatch(index, self.count, self.levels), sequence=1 + index, batch=self.batches[owner])
        half = WHOLE
        if backward and self.whole is not None and (level not in self.whole or self.draw.random() < 0.3):
            half = FIRST
        self.agendas[owner].add(Task(run, self.duties[level], backward, 0, half))

    def send(self, pair: tuple[int, int], index: int) -> None:
        self.waiting[pair].append(index)
        self.fill(pair)

    def fill(self, pair: tuple[int, int]) -> None:
        while self.waiting[pair] and len(self.held[pair]) < self.slots:
            index = self.waiting[pair].pop(0)
            self.held[pair].add(index)
            self.landed[pair].append(index)

    def free(self, pair: tuple[int, int], index: int) -> None:
        if pair in self.held:
            self.held[pair].discard(index)
            self.fill(pair)

    def run(self, owner: int) -> bool:
        task: Any = self.agendas[owner].next(0)
        if task is None:
            return False
        self.batches[owner].ran(task)
        self.end(task)
        return True

    def end(self, task: Any) -> None:
        level, index = task.duty.level, task.run.micro.number
        if task.half == FIRST:
            self.agendas[self.owners[level]].add(Task(task.run, task.duty, True, 0, SECOND))
        if task.backward and task.half != FIRST:
            self.seconds[level].append((index, sum(not back for back, _ in self.log[level])))
        if task.half == SECOND:
            # What autograd has saved, of the input too, is held until then.
            self.let_go(level, index)
            return
        self.log[level].append((task.backward, index))
        if not task.backward:
            if level + 1 < self.levels:
                self.send((level, level + 1), index)
            else:
                self.add(level, index, True)
            return
        if level > 0:
            self.send((level, level - 1), index)
        if task.half == WHOLE:
            self.let_go(level, index)

    def let_go(self, level: int, index: int) -> None:
        self.free((level + 1, level), index)
        self.free((level - 1, level), index)

    def happen(self) -> bool:
        """One thing that can; ``False`` if nothing can."""
        things = [("land", pair) for pair, unseen in self.landed.items() if unseen] + [("run", o) for o in self.agendas]
        if self.begun < self.count and self.begun - len(self.seconds[0]) < self.levels:
            things.append(("begin", 0))
        self.draw.shuffle(things)
        for what, where in things:
            if what == "run" and self.run(where):  # type: ignore[arg-type]
                return True
            if what == "begin":
                self.add(0, self.begun, False)
                self.begun += 1
                return True
            if what == "land":
                unseen = self.landed[where]  # type: ignore[index]
                index = unseen.pop(self.draw.randrange(len(unseen)))
                self.add(where[1], index, where[1] < where[0])  # type: ignore[index]
                return True
        return False


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.integers(1, 9), st.integers(1, 3), st.integers(0, 1 << 32))
def test_no_order_of_events_blocks_or_breaks_1f1b(workers, count, slots, seed):
    pipe = Pipe([0, *workers, 0], count, slots, random.Random(seed))
    while pipe.happen():
        pass
    for level, log in enumerate(pipe.log):
        for backward in (False, True):
            assert [index for back, index in log if back == backward] == list(range(count)), (level, log)
        flight = most = 0
        for back, _ in log:
            flight += -1 if back else 1
            most = max(most, flight)
        assert most <= max(1, pipe.levels - level)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=5),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sets(st.integers(0, 6)),
    st.integers(0, 1 << 32),
)
def test_no_order_of_events_blocks_split_backwards(workers, count, slots, whole, seed):
    pipe = Pipe([0, *workers, 0], count, slots, random.Random(seed), None, whole)
    while pipe.happen():
        pass
    for log, seconds in zip(pipe.log, pipe.seconds):
        for backward in (False, True):
            assert [index for back, index in log if back == backward] == list(range(count))
        assert [index for index, _ in seconds] == list(range(count))
        # As many are held at every level as 1F1B holds at the first.
        assert all(begun - index <= pipe.levels for index, begun in seconds)


def test_split_backwards_fill_what_is_idle():
    """Qi et al. 2023: 1F1B has a bubble of (p - 1) (F + B + W), all of them 1, and ZB-H1 one of (p - 1) (F + B - W). It is that
    for two workers, and up to 2 longer where tasks are taken as they come, not by a table."""
    for workers, batches, longer in ((2, 4, 0), (2, 8, 0), (3, 6, 1), (4, 8, 2), (4, 16, 2)):
        owners = [*range(workers)]
        assert length(owners, batches, None) == 3 * batches + 3 * (workers - 1)
        assert length(owners, batches, None, True) == 3 * batches + (workers - 1) + longer


def ring_of(workers: int, count: int, caller: str) -> tuple[list[int], Rounds]:
    """Levels of stages that go round, by owner, and their rounds: the caller has the loss, and the first stage of each round,
    the last one, or none."""
    ring = {"first": [*range(workers)], "last": [*range(1, workers), 0], "none": [*range(1, workers + 1)]}[caller]
    before, after = caller != "first", caller != "last"
    rounds = Rounds(workers, count, {at + before: at for at in range(workers * count)})
    return [0] * before + ring * count + [0] * after, rounds


@settings(max_examples=100, deadline=None)
@given(
    st.integers(2, 4),
    st.integers(2, 3),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from(["first", "last", "none"]),
    st.integers(0, 1 << 32),
)
def test_no_order_of_events_blocks_interleaved_stages(workers, count, batches, slots, caller, seed):
    owners, rounds = ring_of(workers, count, caller)
    pipe = Pipe(owners, batches, slots, random.Random(seed), rounds)
    while pipe.happen():
        pass
    for level, log in enumerate(pipe.log):
        for backward in (False, True):
            assert [index for back, index in log if back == backward] == list(range(batches)), (level, log)


def test_interleaved_stages_take_the_time_of_the_table():
    """Narayanan et al. 2021: every stage takes 1 forward and 2 backward, and bubbles are those of one round."""
    for workers, count, batches in ((2, 2, 8), (3, 2, 6), (4, 2, 8), (4, 4, 16)):
        rounds = Rounds(workers, count, {at: at for at in range(workers * count)})
        owners = [at % workers for at in range(workers * count)]
        assert length(owners, batches, rounds) == (batches * count + workers - 1) * 3
        assert length(owners, batches, None) > (batches * count + workers - 1) * 3


def length(owners: list[int], count: int, rounds: Rounds | None, split: bool = False) -> int:
    """When the last task ends where forwards take 1 and backwards 2, a half of one 1, and nothing else takes time."""
    pipe = Pipe(owners, count, count, random.Random(0), rounds, set() if split else None)
    for index in range(count):
        pipe.add(0, index, False)
    busy: dict[int, tuple[int, Any]] = dict.fromkeys(owners, (0, None))
    now = done = 0
    while done < (3 if split else 2) * count * len(owners):
        for owner, (until, task) in busy.items():
            if task is not None and until == now:
                busy[owner], done = (now, None), done + 1
                pipe.end(task)
        for unseen, pair in ((pipe.landed[pair], pair) for pair in pipe.landed):
            while unseen:
                pipe.add(pair[1], unseen.pop(0), pair[1] < pair[0])
        for owner, (_, running) in busy.items():
            task = pipe.agendas[owner].next(0) if running is None else None
            if task is not None:
                pipe.batches[owner].ran(task)
                busy[owner] = (now + (2 if task.backward and task.half == WHOLE else 1), task)
        now += 1
        assert now < 1000
    return now - 1
