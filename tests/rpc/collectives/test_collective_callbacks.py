"""Callbacks of the futures of calls, which call collectives themselves: in one order at all ranks."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group import Meeting, results, run_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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
    assert group.queue.take()  # so that the callback is there before the call has ended
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(waits)
    group.queue.give()
    number = torch.tensor([float(meeting.rank)])
    dist.all_reduce(number)
    later.set()
    with pytest.raises(RuntimeError, match="all_reduce by a callback for which later calls have not waited"):
        future.wait()
    dist.all_reduce(number)
    assert number.item() == SIZE
    dist.destroy_process_group()


def test_a_callback_that_waits_for_a_later_call_does_not_hold_it_up_for_ever():
    results(run_group(_late, SIZE, dynamic=True, timeout=100))
