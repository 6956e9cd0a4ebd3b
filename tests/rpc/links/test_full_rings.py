"""Peers that do not read their ring, because they are stopped, die, or hold the GIL: only calls to them wait for them."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import nullcontext

import pytest
import torch
from called import hold_the_gil, identity, stop
from group import dismiss, on_every_device, results, until_dismissed
from halt import halt
from timing import after, eventually

import rdmarpc as rpc
from rdmarpc.calls import agent
from rdmarpc.links.ring import QUEUE_BYTES, RING_BYTES

TIMEOUT, PAUSE_S = 2.0, 0.01
PIECE = 30 << 10
MANY = 300
"""So many pieces are more than a ring and a queue take."""
assert MANY * PIECE > RING_BYTES + QUEUE_BYTES

go, free = threading.Event(), threading.Event()
seen: list[int] = []
promised: list[tuple[torch.futures.Future[torch.Tensor], int]] = []


def piece(number: int) -> torch.Tensor:
    return torch.full((PIECE,), number % 256, dtype=torch.uint8)


@rpc.functions.async_execution
def piece_when_told(number: int) -> torch.futures.Future[torch.Tensor]:
    promise: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    promised.append((promise, number))
    return promise


def promises() -> int:
    return len(promised)


def keep_promises() -> None:
    for promise, number in promised:
        promise.set_result(piece(number))


def note(number: int, _: torch.Tensor) -> None:
    seen.append(number)


def noted() -> list[int]:
    return seen


def counters() -> dict[str, int]:
    return rpc.counters()


def let_go() -> None:
    go.set()


def set_free() -> None:
    free.set()


def lose_in_calls(kill: bool) -> None:
    """On worker 0: calls with more than the ring of a stopped worker takes end, and all of them."""
    pid = rpc.rpc_sync("worker1", os.getpid)
    halt(pid)
    if kill:
        after(0.5, (pid, signal.SIGKILL))
    start = time.monotonic()
    futures = [rpc.rpc_async("worker1", identity, (piece(number),)) for number in range(MANY)]
    for future in futures:
        with pytest.raises(rpc.PeerLost, match="worker1"):
            future.wait()
    assert time.monotonic() - start < (TIMEOUT if kill else 3 * TIMEOUT) + 10
    assert rpc.counters()["rpc_queued"] > 0
    eventually(lambda: rpc.counters()["rpc_dropped"] > 0)
    assert rpc.rpc_sync("worker2", identity, (1,)) == 1
    if not kill:
        os.kill(pid, signal.SIGCONT)
    dismiss("worker2")


class Loses:
    def __init__(self, kill):
        self.kill = kill

    def __call__(self, rank):
        if rank == 0:
            lose_in_calls(self.kill)
        elif rank == 1:
            while not agent.current().links.lost:
                time.sleep(0.05)
        else:
            until_dismissed()
        rpc.shutdown(graceful=False)
        return "survived"


@pytest.mark.parametrize("kill", [True, False], ids=["dies", "stopped"])
def test_calls_to_a_worker_that_does_not_read_end_with_it(kill):
    for device, outcomes in on_every_device(Loses(kill), 3, peer_timeout=TIMEOUT, rpc_timeout=30).items():
        assert [outcomes[rank].result for rank in (0, 2)] == ["survived", "survived"], (device, outcomes)


def dies_with_answers_under_way(rank):
    lost = threading.Event()
    agent.current().on_peer_lost(lambda worker, error: lost.set())
    if rank == 1:
        futures = [rpc.rpc_async("worker0", piece_when_told, (number,)) for number in range(MANY)]
        threading.Event().wait(50)  # it is killed
        del futures
    elif rank == 2:
        pid = rpc.rpc_sync("worker1", os.getpid)
        eventually(lambda: rpc.rpc_sync("worker0", promises) == MANY)
        halt(pid)
        rpc.rpc_sync("worker0", keep_promises)
        assert not any(rpc.rpc_sync("worker0", told) for _ in range(100))
        assert rpc.rpc_sync("worker0", counters)["rpc_queued"] > 0
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: rpc.rpc_sync("worker0", told))
        eventually(lambda: rpc.rpc_sync("worker0", counters)["rpc_dropped"] > 0)  # counted when the loss has been dealt with
        dismiss("worker0")
    else:
        until_dismissed()
        assert lost.wait(20)
    rpc.shutdown(graceful=False)
    return "survived"


def told() -> bool:
    return 1 in agent.current().links.lost


def test_a_worker_that_dies_with_answers_under_way_disturbs_nobody():
    for device, outcomes in on_every_device(dies_with_answers_under_way, 3, rpc_timeout=10).items():
        assert [outcomes[rank].result for rank in (0, 2)] == ["survived", "survived"], (device, outcomes)


def holds_the_gil(rank):
    if rank == 1:
        futures = [rpc.rpc_async("worker0", piece_when_told, (number,)) for number in range(MANY)]
        while rpc.rpc_sync("worker0", promises) < MANY:
            pass
        rpc.rpc_sync("worker2", let_go)
        hold_the_gil(6.0)
        rpc.rpc_sync("worker2", set_free)
        assert [int(future.wait()[0]) for future in futures] == [number % 256 for number in range(MANY)]
        dismiss("worker2")
    elif rank == 2:
        assert go.wait(20)
        rpc.rpc_sync("worker0", keep_promises)
        start, slowest = time.monotonic(), 0.0
        while not free.is_set():
            before = time.monotonic()
            assert rpc.rpc_sync("worker0", identity, (1,)) == 1
            slowest = max(slowest, time.monotonic() - before)
            time.sleep(PAUSE_S)
        assert slowest < 3.0 < time.monotonic() - start, "calls of another worker waited for the one that does not read"
        found = rpc.rpc_sync("worker0", counters)
        assert found["rpc_queued"] > 0 and found["rpc_dropped"] == 0, found
        until_dismissed()
    rpc.shutdown()


def test_a_worker_that_holds_the_gil_delays_nobody_elses_calls():
    for outcomes in on_every_device(holds_the_gil, 3, num_worker_threads=4).values():
        results(outcomes)


def first_byte(value: torch.Tensor | bytes) -> int:
    return int(value[0])


class CannotBeRead:
    """Worker 1 cannot send what its calls leave for worker 0 to READ: large arguments without a landing place."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __call__(self, rank):
        if rank == 1:
            made = [torch.full((4 << 20,), number, dtype=torch.uint8) for number in range(16)]
            values = [value if number % 3 else value.numpy().tobytes() for number, value in enumerate(made)]
            rpc.rpc_sync("worker0", identity, (1,))
            rpc.rpc_sync("worker2", let_go)
            if self.how != "gil":
                after(6.5, (os.getpid(), signal.SIGCONT if self.how == "stopped" else signal.SIGKILL))
                time.sleep(0.3)  # until that process runs
            reader = getattr(agent.current().connections.to(0).channel, "reader", None)
            with reader.lock if reader else nullcontext():  # tcp: no READ is answered before the other thing happens
                futures = [rpc.rpc_async("worker0", first_byte, (value,)) for value in values]
                if self.how == "gil":
                    hold_the_gil(6.0)
                else:
                    stop()
            rpc.rpc_sync("worker2", set_free)
            assert [future.wait() for future in futures] == list(range(16))
            dismiss("worker2")
        elif rank == 2:
            assert go.wait(20)
            start, slowest, lost = time.monotonic(), 0.0, False
            while not (free.is_set() or lost):
                before = time.monotonic()
                lost = rpc.rpc_sync("worker0", told)
                slowest = max(slowest, time.monotonic() - before)
                time.sleep(PAUSE_S)
            assert slowest < 3.0 < time.monotonic() - start, "calls of another worker waited for the one that does not answer"
            assert (rpc.rpc_sync("worker0", counters)["rpc_held"] > 0) == agent.current().device.name.startswith("tcp")
            if self.how == "dies":
                dismiss("worker0")
            else:
                until_dismissed()
        elif self.how == "dies":
            until_dismissed()
        rpc.shutdown(graceful=self.how != "dies")
        return "survived"


