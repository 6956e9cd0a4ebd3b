"""An arena that is full for a moment is waited for; one that stays full is an error that says who has it."""

from __future__ import annotations

import contextlib
import threading
import time

import limits
import pytest
import torch
from called import identity
from group import dismiss, on_every_device, results, until_dismissed

import rdmarpc as rpc
from rdmarpc.calls import agent

MIB = 1 << 20
LIMIT, PIECE = 100 * MIB, 40 * MIB
held: list[torch.Tensor] = []
full = threading.Event()


def fill() -> list[torch.Tensor]:
    """All of the part of the arena in which messages with the other worker lie, but for small ones: two pieces of it."""
    (link,) = agent.current().links.by_worker.values()
    return [link.channel.empty(PIECE, dtype=torch.uint8) for _ in range(2)]


def hold() -> None:
    """Until somebody waits for memory here."""
    pieces, before, limit = fill(), waits(), time.monotonic() + 20
    full.set()
    while waits() == before and time.monotonic() < limit:
        time.sleep(0.01)
    pieces.clear()


def is_full() -> bool:
    return full.wait(20)


def keep() -> None:
    held.extend(fill())


def large(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes, dtype=torch.uint8)


def waits() -> int:
    return agent.current().memory.waits


def full_for_a_moment(rank):
    if rank == 0:
        # There: the arguments, READ for want of a landing place, find no room. Here: the result.
        holding = rpc.rpc_async("worker1", hold)
        assert rpc.rpc_sync("worker1", is_full)
        assert rpc.rpc_sync("worker1", identity, (large(PIECE)[:-7],)).sum() == PIECE - 7
        holding.wait()
        assert rpc.rpc_sync("worker1", waits) > 0
        full.clear()
        holder = threading.Thread(target=hold)
        holder.start()
        assert is_full()
        before = waits()
        others = rpc.rpc_async("worker1", until_dismissed)  # something is under way
        assert rpc.rpc_sync("worker1", large, (PIECE,)).sum() == PIECE
        assert waits() > before
        holder.join()
        dismiss("worker1")
        others.wait()
    rpc.shutdown()


def test_memory_that_is_about_to_be_freed_is_waited_for():
    for outcomes in on_every_device(full_for_a_moment, 2, arena_limit=LIMIT).values():
        results(outcomes)


def full_for_good(rank):
    if rank == 0:
        rpc.rpc_sync("worker1", keep)
        rpc.rpc_sync("worker1", identity, (large(3 * MIB),))
        text = r"limit 104857600(.|\n)*waiting for memory; in use: granted to worker0 for calls to come \d+ bytes"
        text += r"(.|\n)*rings \d+ bytes, tensors of this program \d+ bytes(.|\n)*arena_limit"
        with pytest.raises(rpc.ArenaFull, match=text):
            rpc.rpc_sync("worker1", identity, (large(PIECE),))
        start = time.monotonic()
        # A call of its own that may free nothing is waited for until the deadline, and no longer.
        keep()
        others = rpc.rpc_async("worker1", time.sleep, (6.0,))
        with pytest.raises((rpc.ArenaFull, rpc.TransferTimeout)):
            rpc.rpc_sync("worker1", large, (PIECE,), timeout=1.5)
        assert time.monotonic() - start < 5.5
        others.wait()
    rpc.shutdown()


def test_an_arena_that_stays_full_says_who_has_it():
    for outcomes in on_every_device(full_for_good, 2, arena_limit=LIMIT).values():
        results(outcomes)


def fill_all() -> None:
    """Whatever this worker's messages could take, by tensors of its program."""
    here, nbytes = agent.current().device, 8 * MIB
    while nbytes >= 64:
        try:
            held.append(here.empty(nbytes, dtype=torch.uint8))
        except rpc.ArenaFull:
            nbytes //= 2


def full_from_the_start(rank):
    fill_all()
    with pytest.raises(rpc.ArenaFull):
        agent.current().device.empty(1)
    if rank == 0:  # by connections that are only now made, to others and to itself
        for to in range(3):
            for via in range(3):
                assert rpc.rpc_sync(f"worker{via}", rpc.rpc_sync, (f"worker{to}", identity, (to,))) == to
                keeper = rpc.remote(f"worker{via}", torch.ones, (3,))
                assert keeper.to_here().sum() == 3
                del keeper
    rpc.shutdown(timeout=20)


def test_workers_whose_arenas_are_full_meet_and_leave():
    for outcomes in on_every_device(full_from_the_start, 3, arena_limit=8 * MIB).values():
        results(outcomes)


def no_descriptors(rank):
    if rank == 1:  # nobody else connects to or from worker 2, but for worker 0
        assert rpc.rpc_sync("worker0", identity, (1,)) == 1
        with limits.no_descriptors() as take:
            # Where memory is shared, that of the result is a descriptor. Elsewhere the result is READ: it may come too late.
            with contextlib.suppress(rpc.ArenaFull, rpc.TransferTimeout):
                assert rpc.rpc_async("worker0", large, (PIECE,), timeout=3.0).wait().sum() == PIECE
            take()
            with pytest.raises(rpc.RdmaError, match=r"files open.*ulimit -n"):
                rpc.rpc_async("worker2", identity, (2,)).wait()
            time.sleep(0.2)
        assert rpc.rpc_sync("worker0", large, (PIECE,)).sum() == PIECE
        assert rpc.rpc_sync("worker2", identity, (2,)) == 2
    rpc.shutdown(timeout=20)


def test_no_descriptor_for_more_memory_is_a_named_error():
    for outcomes in on_every_device(no_descriptors, 3, devices=("shm", "tcp", "auto")).values():
        results(outcomes)
