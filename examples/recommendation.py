"""Who will watch which film: a recommendation model as in DLRM (Naumov et al., "Deep Learning Recommendation Model for
Personalization and Recommendation Systems", 2019), with its large tables on parameter servers and its small dense part on every
trainer.

A trainer takes its share of each batch, asks all servers at once for the rows that it needs, and computes a loss. One
distributed autograd context holds a step: the gradients of a table are sparse and stay where the table is; those of the
dense part are added up among the trainers by a process group of `torch.distributed`. Then every gradient is stepped where
it lies. At the end one process trains the same model alone: what it reaches has to be the same.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import rdmarpc as rpc

NUMBERS, WIDTH, BATCH = 8, 16, 240
ROWS = {"user": 400, "film": 200, "genres": 20}  # of the tables
GENRES = 3  # of each film
HELD_OUT = 4096
LEARN_TABLES, LEARN_DENSE = {"lr": 50.0}, {"lr": 0.01}

Batch = tuple[Tensor, dict[str, Tensor], Tensor]  # numbers (n, NUMBERS); rows of each table (n, rows in a bag); watched (n,)


class Table(nn.EmbeddingBag):
    """One vector for each user, film or genre; a bag of several is their sum."""

    def __init__(self, name: str) -> None:
        super().__init__(ROWS[name], WIDTH, mode="sum", sparse=True)
        # From a generator of its own: a server makes several tables at once, and torch's is one for all its threads.
        nn.init.normal_(self.weight, std=0.1, generator=torch.Generator().manual_seed(len(name)))


class Dense(nn.Module):
    """From the rows of the tables to one score: the higher, the more likely is it that the film will be watched."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        # SiLU: it is smooth. A ReLU can be on here and off in the twin because of one rounding, and they would part.
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 32), nn.SiLU(), nn.Linear(32, WIDTH))
        self.top = nn.Sequential(nn.Linear(WIDTH + len(ROWS) * (len(ROWS) + 1) // 2, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, numbers: Tensor, looked_up: list[Tensor]) -> Tensor:
        below = self.bottom(numbers)
        all_of_it = torch.stack([below, *looked_up], 1)  # (n, vectors, WIDTH)
        one, other = torch.triu_indices(len(ROWS) + 1, len(ROWS) + 1, 1)
        products = (all_of_it[:, one] * all_of_it[:, other]).sum(2)
        return self.top(torch.cat([below, products], 1)).squeeze(1)


def evenings(steps: int) -> tuple[Batch, Batch, float]:
    """Made-up evenings: `steps` batches one after the other, others that are held out, and on these the loss of somebody who
    knows the tastes that they were made up from."""
    made_up, number = torch.Generator().manual_seed(0), steps * BATCH + HELD_OUT
    tastes = {name: torch.randn(rows, 4, generator=made_up) / 2 for name, rows in ROWS.items()}
    genres_of = torch.randint(ROWS["genres"], (ROWS["film"], GENRES), generator=made_up)
    weights = torch.randn(NUMBERS, generator=made_up) / 2

    numbers = torch.randn(number, NUMBERS, generator=made_up)
    user, film = (torch.randint(ROWS[name], (number, 1), generator=made_up) for name in ("user", "film"))
    rows = {"user": user, "film": film, "genres": genres_of[film[:, 0]]}
    likes, is_film, is_genre = (tastes[name][rows[name]].sum(1) for name in ROWS)
    appeal = 2 * (likes * (is_film + is_genre)).sum(1) + numbers @ weights
    watched = torch.bernoulli(appeal.sigmoid(), generator=made_up)
    known = F.binary_cross_entropy_with_logits(appeal[-HELD_OUT:], watched[-HELD_OUT:]).item()
    everything = numbers, rows, watched
    return some(everything, slice(-HELD_OUT)), some(everything, slice(-HELD_OUT, None)), known


def some(evenings: Batch, chosen: slice) -> Batch:
    numbers, rows, watched = evenings
    return numbers[chosen], {name: each[chosen] for name, each in rows.items()}, watched[chosen]


class OnServers:
    """What a trainer has of the model: the tables by reference, the dense part as its own."""

    def __init__(self, tables: dict[str, rpc.nn.RemoteModule], trainers: int) -> None:
        self.tables, self.dense, self.trainers = tables, Dense(), trainers
        rows = [parameter for table in tables.values() for parameter in table.remote_parameters()]
        dense = [rpc.RRef(parameter) for parameter in self.dense.parameters()]
        self.optimizers = [
            rpc.optim.DistributedOptimizer(torch.optim.SGD, rows, **LEARN_TABLES),
            rpc.optim.DistributedOptimizer(torch.optim.Adam, dense, **LEARN_DENSE),
        ]

    def loss(self, numbers: Tensor, rows: dict[str, Tensor], watched: Tensor) -> Tensor:
        looked_up = [table.forward_async(rows[name]) for name, table in self.tables.items()]  # from all servers at once
        score = self.dense(numbers, torch.futures.wait_all(looked_up))
        return F.binary_cross_entropy_with_logits(score, watched)

    def step(self, share: Batch) -> float:
        with rpc.autograd.context() as context:
            loss = self.loss(*share) / self.trainers
            rpc.autograd.backward(context, [loss])
            gradients = rpc.autograd.get_gradients(context)
            for parameter in self.dense.parameters():
                dist.all_reduce(gradients[parameter])  # from here on all have looked up their rows, which may change now
            for optimizer in self.optimizers:
                optimizer.step(context)
        with torch.no_grad():
            dist.all_reduce(loss)  # from here on all have stepped the tables, which may be looked up again
        return loss.item()


class InOneProcess:
    def __init__(self) -> None:
        self.tables, self.dense = {name: Table(name) for name in ROWS}, Dense()
        rows = [table.weight for table in self.tables.values()]
        self.optimizers = torch.optim.SGD(rows, **LEARN_TABLES), torch.optim.Adam(self.dense.parameters(), **LEARN_DENSE)

    def loss(self, numbers: Tensor, rows: dict[str, Tensor], watched: Tensor) -> Tensor:
        score = self.dense(numbers, [table(rows[name]) for name, table in self.tables.items()])
        return F.binary_cross_entropy_with_logits(score, watched)

    def step(self, batch: Batch) -> float:
        loss = self.loss(*batch)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.item()


def train(model: OnServers | InOneProcess, steps: int, trainer: int = 0, trainers: int = 1) -> tuple[list[float], float, float]:
    """With a trainer's share of every batch: the loss of every batch, and that on evenings held out, before and after."""
    batches, held_out, _ = evenings(steps)
    losses, share = [], BATCH // trainers
    with torch.no_grad():
        before = model.loss(*held_out).item()
    for number in range(steps):
        start = number * BATCH + trainer * share
        losses.append(model.step(some(batches, slice(start, start + share))))
        if number % 50 == 0 and trainer == 0:
            print(f"{type(model).__name__}: step {number}: loss {losses[-1]:.3f}", flush=True)
    with torch.no_grad():
        return losses, before, model.loss(*held_out).item()


def train_on_servers(tables: dict[str, rpc.nn.RemoteModule], *arguments: int) -> tuple[list[float], float, float]:
    """Runs on every trainer at the same time."""
    steps, trainer, trainers = arguments
    return train(OnServers(tables, trainers), steps, trainer, trainers)


def direct(steps: int, trainers: int, servers: int) -> bool:
    """Places the tables, has everybody train, and compares. Whether it is as it should be."""
    tables = {
        name: rpc.nn.RemoteModule(f"server{number % servers}/cpu", Table, args=(name,)) for number, name in enumerate(ROWS)
    }
    running = [
        rpc.rpc_async(f"trainer{number}", train_on_servers, (tables, steps, number, trainers), timeout=0)
        for number in range(trainers)
    ]
    losses, before, reached = torch.futures.wait_all(running)[0]
    alone, _, twin = train(InOneProcess(), steps)
    apart = max(abs(one - other) for one, other in zip(losses, alone))
    known = evenings(steps)[2]
    print(f"no step's losses are further apart than {apart:.1e}")
    print(f"loss on evenings never seen: {reached:.4f} by {trainers} trainers, {twin:.4f} by one process,", end=" ")
    print(f"{before:.4f} before, {known:.4f} by who knows everything")
    return max(apart, abs(reached - twin)) < 1e-5 and reached - known < 0.6 * (before - known)


def worker(rank: int, steps: int, trainers: int, servers: int, meeting: str) -> None:
    torch.set_num_threads(1)
    if rank < trainers:
        dist.init_process_group("gloo", f"file://{meeting}/trainers", rank=rank, world_size=trainers)
    options = rpc.RpcBackendOptions(init_method=f"file://{meeting}/store")
    name = f"trainer{rank}" if rank < trainers else f"server{rank - trainers}"
    rpc.init_rpc(name, rank=rank, world_size=trainers + servers, rpc_backend_options=options)
    well = rank > 0 or direct(steps, trainers, servers)
    rpc.shutdown()
    if rank < trainers:
        dist.destroy_process_group()
    sys.exit(not well)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as meeting:
        arguments = given.steps, given.trainers, given.servers, meeting
        torch.multiprocessing.spawn(worker, arguments, nprocs=given.trainers + given.servers)
