"""Long runs with random delays: nothing torn, stale or lost, whoever sleeps and whoever is slow; and waiting costs little."""

from __future__ import annotations

import os
import random
import threading
import time
import zlib

import pytest
import torch
from transport_peer import Across, Pair, State

from rdmarpc.transport import RemoteRegion, TransferTimeout

T = 20.0
CREDIT, PING, PONG, DATA = 1, 2, 3, 4  # DATA + slot
SLOTS, SLOT = 2, 40_000


def dawdle(chance: random.Random) -> None:
    """Mostly nothing; sometimes longer than a waiter spins, sometimes much longer."""
    pick = chance.random()
    if pick < 0.02:
        time.sleep(chance.random() * 4e-3)
    elif pick < 0.1:
        time.sleep(chance.random() * 1e-4)


def payload(turn: int, nbytes: int) -> torch.Tensor:
    """Bytes that depend on the turn everywhere, behind their number, length and checksum."""
    body = (torch.arange(nbytes - 24, dtype=torch.int64) * 7 + turn * 13).to(torch.uint8)
    head = torch.tensor([turn, nbytes, zlib.crc32(body.numpy())], dtype=torch.int64)
    return torch.cat((head.view(torch.uint8), body))


def check(slot: torch.Tensor, turn: int) -> None:
    number, nbytes, checksum = slot[:24].clone().view(torch.int64).tolist()
    assert number == turn, f"expected message {turn}, found {number}"
    assert zlib.crc32(slot[24:nbytes].numpy()) == checksum, f"message {turn} of {nbytes} bytes is torn"


def produce(state: State, remote: RemoteRegion, turns: int, seed: int) -> None:
    chance = random.Random(seed)
    source = state.device.empty((SLOTS, SLOT), dtype=torch.uint8)
    credit = state.channel.expect(CREDIT)
    works = []
    for turn in range(turns):
        if turn >= SLOTS:
            credit.wait(T)
        at, nbytes = turn % SLOTS, chance.choice((24, 25, 100, 4096, SLOT))
        if turn >= SLOTS:
            works[turn - SLOTS].wait(T)
        source[at, :nbytes] = payload(turn, nbytes)
        works.append(state.channel.memcpy(remote[at * SLOT : at * SLOT + nbytes], source[at, :nbytes], notify=DATA + at))
        dawdle(chance)
    for work in works[-SLOTS:]:
        work.wait(T)


@pytest.mark.timeout(300)  # the two take turns: a busy core costs each turn a time slice
def test_slots_with_credits_are_never_torn_stale_or_lost(across: Across, kind: str) -> None:
    turns = {"shm": 6000, "verbs": 1000}.get(kind, 3000)
    slots = across.device.empty((SLOTS, SLOT), dtype=torch.uint8, writable=True).zero_()
    across.peer.start(produce, RemoteRegion.load(across.device.export(slots)), turns, 1)
    chance = random.Random(2)
    news = [across.channel.expect(DATA + at) for at in range(SLOTS)]
    for turn in range(turns):
        news[turn % SLOTS].wait(T)
        check(slots[turn % SLOTS], turn)
        slots[turn % SLOTS].fill_(255)
        across.channel.notify(CREDIT)
        dawdle(chance)
    across.peer.finish()
    assert not any(slot.done() for slot in news)


def echo(state: State, rounds: int) -> None:
    ping = state.channel.expect(PING)
    for _ in range(rounds):
        ping.wait(T)
        state.channel.notify(PONG)


def pin(core: int) -> set[int]:
    """Every thread of this process on one core; returns the cores of before."""
    before = os.sched_getaffinity(0)
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), {core})
        except ProcessLookupError:
            pass
    return before


def pinned_echo(state: State, rounds: int, core: int) -> None:
    pin(core)
    echo(state, rounds)


