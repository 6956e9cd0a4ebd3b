"""Processes that are forked from a rank: a group is of no use there, by an error and no wait; the parent's goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group import Meeting, results, run_group

from rdmarpc.transport import RdmaError

SIZE = 2
FORKED = "a process group cannot be used in a process that was forked from one of its ranks"


def _join(meeting: Meeting) -> None:
    import rdmarpc  # noqa: F401

    store = dist.FileStore(f"{meeting._place}-group", -1)
    dist.init_process_group("rdmarpc", store=store, rank=meeting.rank, world_size=SIZE, timeout=timedelta(seconds=20))


def _in_child(job: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            job()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError("the child hangs")
        time.sleep(0.01)
    assert ended == (pid, 0)


def _calls(peer: int) -> list[Callable[[], Any]]:
    x = torch.full((3,), 9.0)
    return [
        lambda: dist.all_reduce(x),
        lambda: dist.all_reduce(x, async_op=True).wait(),
        lambda: dist.send(x, peer),
        lambda: dist.irecv(x, peer).wait(),
        dist.barrier,
    ]


def _forked(meeting: Meeting) -> None:
    """Of two groups, one is in the middle of a call and has a message under way."""
    _join(meeting)
    rank, peer = meeting.rank, 1 - meeting.rank
    busy, alone = dist.new_group(), [dist.new_group([each]) for each in range(SIZE)][rank]
    numbers, came = torch.full((3,), 1.0 + rank), torch.zeros(3)
    dist.all_reduce(torch.ones(3), async_op=True).wait()  # its thread waits for the next one, and no child has it
    if rank == 0:
        under_way = [dist.all_reduce(numbers, group=busy, async_op=True), dist.irecv(came, 1, group=busy)]
        waits = threading.Thread(target=under_way[0].wait)
        waits.start()

        def child() -> None:
            for each in (*_calls(peer), *(work.wait for work in under_way), lambda: dist.barrier(busy)):
                with pytest.raises(RdmaError, match=FORKED):
                    each()
            own = torch.ones(3)
            dist.all_reduce(own, group=alone, async_op=True).wait()
            assert own.tolist() == [1.0] * 3
            dist.destroy_process_group()
            dist.init_process_group("rdmarpc", store=dist.HashStore(), rank=0, world_size=1)
            dist.barrier()
            dist.destroy_process_group()

        _in_child(child)
        _in_child(lambda: None)
        meeting.say("forked")
    else:
        meeting.hear("forked")
        under_way = [dist.all_reduce(numbers, group=busy, async_op=True), dist.isend(torch.ones(3), 0, group=busy)]
    for work in under_way:
        work.wait()
    if rank == 0:
        waits.join(20)
        assert came.tolist() == [1.0] * 3
    dist.all_reduce(numbers)
    assert numbers.tolist() == [6.0] * 3
    dist.barrier(busy)
    dist.destroy_process_group()


def test_a_group_in_a_forked_child_is_an_error_and_the_parent_goes_on():
    """A call with ``async_op=True`` waited there for ever, for a thread of the parent; so did the wait for one under way."""
    results(run_group(_forked, SIZE, dynamic=True, timeout=100))