@pytest.mark.parametrize("how", ["gil", "stopped", "dies"])
def test_arguments_that_cannot_be_read_delay_nobody_elses_calls(how):
    for device, outcomes in on_every_device(CannotBeRead(how), 3, num_worker_threads=4).items():
        survivors = (0, 2) if how == "dies" else (0, 1, 2)
        assert [outcomes[rank].result for rank in survivors] == ["survived"] * len(survivors), (device, outcomes)


def note_all(number: int, *_: object) -> None:
    seen.append(number)


def in_order_though_some_is_read(rank):
    if rank == 0:
        reference = rpc.RRef(1)
        futures = []
        for number in range(0, 60, 3):
            large = torch.ones(50_000 + 1_000 * number)
            futures.append(rpc.rpc_async("worker1", note_all, (number, large)))
            futures.append(rpc.rpc_async("worker1", note_all, (number + 1, "x" * 200_000, large)))
            futures.append(rpc.rpc_async("worker1", note_all, (number + 2,)))
        torch.futures.wait_all(futures)
        assert rpc.rpc_sync("worker1", noted) == list(range(60))
        # Of what is READ and has references, too, everything arrives.
        large = torch.arange(70_000)
        assert rpc.rpc_sync("worker1", total, (reference, large, "x" * 200_000)) == 1 + int(large.sum())
        made = rpc.remote("worker1", total, (reference, large * 2, "x" * 200_000))
        assert made.to_here() == 1 + 2 * int(large.sum())
    rpc.shutdown()