def test_two_workers_on_one_core_progress(across: Across) -> None:
    core = min(os.sched_getaffinity(0))
    before = pin(core)
    try:
        across.peer.start(pinned_echo, 400, core)
        pong = across.channel.expect(PONG)
        for _ in range(400):
            across.channel.notify(PING)
            pong.wait(T)
        across.peer.finish()
    finally:
        for thread in os.listdir("/proc/self/task"):
            try:
                os.sched_setaffinity(int(thread), before)
            except ProcessLookupError:
                pass


def test_ping_pong_with_random_delays(across: Across) -> None:
    across.peer.start(echo, 1500)
    chance = random.Random(3)
    pong = across.channel.expect(PONG)
    for _ in range(1500):
        across.channel.notify(PING)
        pong.wait(T)
        dawdle(chance)
    across.peer.finish()


def idle(state: State, seconds: float) -> float:
    """Share of one core that this process uses while it waits for something that does not come: in the long run, so without
    what the first wait loads, and the spinning with which it begins."""
    idle_once(state, 0.3)
    return idle_once(state, seconds)


def idle_once(state: State, seconds: float) -> float:
    poller = state.device.poller()
    poller.add(state.channel, 7)
    thread = threading.Thread(target=poller.wait, args=(seconds,))
    thread.start()
    started, used = time.monotonic(), time.process_time()
    try:
        state.channel.expect(1).wait(seconds)
    except TransferTimeout:
        pass
    thread.join(T)
    share = (time.process_time() - used) / (time.monotonic() - started)
    poller.close()
    return share


def test_who_waits_uses_little_of_the_processor(across: Across) -> None:
    assert across.peer.call(idle, 1.5) < 0.2, "it spins"


def test_many_waiters_and_a_poller_miss_nothing(pair: Pair) -> None:
    """Six threads wait for a number each, one polls three more, two threads notify all of them, at random."""
    rounds = 150
    errors: list[BaseException] = []
    counts = {6: 0, 7: 0, 8: 0}

    def guard(target: object, *args: object) -> threading.Thread:
        def run() -> None:
            try:
                target(*args)  # type: ignore[operator]
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def wait(imm: int) -> None:
        expectation = pair.ba.expect(imm)
        for _ in range(2 * rounds):
            expectation.wait(T)

    def poll() -> None:
        poller = pair.b.poller()
        rows = {poller.add(pair.ba, imm): imm for imm in counts}
        while sum(counts.values()) < 2 * rounds * len(counts):
            news = poller.wait(T)
            assert news is not None, "a notification was lost"
            counts[rows[news[0]]] += news[1]
        poller.close()

    def send(seed: int) -> None:
        chance = random.Random(seed)
        order = [imm for imm in range(9) for _ in range(rounds)]
        chance.shuffle(order)
        for imm in order:
            pair.ab.notify(imm)
            dawdle(chance)

    threads = [guard(wait, imm) for imm in range(6)] + [guard(poll)] + [guard(send, seed) for seed in (1, 2)]
    for thread in threads:
        thread.join(2 * T)
    assert not errors and not any(thread.is_alive() for thread in threads)
    assert set(counts.values()) == {2 * rounds}


@pytest.mark.parametrize("streams", [4])
def test_windows_shared_by_threads(pair: Pair, streams: int) -> None:
    """Each thread owns a lane of one window, and writes numbers through it that only ever grow."""
    ours = pair.a.empty((streams, 512), dtype=torch.int64).zero_()
    theirs = pair.b.empty((streams, 512), dtype=torch.int64, writable=True).zero_()
    window = pair.ab.window(pair.remote(theirs), ours, notify=1)

    def write(lane: int) -> None:
        for turn in range(1, 301):
            ours[lane].fill_(turn)
            window.put(lane * 4096, 4096)

    threads = [threading.Thread(target=write, args=(lane,)) for lane in range(streams)]
    for thread in threads:
        thread.start()
    pair.ba.expect(1, 300 * streams).wait(T)
    for thread in threads:
        thread.join(T)
    assert bool((theirs == 300).all())
