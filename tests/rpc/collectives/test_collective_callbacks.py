"""Callbacks of the futures of calls, which call collectives themselves: in one order at all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group import Meeting, results, run_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rdmarpc.transport import NotSupported

SIZE, STEPS = 2, 20


def _join(meeting: Meeting) -> None:
    import rdmarpc  # noqa: F401

    store = dist.FileStore(f"{meeting._place}-group", -1)
    dist.init_process_group("rdmarpc", store=store, rank=meeting.rank, world_size=SIZE, timeout=timedelta(seconds=20))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8)))


def _batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 32, generator=generator) for _ in range(STEPS)]


def _two_stages(meeting: Meeting) -> None:
    _join(meeting)
    plain = DistributedDataParallel(_model())
    model = DistributedDataParallel(_model(), bucket_cap_mb=1e-3)

    def hook(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        def again(future: torch.futures.Future[Any]) -> torch.Tensor:
            half = future.value()[0] / (2 * SIZE) + (meeting.rank + 1)
            dist.all_reduce(half)
            return half

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(again)

    model.register_comm_hook(None, lambda _, bucket: hook(bucket))
    for batch in _batches(meeting.rank):
        for each in (plain, model):
            each.zero_grad()
            each(batch).pow(2).sum().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            assert torch.allclose(one.grad, other.grad + 3)
    dist.barrier()
    dist.destroy_process_group()


def test_a_hook_whose_callbacks_call_gets_its_own_results():
    """Buckets of one size: the call of the first one's callback went before that for the second at one rank, and behind it at
    the other; half of the gradients were silently those of another bucket."""
    results(run_group(_two_stages, SIZE, dynamic=True, timeout=100))


def _overlapped(meeting: Meeting) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
    from torch.distributed.optim import ZeroRedundancyOptimizer

    _join(meeting)
    model = DistributedDataParallel(_model(), bucket_cap_mb=1e-3, gradient_as_bucket_view=True)
    shards = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=1e-3)
    hook = ddp_zero_hook.hook_with_zero_step_interleaved(default_hooks.allreduce_hook, model, shards)
    model.register_comm_hook(None, hook)
    for batch in _batches(meeting.rank):
        shards.zero_grad()
        model(batch).pow(2).sum().backward()
        shards.step()
    mine = torch.cat([each.detach().flatten() for each in model.parameters()])
    both = [torch.empty_like(mine) for _ in range(SIZE)]
    dist.all_gather(both, mine)
    assert torch.equal(*both)
    dist.barrier()
    dist.destroy_process_group()


def test_a_sharded_optimizer_that_overlaps_with_ddp():
    """torch refuses it with gloo, as it may hang. Here it ended with ``Mismatch``."""
    results(run_group(_overlapped, SIZE, dynamic=True, timeout=100))


def _late(meeting: Meeting) -> None:
    from rdmarpc.collectives import queue

    queue._PATIENCE_S, queue._IDLE_S = 0.2, 0.1
    _join(meeting)
    later = threading.Event()

    def waits(_: object) -> None:
        assert later.wait(30)
        dist.all_reduce(torch.ones(3))

    group: Any = dist.group.WORLD
    assert group.queue.take("all_reduce")  # so that the callback is there before the call has ended
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(waits)
    group.queue.give()
    number = torch.tensor([float(meeting.rank)])
    dist.all_reduce(number)
    assert number.item() == 1
    later.set()
    with pytest.raises(RuntimeError, match="all_reduce by a callback for which later calls have not waited"):
        future.wait()
    with pytest.raises(NotSupported, match="for which later calls have not waited"):
        dist.all_reduce(number)  # at other ranks the callback may have been in time
    dist.destroy_process_group()


def test_a_callback_that_waits_for_a_later_call_does_not_hold_it_up_for_ever():
    results(run_group(_late, SIZE, dynamic=True, timeout=100))


def _by_a_future_of_another_group(meeting: Meeting) -> None:
    _join(meeting)
    other = dist.new_group()
    if meeting.rank == 0:
        meeting.hear("the program's call")
    work = dist.all_reduce(torch.ones(3), async_op=True)
    _calls_twice(meeting, work, lambda: dist.all_reduce(torch.ones(3), group=other, async_op=True))


def _by_a_message(meeting: Meeting) -> None:
    _join(meeting)
    if meeting.rank == 0:
        meeting.hear("the program's call")
    work = dist.isend(torch.ones(3), 1) if meeting.rank == 0 else dist.irecv(torch.ones(3), 0)
    _calls_twice(meeting, work, lambda: dist.all_reduce(torch.ones(3), async_op=True))


def _messages(meeting: Meeting) -> None:
    _join(meeting)
    if meeting.rank == 0:
        meeting.hear("the program's call")
    work = dist.all_reduce(torch.ones(3), async_op=True)
    other = 1 - meeting.rank
    exchange = [dist.irecv, dist.isend][meeting.rank]
    _calls_twice(meeting, work, lambda: exchange(torch.ones(3), other))


def _calls_twice(meeting: Meeting, first: Any, call: Callable[[], Any]) -> None:
    """A callback of ``first`` calls, and the program: in this order at rank 0, and in the other at rank 1."""
    future = first.get_future().then(lambda _: call().wait())
    if meeting.rank == 0:
        while not first.is_completed():
            first.wait()
        with pytest.raises(RuntimeError, match=r"rank 1: .* by a callback of .* comes behind .*, which was called after that"):
            future.wait()
            call().wait()
            call().wait()
    else:
        work = call()
        meeting.say("the program's call")
        with pytest.raises(RuntimeError, match=r" by a callback of .* comes behind .*, which was called after"):
            work.wait()
            future.wait()
    dist.destroy_process_group()


def _within_a_callback(meeting: Meeting) -> None:
    """The future that the last callback hangs on is asked for within a callback, and so after the program's call."""
    _join(meeting)
    rank, middle, last = meeting.rank, dist.new_group(), dist.new_group()
    if rank == 0:
        meeting.hear("the program's call")
    group: Any = middle
    assert group.queue.take("all_reduce")  # so that the last callback is there before the call in the middle has ended
    added, futures = threading.Event(), list[Any]()

    def adds(_: object) -> None:
        work = dist.all_reduce(torch.ones(3), group=middle, async_op=True)
        futures.append(work.get_future().then(lambda _: dist.all_reduce(torch.ones(3), group=last)))
        added.set()

    first = dist.isend(torch.ones(3), 1) if rank == 0 else dist.irecv(torch.ones(3), 0)
    through = first.get_future().then(adds)
    if rank == 0:
        through.wait()
        group.queue.give()
        with pytest.raises(RuntimeError, match=r"rank 1: .* by a callback of .* comes behind .*, which was called after that"):
            futures[0].wait()
            dist.all_reduce(torch.ones(3), group=last)
            dist.all_reduce(torch.ones(3), group=last)
    else:
        work = dist.all_reduce(torch.ones(3), group=last, async_op=True)
        meeting.say("the program's call")
        assert added.wait(30)
        group.queue.give()
        with pytest.raises(RuntimeError, match=r" by a callback of .* comes behind .*, which was called after"):
            work.wait()
            futures[0].wait()
    dist.destroy_process_group()


