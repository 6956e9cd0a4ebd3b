"""Ten thousand forks between workers whose control messages are delayed and reordered."""

from __future__ import annotations

import collections
import heapq
import itertools
import random
import threading
import time
import weakref

import pytest
from group import results, run_group
from rref_things import wait_until_empty

import rdmarpc as rpc
from rdmarpc.calls import agent

SIZE = 4
SENDS = 2_500
IN_FLIGHT = 40


class Faults:
    """Stands between a worker and the transport of its control messages."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.transmit = agent.current().rrefs.mail.transmit
        self.waiting, self.numbers = [], itertools.count()
        self.changed = threading.Condition()
        threading.Thread(target=self.run, daemon=True).start()
        agent.current().rrefs.mail.transmit = self.take

    def take(self, to, message):
        with self.changed:
            # Mostly soon, sometimes after many others.
            delay = self.random.choice((0.0, 0.001, 0.005, 0.05))
            heapq.heappush(self.waiting, (time.monotonic() + delay, next(self.numbers), to, message))
            self.changed.notify()

    def run(self):
        while True:
            with self.changed:
                while not self.waiting or self.waiting[0][0] > time.monotonic():
                    self.changed.wait(self.waiting[0][0] - time.monotonic() if self.waiting else None)
                _, _, to, message = heapq.heappop(self.waiting)
            self.transmit(to, message)


class Value:
    """Lives on its owner; what is fetched of it is its number."""

    def __init__(self, number):
        self.number = number
        alive.add(self)

    def __reduce__(self):
        return int, (self.number,)


alive: weakref.WeakSet = weakref.WeakSet()
ran: collections.Counter = collections.Counter()
held: list = []
lock = threading.Lock()


def create(call, number):
    with lock:
        ran[call] += 1
    return Value(number)


def receive(call, references):
    """Keep some, use some, and give one back."""
    with lock:
        ran[call] += 1
    chooser = random.Random(call)
    assert all(reference.confirmed_by_owner() for _, reference in references)
    for number, reference in references:
        if chooser.random() < 0.3:
            fetched = reference.local_value().number if reference.is_owner() else reference.to_here()
            assert fetched == number
    with lock:
        held.extend(references)
        while len(held) > 50:
            held.pop(chooser.randrange(len(held)))
        return chooser.choice(held)


def load(rank):
    """Random calls, until ``SENDS`` references have been sent. Gives the calls made."""
    Faults(rank)
    chooser = random.Random(1000 + rank)
    calls = itertools.count(rank, SIZE)
    numbers = itertools.count(rank, SIZE)
    mine: list = []
    flight: collections.deque = collections.deque()
    made, sent = [], 0
    while sent < SENDS:
        to = f"worker{chooser.randrange(SIZE)}"
        if len(mine) < 5 or chooser.random() < 0.2:
            number = next(numbers)
            if chooser.random() < 0.3:
                mine.append((number, rpc.RRef(Value(number))))
            else:
                made.append(next(calls))
                mine.append((number, rpc.remote(to, create, (made[-1], number))))
        else:
            chosen = [chooser.choice(mine) for _ in range(chooser.choice((1, 1, 2, 3)))]
            made.append(next(calls))
            flight.append(rpc.rpc_async(to, receive, (made[-1], chosen)))
            sent += len({reference for _, reference in chosen}) + 1  # and one comes back
            del chosen
        if len(flight) > IN_FLIGHT:
            number, reference = flight.popleft().wait()
            mine.append((number, reference))
            if chooser.random() < 0.2:
                assert (reference.local_value().number if reference.is_owner() else reference.to_here()) == number
            del reference
        while len(mine) > 30:
            mine.pop(chooser.randrange(len(mine)))
    while flight:
        flight.popleft().wait()
    return made, sent


def report():
    """Which calls ran here and how often, and how many values are left."""
    return dict(ran), len(alive)


def clear():
    with lock:
        held.clear()


def storm(rank):
    if rank == 0:
        names = [f"worker{number}" for number in range(SIZE)]
        loads = [rpc.rpc_async(name, load, (number,)) for number, name in enumerate(names)]
        made, sent = zip(*[future.wait() for future in loads])
        del loads
        for name in names:
            rpc.rpc_sync(name, clear)
        wait_until_empty(range(SIZE), 30)
        reports = [rpc.rpc_sync(name, report) for name in names]
        runs = collections.Counter()
        for counts, left in reports:
            runs.update(counts)
            assert left == 0
        assert runs == collections.Counter(itertools.chain(*made)), "not every function ran exactly once"
        assert sum(sent) >= SIZE * SENDS
    rpc.shutdown()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_ten_thousand_forks_among_faults(device):
    results(run_group(storm, SIZE, timeout=200, rpc_timeout=150, transport=device))
