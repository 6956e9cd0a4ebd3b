"""Trainers and parameter servers. Each trainer has the whole model in DDP, whose hook sends every bucket of gradients to a
server, which answers all trainers with the mean when it has those of all; or only the sparse ones, and gloo adds up the others.

Ranks: trainers first, then servers. As in PyTorch's benchmark, a sparse gradient travels as its indices and values.
"""

import threading
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.rpc.functions import async_execution
from torch.nn.parallel import DistributedDataParallel

from . import trainers
from .shapes_worker import Stopwatch, as_bytes
from .trainers import name_of as name_of

rpc: Any = None
"""The library's module, once this process has joined its group."""

Sent = Tensor | list[Any]
_losses: list[Tensor] = []


class Model(nn.Module):
    """An embedding table and dense layers."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.EmbeddingBag(job["rows"], job["width"], mode="sum", sparse=True)
        self.dense = nn.Sequential(*(nn.Linear(job["width"], job["width"]) for _ in range(job["layers"])))

    def forward(self, indices: Tensor) -> Tensor:
        return self.dense(self.table(indices))


class Server:
    """Waits for the gradients of all trainers, and adds them up in the order of the trainers."""

    def __init__(self, trainers: int) -> None:
        self.trainers, self.lock = trainers, threading.Lock()
        self.waiting: dict[tuple[int, int], dict[int, tuple[Sent, Any]]] = {}

    @staticmethod
    @async_execution
    def mean(server: Any, step: int, bucket: int, rank: int, gradient: Sent) -> Any:
        """The mean for this bucket of this step, as soon as all trainers have called."""
        self = server.local_value()
        future: torch.futures.Future[Any] = torch.futures.Future()
        with self.lock:
            here = self.waiting.setdefault((step, bucket), {})
            here[rank] = gradient, future
            if len(here) < self.trainers:
                return future
            del self.waiting[step, bucket]
        total = received(here[0][0])
        for other in range(1, self.trainers):
            total = total + received(here[other][0])
        mean = to_send(total / self.trainers)
        for _, waiting in here.values():
            waiting.set_result(mean)
        return future


def to_send(gradient: Tensor) -> Sent:
    if not gradient.is_sparse:
        return gradient
    gradient = gradient.coalesce()
    return [gradient.indices(), gradient.values(), gradient.shape]


def received(gradient: Sent) -> Tensor:
    if isinstance(gradient, Tensor):
        return gradient
    return torch.sparse_coo_tensor(*gradient, check_invariants=False).coalesce()


class Buckets:
    """What becomes of the buckets of one trainer."""

    def __init__(self, rank: int, servers: list[Any], all_buckets: bool) -> None:
        self.rank, self.servers, self.all_buckets, self.step = rank, servers, all_buckets, 0

    def communicate(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's communication hook."""
        gradient, number = bucket.buffer(), bucket.index()
        if not (gradient.is_sparse or self.all_buckets):
            gradient.div_(dist.get_world_size())
            return dist.all_reduce(gradient, async_op=True).get_future().then(lambda done: done.value()[0])
        server = self.servers[number % len(self.servers)]
        arguments = (server, self.step, number, self.rank, to_send(gradient))
        return rpc.rpc_async(server.owner(), Server.mean, args=arguments).then(lambda done: received(done.value()))


def train(rank: int, job: dict[str, Any]) -> tuple[dict[str, list[float]], dict[str, bytes]]:
    if rank == 0:
        servers = [rpc.remote(f"server{number}", Server, args=(job["trainers"],)) for number in range(job["servers"])]
        trainers.share(servers)
    else:
        servers = rpc.rpc_sync("trainer0", trainers.shared)
    hook = Buckets(rank, servers, job["case"] == "all buckets")
    model = DistributedDataParallel(Model(job))
    model.register_comm_hook(None, hook.communicate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data, watch = torch.Generator().manual_seed(1 + rank), Stopwatch()
    for step in range(job["steps"] + 1):
        hook.step = step
        indices = torch.randint(job["rows"], (job["batch"], job["bag"]), generator=data)
        y = torch.randint(job["width"], (job["batch"],), generator=data)
        watch.start()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(indices), y)
        loss.backward()
        optimizer.step()
        watch.lap()
        _losses.append(loss.detach())
    dist.barrier()
    parameters = model.module.state_dict() if rank == 0 else {}
    others = {f"losses of trainer {r}": rpc.rpc_sync(f"trainer{r}", losses) for r in range(1, job["trainers"]) if not rank}
    dist.barrier()
    return {"step": watch.samples[1:]}, as_bytes({"losses": losses(), **others, **parameters})


def losses() -> Tensor:
    return torch.stack(_losses)


def run(rank: int, job: dict[str, Any]) -> Any:
    return trainers.run(rank, job, train)
