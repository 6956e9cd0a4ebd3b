"""Models that programs of ``collective_programs`` train, and the names that their statements use."""

# ruff: noqa: F401

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.algorithms.model_averaging.averagers as averagers
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional as dnn
from torch import nn
from torch.distributed import pipelining
from torch.distributed._composable.replicate import replicate
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data.distributed import DistributedSampler


def net_of(w: Any) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 5))


def checkpointed(w: Any) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net_of(w)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    return Net()


def trained(net: Any, w: Any, optimizer: Any = None, steps: int = 2, common: bool = False) -> Any:
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for _ in range(steps):
        loss = net(w.made((4, 8), common=common)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return seen, list(net.parameters())


def sharded(w: Any) -> Any:
    spec = ChunkShardingSpec(0, [f"rank:{n}/cpu" for n in range(w.size)])
    made = sharded_tensor.full(spec, (5, 3), float(w.rank))
    out = torch.zeros(5, 3) if w.rank == 0 else None
    made.gather(0, out)
    return [made.local_shards()[0].tensor, out]


def shared_folder(w: Any) -> str:
    found = [tempfile.mkdtemp(dir=w.folder) if w.rank == 0 else None]
    dist.broadcast_object_list(found, 0)
    return found[0]


def pipelined(w: Any, rank: int, size: int, schedule: str) -> Any:
    torch.manual_seed(5)
    parts = [nn.Linear(8, 8) for _ in range(2 * size)]
    many = "Interleaved" in schedule
    mine = [rank, rank + size] if many else [rank]
    count = 2 * size if many else size
    stages = [pipelining.PipelineStage(parts[n], n, count, torch.device("cpu")) for n in mine]
    made = getattr(pipelining, schedule)(stages if many else stages[0], 2 * size, loss_fn=nn.functional.mse_loss)
    x, y = w.made((4 * size, 8), common=True), w.made((4 * size, 8), common=True)
    losses: list[Any] = []
    if rank == 0:
        made.step(x) if size > 1 else None
    elif rank == size - 1:
        made.step(target=y, losses=losses)
    else:
        made.step()
    return losses, [[p.grad for p in parts[n].parameters()] for n in mine]
