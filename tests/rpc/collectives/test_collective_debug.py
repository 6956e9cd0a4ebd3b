"""``TORCH_DISTRIBUTED_DEBUG``: torch wraps groups in C++ then, but not those of Python."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from group import Meeting, results, run_group
from torch import nn


def _gradient(network: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in network.parameters()]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found if each is not None]


def _made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def _level(meeting: Meeting, level: dist.DebugLevel) -> None:
    from torch.distributed.fsdp import fully_shard

    from rdmarpc.collectives.backend import ProcessGroup

    dist.set_debug_level(level)
    limit = timedelta(seconds=60)
    store = dist.FileStore(f"{meeting._place}-{level}", 2)
    dist.init_process_group("rdmarpc", store=store, rank=meeting.rank, world_size=2, timeout=limit)
    group = dist.new_group(timeout=limit)
    assert isinstance(dist.group.WORLD, ProcessGroup) and isinstance(group, ProcessGroup)
    x = torch.full((5,), meeting.rank + 1.0)
    dist.all_reduce(x, group=group)
    assert torch.equal(x, torch.full((5,), 3.0))
    plain = _made()
    (sum(plain(torch.full((2, 8), rank + 1.0)).sum() for rank in range(2)) / 2).backward()
    sharded, replicated = fully_shard(_made()), _made()
    models = [sharded, nn.parallel.DistributedDataParallel(replicated, process_group=group)]
    for model in models:
        model(torch.full((2, 8), meeting.rank + 1.0)).sum().backward()
    for network in (sharded, replicated):
        assert all(map(torch.allclose, _gradient(network), _gradient(plain)))
    with pytest.raises(
        RuntimeError, match=r"rank 0 calls barrier.*rank 1 calls all_reduce|rank 1 calls all_reduce.*rank 0 calls"
    ):
        dist.all_reduce(x, group=group) if meeting.rank else dist.barrier(group)
    meeting.step(f"{level}", 2)
    dist.destroy_process_group()


def _each(meeting: Meeting) -> None:
    for level in (dist.DebugLevel.INFO, dist.DebugLevel.DETAIL):
        _level(meeting, level)


def test_levels_of_debugging():
    results(run_group(_each, 2, dynamic=True, timeout=110))
