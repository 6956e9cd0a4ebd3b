"""Timeouts of groups, collectives and waits; and those of RPC."""

from __future__ import annotations

import math
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from group import Meeting, results, run_group

import rdmarpc as rpc


def _join(path: Path, timeout: timedelta) -> None:
    dist.init_process_group("rdmarpc", store=dist.FileStore(str(path), 1), rank=0, world_size=1, timeout=timeout)


@pytest.mark.parametrize("seconds", [-1.0, 0.0])
def test_a_group_needs_time(tmp_path: Path, seconds: float):
    wrong = timedelta(seconds=seconds)
    with pytest.raises(ValueError, match="the timeout of a process group must be longer than 0 s"):
        _join(tmp_path / "refused", wrong)
    assert not dist.is_initialized()
    _join(tmp_path / "store", timedelta(seconds=20))
    try:
        with pytest.raises(ValueError, match="the timeout of a process group"):
            dist.new_group(timeout=wrong)
        group = dist.group.WORLD
        with pytest.raises(ValueError, match="the timeout of a process group"):
            group.set_timeout(wrong)
        options = dist.BarrierOptions()
        options.timeout = wrong
        with pytest.raises(ValueError, match="the timeout of a collective"):
            group.barrier(options)
        with pytest.raises(RuntimeError, match="timed out in monitoredBarrier"):
            dist.monitored_barrier(timeout=wrong)
        dist.barrier()
        assert dist.all_reduce(torch.ones(2), async_op=True).wait(timedelta(seconds=1e12))
    finally:
        dist.destroy_process_group()


def test_waits_of_any_length():
    from rdmarpc.collectives.queue import Work
    from rdmarpc.transport import TransferTimeout, nobody

    work = Work(nobody, [], "a call")
    with pytest.raises(TransferTimeout, match="a call was not done within -1 s"):
        work.wait(timedelta(seconds=-1))
    end = threading.Timer(0.05, work.finish, (None,))
    end.start()
    assert work.wait(timedelta(seconds=1e12))
    end.join()


def _too_late(meeting: Meeting) -> None:
    from rdmarpc.transport import TransferTimeout

    store = dist.FileStore(f"{meeting._place}-late", -1)
    dist.init_process_group("rdmarpc", store=store, rank=meeting.rank, world_size=2, timeout=timedelta(seconds=20))
    group, x = dist.group.WORLD, torch.zeros(3)
    if meeting.rank == 0:
        work = dist.irecv(x, 1)
        with pytest.raises(TransferTimeout, match=r"was not done within 0\.1 s"):
            work.wait(timedelta(seconds=0.1))
        meeting.say("waited")
        work.wait()  # the message went on
        assert torch.equal(x, torch.ones(3))
        group.set_timeout(timedelta(seconds=0.2))
        with pytest.raises(TransferTimeout, match=r"receive from rank 1\(3 elements, torch.float32, tag 0\) was not done"):
            dist.recv(x.zero_(), 1)
        meeting.say("given up")
        for call in (lambda: dist.recv(torch.zeros(3), 1), dist.barrier):
            with pytest.raises(TransferTimeout, match=r"was not done within 0\.2 s"):
                call()
        assert torch.equal(x, torch.zeros(3))
    else:
        meeting.hear("waited")
        dist.send(torch.ones(3), 0)
        meeting.hear("given up")
        with pytest.raises(TransferTimeout, match="rank 0: receive from rank 1"):
            for _ in range(1000):
                dist.send(torch.ones(100_000), 0)
    meeting.step("seen", 2)
    dist.destroy_process_group()


def test_a_message_that_comes_after_the_timeout_of_the_group_goes_nowhere():
    """It went to the tensor that nobody waited for any more, and what was sent next to the wrong receiver."""
    results(run_group(_too_late, 2, dynamic=True, timeout=60))


def test_timeouts_of_rpc(tmp_path: Path):
    options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/store", rpc_timeout=math.inf)
    rpc.init_rpc("only", rank=0, world_size=1, rpc_backend_options=options)
    try:
        assert rpc.rpc_sync("only", torch.add, (1, 2), timeout=math.inf) == 3
        assert rpc.remote("only", torch.add, (1, 2)).to_here(timeout=1e300) == 3
        for call in (
            lambda: rpc.rpc_sync("only", torch.add, (1, 2), timeout=math.nan),
            lambda: rpc.rpc_async("only", torch.add, (1, 2), timeout=math.nan),
            lambda: rpc.remote("only", torch.add, (1, 2), timeout=math.nan),
            lambda: rpc.shutdown(timeout=math.nan),
        ):
            with pytest.raises(ValueError, match="got nan"):
                call()
        with pytest.raises(ValueError, match="the timeout of shutdown must not be negative"):
            rpc.shutdown(timeout=-1)
        with pytest.raises(TypeError, match="the timeout of shutdown is a number of seconds, got timedelta"):
            rpc.shutdown(timeout=timedelta(seconds=1))
    finally:
        rpc.shutdown(timeout=math.inf)
