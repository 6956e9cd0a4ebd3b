"""PyTorch's example of a pipeline: two halves of a convolutional net at two workers, micro-batches through references."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from ranks import implementation, start
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

SPLITS, STEPS = (1, 4), 2


class Shard(nn.Module):
    """A half. Float64 and small multiples of powers of two, so sums are exact: micro-batches come in any order."""

    def __init__(self, seed: int, *layers: nn.Module) -> None:
        super().__init__()
        self.lock, self.net = threading.Lock(), nn.Sequential(*layers).double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-4, 5, parameter.shape, generator=generator) / 8)

    def forward(self, x_rref: RRef) -> torch.Tensor:
        x = x_rref.to_here()
        with self.lock:
            return self.net(x)

    def parameter_rrefs(self) -> list[RRef]:
        return [RRef(parameter) for parameter in self.parameters()]


def first() -> Shard:
    return Shard(1, nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(2))


def second() -> Shard:
    return Shard(2, nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3))


class Net(nn.Module):
    def __init__(self, split: int) -> None:
        super().__init__()
        self.split, self.parts = split, (rpc.remote("worker1", first), rpc.remote("worker2", second))

    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        futures = []
        for x in xs.chunk(self.split):
            y = self.parts[0].remote().forward(RRef(x))
            futures.append(self.parts[1].rpc_async().forward(y))
        return torch.cat(torch.futures.wait_all(futures))

    def parameter_rrefs(self) -> list[RRef]:
        return [rref for part in self.parts for rref in part.remote().parameter_rrefs().to_here()]


def train(split: int) -> dict[str, Any]:
    net = Net(split)
    optimizer = DistributedOptimizer(torch.optim.SGD, net.parameter_rrefs(), lr=2**-6)
    generator, losses = torch.Generator().manual_seed(3), []
    for _ in range(STEPS):
        x = torch.randint(-4, 5, (8, 1, 8, 8), generator=generator).double() / 4
        y = torch.randint(-4, 5, (8, 3), generator=generator).double()
        with dist_autograd.context() as context:
            loss = (net(x) - y).abs().sum()
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.detach())
    return {"losses": losses, "parameters": [rref.to_here().detach() for rref in net.parameter_rrefs()]}


def main(rank: int) -> dict[str, Any] | None:
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=16)
    rpc.init_rpc(f"worker{rank}" if rank else "master", rank=rank, world_size=3, rpc_backend_options=options)
    found = {"rpc": implementation(), **{f"split {split}": train(split) for split in SPLITS}} if rank == 0 else None
    rpc.shutdown()
    return found


if __name__ == "__main__":
    start(main, 3)
