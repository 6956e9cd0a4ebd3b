"""Peers that do not read their ring, because they are stopped, die, or hold the GIL: only calls to them wait for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from group import dismiss, on_every_device, results, until_dismissed
from halt import halt
from test_calls import identity
from test_silence import hold_the_gil, stop

import rdmarpc as rpc
from rdmarpc import agent
from rdmarpc.link import QUEUE_BYTES, RING_BYTES

TIMEOUT = 2.0
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


def after(seconds: float, *kill: tuple[int, signal.Signals]) -> None:
    """A process that sends signals by and by, each after ``seconds``."""
    script = (
        "import os, sys, time\n"
        "for each in sys.argv[2:]:\n    time.sleep(float(sys.argv[1])); os.kill(*map(int, each.split(',')))"
    )
    subprocess.Popen([sys.executable, "-c", script, str(seconds), *(f"{pid},{int(number)}" for pid, number in kill)])


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
    assert time.monotonic() - start < (TIMEOUT if kill else 3 * TIMEOUT) + 3
    assert rpc.counters()["rpc_queued"] > 0 and rpc.counters()["rpc_dropped"] > 0
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
        futures = [rpc.rpc_async("worker0", piece, (number,)) for number in range(MANY)]
        after(0.5, (os.getpid(), signal.SIGKILL))
        stop()
        del futures
    elif rank == 2:
        calls = 0
        while not rpc.rpc_sync("worker0", told):
            calls += 1
        assert calls > 10
        found = rpc.rpc_sync("worker0", counters)
        assert found["rpc_queued"] > 0 and found["rpc_dropped"] > 0, found
        dismiss("worker0")
    else:
        until_dismissed()
        assert lost.is_set()
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
        hold_the_gil(2.0)
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
        assert slowest < 1.0 < time.monotonic() - start, "calls of another worker waited for the one that does not read"
        found = rpc.rpc_sync("worker0", counters)
        assert found["rpc_queued"] > 0 and found["rpc_dropped"] == 0, found
        until_dismissed()
    rpc.shutdown()


def test_a_worker_that_holds_the_gil_delays_nobody_elses_calls():
    for outcomes in on_every_device(holds_the_gil, 3, num_worker_threads=4).values():
        results(outcomes)


def in_order(rank):
    if rank == 0:
        rpc.rpc_sync("worker1", identity, (1,))
        held = rpc.rpc_async("worker1", hold_the_gil, (1.0,))
        time.sleep(0.1)
        futures = [rpc.rpc_async("worker1", note, (number, piece(number))) for number in range(MANY // 2)]
        assert rpc.counters()["rpc_queued"] > 0
        assert held.wait() == "held"
        torch.futures.wait_all(futures)
        assert rpc.rpc_sync("worker1", noted) == list(range(MANY // 2))
    rpc.shutdown()


def test_what_is_queued_is_sent_in_order():
    for outcomes in on_every_device(in_order, 2, num_worker_threads=1).values():
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
