"""A recommendation model as in DLRM: its embedding tables are at servers, its dense part is at every trainer under DDP, and one
distributed autograd context of a step holds the gradients of both.

Trainers draw rows of their own, so the order in which they step the tables changes nothing and the results are the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from . import trainers
from .shapes_worker import Stopwatch, as_bytes
from .trainers import name_of as name_of

rpc: Any = None
"""The library, set by the process that runs this."""


class Tables(nn.Module):
    """The tables of one server; a bag of rows is their sum."""

    def __init__(self, count: int, rows: int, width: int, seed: int) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(seed)
        bags = [nn.EmbeddingBag(rows, width, mode="sum", sparse=True) for _ in range(count)]
        for bag in bags:
            nn.init.normal_(bag.weight, std=0.1, generator=drawn)
        self.bags = nn.ModuleList(bags)

    def forward(self, rows: Tensor) -> Tensor:
        """``rows``: int64 (tables, batch, bag). Returns (batch, tables, width)."""
        return torch.stack([bag(each) for bag, each in zip(self.bags, rows)], 1)


def look_up(tables: Any, rows: Tensor) -> Tensor:
    found: Tensor = tables.local_value()(rows)
    return found


def parameters_of(tables: Any) -> list[Any]:
    return [rpc.RRef(parameter) for parameter in tables.local_value().parameters()]


def weights_of(tables: Any) -> Tensor:
    return torch.stack([bag.weight.detach() for bag in tables.local_value().bags])


class Dense(nn.Module):
    """From the numbers of a sample and its bags to one score: the products of all pairs of vectors, between two perceptrons."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        width, hidden, vectors = job["width"], job["hidden"], job["tables"] * job["servers"] + 1
        self.pairs = torch.triu_indices(vectors, vectors, 1)
        self.bottom = nn.Sequential(nn.Linear(job["numbers"], hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.top = nn.Sequential(nn.Linear(width + self.pairs.shape[1], hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, numbers: Tensor, bags: Tensor) -> Tensor:
        below = self.bottom(numbers)
        vectors = torch.cat([below.unsqueeze(1), bags], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([below, products], 1)).squeeze(1)


def batch_of(rank: int, job: dict[str, Any], drawn: torch.Generator) -> tuple[Tensor, list[Tensor], Tensor]:
    """Numbers, the rows for each server, and labels. Rows are those whose number leaves ``rank`` when divided by trainers."""
    batch, shape = job["batch"], (job["tables"], job["batch"], job["bag"])
    own = job["rows"] // job["trainers"]
    rows = [torch.randint(own, shape, generator=drawn) * job["trainers"] + rank for _ in range(job["servers"])]
    numbers = torch.randn(batch, job["numbers"], generator=drawn)
    return numbers, rows, torch.randint(2, (batch,), generator=drawn).float()


def train(rank: int, job: dict[str, Any]) -> tuple[dict[str, list[float]], dict[str, bytes]]:
    if rank == 0:
        tables = [rpc.remote(f"server{number}", Tables, args=arguments(number, job)) for number in range(job["servers"])]
        trainers.share(tables)
    else:
        tables = rpc.rpc_sync("trainer0", trainers.shared)
    model = DistributedDataParallel(Dense(job))
    remote = [each for table in tables for each in rpc.rpc_sync(table.owner(), parameters_of, args=(table,))]
    everything = [*remote, *(rpc.RRef(parameter) for parameter in model.parameters())]
    autograd, optim = rpc_parts()
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, everything, lr=job["lr"])
    drawn, step_watch, look_watch = torch.Generator().manual_seed(1 + rank), Stopwatch(), Stopwatch()
    losses = []
    for _ in range(job["steps"] + 1):
        numbers, rows, labels = batch_of(rank, job, drawn)
        step_watch.start()
        with autograd.context() as context:
            look_watch.start()
            asked = [rpc.rpc_async(table.owner(), look_up, args=(table, each)) for table, each in zip(tables, rows)]
            bags = torch.cat([each.wait() for each in asked], 1)
            look_watch.lap()
            loss = F.binary_cross_entropy_with_logits(model(numbers, bags), labels)
            autograd.backward(context, [loss])
            optimizer.step(context)
        step_watch.lap()
        losses.append(loss.detach())
    dist.barrier()
    results = {"losses of trainer 0": torch.stack(losses), **model.module.state_dict()}
    for number, table in enumerate(tables if rank == 0 else []):
        results[f"tables of server {number}"] = rpc.rpc_sync(table.owner(), weights_of, args=(table,))
    dist.barrier()
    return {"step": step_watch.samples[1:], "lookup": look_watch.samples[1:]}, as_bytes(results)


def arguments(server: int, job: dict[str, Any]) -> tuple[int, int, int, int]:
    return job["tables"], job["rows"], job["width"], 100 + server


def rpc_parts() -> tuple[Any, Any]:
    """Autograd and optimizers of the library: torch has them in modules of their own."""
    if rpc.__name__ == "rdmarpc":
        return rpc.autograd, rpc.optim
    import torch.distributed.autograd
    import torch.distributed.optim

    return torch.distributed.autograd, torch.distributed.optim


def run(rank: int, job: dict[str, Any]) -> Any:
    return trainers.run(rank, job | {"batch": int(job["case"].split()[-1])}, train)