@pytest.mark.parametrize("scenario", [_by_a_future_of_another_group, _by_a_message, _messages, _within_a_callback])
def test_what_a_callback_calls_in_another_order_than_other_ranks(scenario: Callable[[Meeting], None]):
    """Each of the two got what the other was sent, silently."""
    results(run_group(scenario, SIZE, dynamic=True, timeout=100))


def _in_order(meeting: Meeting) -> None:
    _join(meeting)
    other = dist.new_group()
    for number in range(20):
        work = dist.isend(torch.ones(3), 1) if meeting.rank == 0 else dist.irecv(torch.ones(3), 0)
        value = torch.tensor([float(number)])
        work.get_future().then(lambda _, value=value: dist.all_reduce(value)).wait()
        dist.all_reduce(value)
        assert value.item() == SIZE * SIZE * number
        values = [torch.tensor([float(each)]) for each in range(4)]
        works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in values]
        futures = [
            work.get_future().then(lambda _, value=value: dist.all_reduce(value, group=other))
            for work, value in zip(works, values, strict=True)
        ]
        torch.futures.wait_all(futures)
        dist.all_reduce(values[0], group=other)
        assert [each.item() for each in values] == [0, SIZE, 2 * SIZE, 3 * SIZE]
    dist.barrier()
    dist.destroy_process_group()


def test_what_callbacks_call_in_an_order_that_ranks_share():
    results(run_group(_in_order, SIZE, dynamic=True, timeout=100))