def total(reference: rpc.RRef[int], large: torch.Tensor, _: str) -> int:
    return reference.to_here() + int(large.sum())


def test_requests_of_which_something_is_read_begin_in_order():
    for outcomes in on_every_device(in_order_though_some_is_read, 2, num_worker_threads=1).values():
        results(outcomes)


def in_order(rank):
    if rank == 0:
        pid = rpc.rpc_sync("worker1", os.getpid)
        halt(pid)
        futures = [rpc.rpc_async("worker1", note, (number, piece(number))) for number in range(MANY // 2)]
        assert rpc.counters()["rpc_queued"] > 0
        os.kill(pid, signal.SIGCONT)
        torch.futures.wait_all(futures)
        assert rpc.rpc_sync("worker1", noted) == list(range(MANY // 2))
    rpc.shutdown()


def test_what_is_queued_is_sent_in_order():
    for outcomes in on_every_device(in_order, 2, num_worker_threads=1, peer_timeout=30).values():
        results(outcomes)


def past_their_deadline(rank):
    if rank == 0:
        pid = rpc.rpc_sync("worker1", os.getpid)
        halt(pid)
        try:
            start = time.monotonic()
            futures = [rpc.rpc_async("worker1", identity, (piece(1),), timeout=0.5) for _ in range(MANY // 2)]
            futures += [rpc.rpc_async("worker1", identity, (piece(1),), timeout=0.02) for _ in range(MANY // 2)]
            for future in futures:
                with pytest.raises(RuntimeError, match="ran for more than set timeout"):
                    future.wait()
            assert time.monotonic() - start < 15
            assert rpc.rpc_sync("worker2", identity, (1,)) == 1
        finally:
            os.kill(pid, signal.SIGCONT)
        assert rpc.rpc_sync("worker1", identity, (2,)) == 2
    rpc.shutdown()


def test_a_call_to_a_full_ring_ends_at_its_deadline():
    for outcomes in on_every_device(past_their_deadline, 3, peer_timeout=30).values():
        results(outcomes)
