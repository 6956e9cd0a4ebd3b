"""Errors that nobody expected in the threads of a worker: they end one peer's link at most, and everything else goes on."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from called import identity
from group import dismiss, on_every_device, results, run_group, until_dismissed
from timing import eventually

import rdmarpc as rpc
from rdmarpc.calls import agent
from rdmarpc.links.frames import REQUEST

T = 20.0


def ask(worker, value):
    return rpc.rpc_sync(worker, identity, (value,))


def cannot_handle(rank):
    """Worker 0 cannot handle what worker 1 sends."""
    here, heard, lost = agent.current(), threading.Event(), []
    here.on_peer_lost(lambda worker, error: 1 / 0)  # whose error keeps the next one from nothing
    here.on_peer_lost(lambda worker, error: (lost.append((worker, str(error), repr(error.__cause__))), heard.set()))
    if rank == 0:
        accept = here.callee.accept

        def fails(link, frame):
            if link.name == "worker1":
                raise MemoryError("nobody expected this")
            accept(link, frame)

        here.links.handlers[REQUEST] = fails
        rpc.rpc_sync("worker1", identity, (1,))
        rpc.rpc_sync("worker2", identity, (1,))
        dismiss("worker1")
        assert heard.wait(T)
        for number in range(50):
            assert rpc.rpc_sync("worker2", ask, ("worker0", number)) == number
        dismiss("worker2")
    else:
        until_dismissed()
        if rank == 1:
            with pytest.raises(rpc.PeerLost, match="worker0"):
                rpc.rpc_sync("worker0", identity, (1,), timeout=T)
    rpc.shutdown(graceful=False)
    return lost


def test_a_message_that_cannot_be_handled_ends_that_workers_link_alone():
    for outcomes in on_every_device(cannot_handle, 3).values():
        lost = results(outcomes)[0]
        assert lost[0][0] == "worker1" and "nobody expected this" in lost[0][1] and "MemoryError" in lost[0][2], lost


def blocks(seconds):
    time.sleep(seconds)
    return seconds


class Raises:
    def __init__(self, instead_of, times):
        self.instead_of, self.left = instead_of, times

    def __call__(self, *args):
        if self.left:
            self.left -= 1
            raise ZeroDivisionError("nobody expected this")
        return self.instead_of(*args)


def loops_fail(rank):
    if rank == 1:
        until_dismissed()
        rpc.shutdown()
        return 0
    ended = []
    threading.excepthook = ended.append
    here = agent.current()
    spoiled = [(here.caller.timeouts, "give_up"), (here.caller.timeouts, "on_tick"), (here.pool, "_relieve")]
    raises = [Raises(getattr(owner, name), 2) for owner, name in spoiled]
    for (owner, name), instead in zip(spoiled, raises):
        setattr(owner, name, instead)
    other = "worker1"
    # The thread of timeouts.
    with pytest.raises(rpc.TransferTimeout):
        rpc.rpc_async(other, blocks, (1.0,), timeout=0.3).wait()
    # The watchdog: while functions block, others run.
    slow = [rpc.rpc_async(other, blocks, (0.5,)) for _ in range(4)]
    assert rpc.rpc_sync(other, identity, (2,), timeout=T) == 2
    torch.futures.wait_all(slow)
    assert rpc.rpc_sync(other, blocks, (1.0,), timeout=T) == 1.0  # so the late answer has come, too
    # Whoever reads the rings, while nothing comes: a frame that it does not read is one that the next reader finds.
    here.progress.read = Raises(here.progress.read, 2)

    def all_raised():
        here.progress.interrupt()
        return not [each.left for each in (*raises, here.progress.read) if each.left]

    eventually(all_raised)  # the thread of timeouts looks about every second
    for number in range(50):
        assert rpc.rpc_sync(other, identity, (number,), timeout=T) == number
    dismiss(other)
    rpc.shutdown()
    return len(ended)


def test_the_loops_of_a_worker_go_on():
    assert results(run_group(loops_fail)) == [0, 0]
