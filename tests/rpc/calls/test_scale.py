"""Many workers, many calls at once, and links that nobody needs."""

from __future__ import annotations

import gc
import threading
import time
from functools import partial

import psutil
import pytest
import torch
from called import identity
from group import results, run_group
from timing import eventually

import rdmarpc as rpc
from rdmarpc.calls import agent

DEVICES = ["shm", "tcp"]
MANY = 16
CALLS = 10_000


def all_to_all(rank):
    value = torch.full((3,), rank, dtype=torch.int64)
    for turn in range(3):
        futures = [rpc.rpc_async(f"worker{to}", torch.add, (value, to + turn)) for to in range(MANY)]
        for to, future in enumerate(futures):
            assert future.wait().tolist() == [rank + to + turn] * 3
    large = rpc.rpc_sync(f"worker{(rank + 1) % MANY}", identity, (torch.full((50_000,), rank),))
    assert large.sum() == 50_000 * rank
    threads = psutil.Process().num_threads()
    rpc.shutdown(timeout=60)
    return threads


@pytest.mark.parametrize("device", DEVICES)
def test_many_workers_call_each_other(device):
    found = results(run_group(all_to_all, MANY, transport=device, timeout=120, rpc_timeout=100))
    assert max(found) < 64, "threads grow with the number of peers"


def knows_two(rank):
    if rank in (0, 1):
        before = agent.current().counters(), psutil.Process().num_fds()
        assert rpc.rpc_sync(f"worker{1 - rank}", identity, (rank,)) == rank
        after = agent.current().counters(), psutil.Process().num_fds()
        deadline = time.monotonic() + 20.0
        while agent.current().links.counts[2] < 1:  # the other's own call may not even be sent yet
            assert time.monotonic() < deadline, "the other one does not call"
            time.sleep(0.005)
        # If both connect at once, one of two connections ends a moment later.
        eventually(lambda: agent.current().counters()["channels"] <= 1)
        after = agent.current().counters(), after[1]
    else:
        before = after = agent.current().counters(), psutil.Process().num_fds()
        time.sleep(1.0)
        after = agent.current().counters(), psutil.Process().num_fds()
    rpc.shutdown(graceful=False)
    more_used, more_open = after[0]["arena_used"] - before[0]["arena_used"], after[1] - before[1]
    return before[0]["channels"], after[0]["channels"], more_used, max(0, more_open)  # what meeting took is given back by then


@pytest.mark.parametrize("device", DEVICES)
def test_who_never_talks_to_a_worker_holds_nothing_for_it(device):
    found = results(run_group(knows_two, 6, transport=device))
    for channels in (entry[1] for entry in found[:2]):
        assert channels <= 1
    assert found[2:] == [(0, 0, 0, 0)] * 4


def settled(agent_) -> dict[str, int]:
    """The counters when everything that was given back has come home."""
    deadline = time.monotonic() + 30.0
    agent_.device.empty(16)  # the arena takes back what was freed when the next allocation asks
    counters = agent_.counters()
    while time.monotonic() < deadline:
        time.sleep(0.1)
        again = agent_.counters()
        if again["arena_used"] == counters["arena_used"]:
            return again
        counters = again
    return counters


def in_flight(rank):
    if rank == 0:
        me = agent.current()
        small = [rpc.rpc_async("worker1", identity, (n,)) for n in range(100)]
        torch.futures.wait_all(small)
        del small
        before = settled(me)["arena_used"]
        gate = rpc.rpc_async("worker1", wait_for_gate)
        futures = [rpc.rpc_async("worker1", behind_the_gate, (n,)) for n in range(CALLS)]
        assert len(me.caller.pending) > CALLS, "not all calls are in flight at once"
        rpc.rpc_sync("worker1", open_gate)
        assert gate.wait() == "open"
        assert [future.wait() for future in futures] == list(range(CALLS))
        assert not me.caller.pending and not me.caller.futures
        del futures, gate
        eventually(lambda: settled(me)["arena_used"] <= before)
    rpc.shutdown()


gate = threading.Event()
waiting: list[tuple[int, torch.futures.Future[int]]] = []


def wait_for_gate() -> str:
    assert gate.wait(80)
    return "open"


@rpc.functions.async_execution
def behind_the_gate(number: int) -> torch.futures.Future[int]:
    future: torch.futures.Future[int] = torch.futures.Future()
    waiting.append((number, future))
    if gate.is_set():
        answer_all()
    return future


def open_gate() -> None:
    gate.set()
    answer_all()


def answer_all() -> None:
    while waiting:
        try:
            number, future = waiting.pop()
        except IndexError:
            return
        future.set_result(number)


@pytest.mark.parametrize("device", DEVICES)
def test_ten_thousand_calls_in_flight(device):
    results(run_group(in_flight, 2, transport=device, timeout=90, rpc_timeout=80))


def with_tensors(rank):
    me = agent.current()
    if rank == 0:
        for turn in range(4):
            futures = [rpc.rpc_async("worker1", torch.mul, (torch.full((3000,), n), 2)) for n in range(500)]
            for number, future in enumerate(futures):
                assert future.wait().sum() == 6000 * number
            del futures, future
            if turn == 1:
                before = settled(me)["arena_used"]
        eventually(lambda: settled(me)["arena_used"] <= before + (1 << 20))
    rpc.shutdown()


@pytest.mark.parametrize("device", DEVICES)
def test_memory_of_many_tensors_in_flight_comes_back(device):
    results(run_group(with_tensors, 2, transport=device))


def knows_nobody(me) -> bool:
    return not (me.links.by_worker or me.links.rows)


def come_and_go(meeting):
    if meeting.rank == 0:
        meeting.join()
        meeting.say("first")
        used = []
        for life in range(12):
            meeting.hear(f"gone{life}")
            me = agent.current()
            eventually(partial(knows_nobody, me), limit=60.0)
            del me
            gc.collect()  # channels are cycles, and hold descriptors
            me = agent.current()
            used.append((settled(me)["arena_used"], psutil.Process().num_fds(), len(me.links.rows)))
            meeting.say(f"seen{life}")
        rpc.shutdown()
        return used
    meeting.hear("first")
    for life in range(12):
        meeting.join(name=f"life{life}")
        value = torch.full((20_000,), life)
        for _ in range(3):
            assert rpc.rpc_sync("worker0", identity, (value,)).sum() == 20_000 * life
        rpc.shutdown()
        meeting.say(f"gone{life}")
        meeting.hear(f"seen{life}")
    return None


@pytest.mark.parametrize("device", DEVICES)
def test_members_that_come_and_go_leave_nothing(device):
    used = results(run_group(come_and_go, 2, dynamic=True, transport=device))[0]
    # Now and then a life is looked at before its end is quite over; what stays would be there at every later look.
    for number in range(3):
        assert min(look[number] for look in used[-4:]) <= min(look[number] for look in used[2:6]), used
