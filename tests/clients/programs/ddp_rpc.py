"""PyTorch's example of DDP beside RPC: embeddings at a server, the dense part replicated by DDP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from ranks import free_port, implementation, start
from torch import nn
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef, TensorPipeRpcBackendOptions
from torch.nn.parallel import DistributedDataParallel as DDP

TRAINERS, STEPS = 2, 5


class Table(nn.EmbeddingBag):
    def __init__(self, number: int) -> None:
        super().__init__(100, 16, mode="sum")
        # From a generator of its own: two tables are made at once, and would take turns at the process's.
        with torch.no_grad():
            self.weight.copy_(torch.randn(100, 16, generator=torch.Generator().manual_seed(number)))


class Hybrid(nn.Module):
    def __init__(self, table: RemoteModule) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.table, self.dense = table, DDP(nn.Linear(16, 8))

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.dense(self.table.forward(indices, offsets))


def train(table: RemoteModule, number: int) -> dict[str, Any]:
    model, losses = Hybrid(table), []
    parameters = [*table.remote_parameters(), *(RRef(parameter) for parameter in model.dense.parameters())]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)
    torch.manual_seed(10 + number)
    for _ in range(STEPS):
        indices, offsets, target = torch.randint(100, (20,)), torch.arange(0, 20, 4), torch.randint(8, (5,))
        with dist_autograd.context() as context:
            loss = nn.functional.cross_entropy(model(indices, offsets), target)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.detach())
    return {"losses": losses, "dense": [p.detach() for p in model.dense.parameters()]}


def leave() -> None:
    dist.destroy_process_group()


def main(rank: int) -> dict[str, Any] | None:
    names = {0: "master", TRAINERS + 1: "ps"}
    options = TensorPipeRpcBackendOptions(num_worker_threads=16)
    rpc.init_rpc(names.get(rank, f"trainer{rank}"), rank=rank, world_size=TRAINERS + 2, rpc_backend_options=options)
    found = None
    if rank == 0:
        numbers, port = range(1, TRAINERS + 1), free_port()
        tables = [RemoteModule("ps", Table, args=(n,)) for n in numbers]
        futures = [rpc.rpc_async(f"trainer{n}", work, args=(table, n, port)) for n, table in zip(numbers, tables)]
        found = {"trainers": [future.wait() for future in futures], "rpc": implementation()}
    rpc.shutdown()
    return found


def work(table: RemoteModule, number: int, port: int) -> dict[str, Any]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number - 1, world_size=TRAINERS)
    found = train(table, number)
    leave()
    return found


if __name__ == "__main__":
    start(main, TRAINERS + 2)
