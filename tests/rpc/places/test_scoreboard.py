"""Messages that run in another order than that of their posts: no tensor sees a difference."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from rdmarpc.places.scoreboard import Entry, Scoreboard


class Messages:
    """Drawn messages over a few tensors, some of them copies that come when they like, as a worker takes and runs them."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.come: Counter[int] = Counter()
        self.landed: Counter[int] = Counter()
        self.board = Scoreboard(lambda region: self.come[region] > self.landed[region])
        self.uses: dict[Entry, tuple[set[int], set[int]]] = {}
        self.ran: list[Entry] = []

    def post(self) -> None:
        kind = self.dice.choice(["operation", "operation", "operation", "write", "send", "land", "free"])
        some = {self.dice.randrange(12) for _ in range(self.dice.randint(1, 3))}
        region = self.dice.choice([100, 101]) if kind == "land" else None
        reads = some if kind in ("operation", "send") else set()
        writes = {"operation": {self.dice.randrange(12)}, "write": some, "free": some}.get(kind, set())
        if kind in ("send", "land"):
            writes = {-(region or self.dice.choice([200, 201]))} | ({self.dice.randrange(12)} if kind == "land" else set())
        entry = Entry([], len(self.uses), 0, region)
        self.uses[entry] = reads, writes
        self.board.add(entry, list(reads), list(writes), kind == "send")

    def run(self) -> bool:
        entry = self.board.next()
        if entry is None:
            return False
        if entry.region is not None:
            self.landed[entry.region] += 1
        self.ran.append(entry)
        self.board.ran(entry)
        return True


@pytest.mark.parametrize("seed", range(200))
def test_of_two_that_touch_a_tensor_the_earlier_runs_first(seed):
    messages = Messages(seed)
    for _ in range(messages.dice.randint(1, 120)):
        messages.post()
        while messages.dice.random() < 0.4:
            if messages.dice.random() < 0.5:
                messages.come[messages.dice.choice([100, 101])] += 1
            messages.run()
    if seed % 4 == 0:  # an operation has failed
        messages.ran += messages.board.in_order()
    while messages.board:
        if not messages.run():
            messages.come[100] += 1
            messages.come[101] += 1
    assert len(messages.ran) == len(messages.uses) == len(set(messages.ran))
    for index, later in enumerate(messages.ran):
        reads, writes = messages.uses[later]
        for earlier in messages.ran[index + 1 :]:  # ran after it: may not have been posted before it and touch the same
            if earlier.position < later.position:
                its_reads, its_writes = messages.uses[earlier]
                assert not writes & (its_reads | its_writes) and not reads & its_writes


def test_what_another_worker_waits_for_runs_first():
    board = Scoreboard(lambda region: region in come)
    come: set[int] = set()
    order = []

    def post(name: int, reads: list[int], writes: list[int], region: int | None = None, urgent: bool = False) -> None:
        board.add(Entry([], name, 0, region), reads, writes, urgent)

    post(0, [], [1, -100], region=100)  # a copy that has not come
    post(1, [1], [2])
    post(2, [3], [4])  # nobody waits for it
    post(3, [3], [5])
    post(4, [5], [-200], urgent=True)
    for _ in range(2):
        while (entry := board.next()) is not None:
            order.append(entry.position)
            board.ran(entry)
        come.add(100)
    assert order == [3, 4, 2, 0, 1] and not board
