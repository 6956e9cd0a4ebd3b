"""The workers of the mini-batch benchmark that stand for rdmarpc: worker0 trains, worker1 is the parameter server.

worker0 measures the floor, too: so many bytes by one warm memcpy from private into shared memory, there and back; and, because
rdmarpc chooses between the two by itself, the same by stores that go past the caches.
"""

import mmap
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import rdmarpc as rpc
from rdmarpc.transport import kernels

from ..harness.floor import address_of
from ..harness.measure import Samples, per_iteration
from ..harness.processes import Launcher
from .models import MODELS, Model, loss_of

STEPS = 2
"""The number of real steps whose computation is measured, after one that does not count."""
TIMEOUT_S = 300.0


class Still(torch.optim.Optimizer):
    """Leaves the parameters alone, so that a step is communication and nothing else."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return None


def turns(job: dict[str, Any], launcher: Launcher) -> Iterator[tuple[str, Model, int]]:
    """(name, model, number of the round): one turn each."""
    for name in job["models"]:
        for number in range(job["rounds"]):
            launcher.wait_for_turn()
            launcher.tell(("progress", f"{name}, round {number + 1}"))
            yield name, MODELS[name], number


def iterations(nbytes: int) -> int:
    """How often a mini-batch is exchanged in a round."""
    return max(3, min(100, int(2e9) // nbytes))


def gradients(net: nn.Module) -> list[torch.Tensor]:
    """A gradient for every parameter, in memory that torch allocated, as autograd leaves them."""
    return [torch.ones_like(parameter) for parameter in net.parameters()]


def main(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A worker from its first line to its last; worker0 tells ("progress", text) and ("measured", records)."""
    options = rpc.RpcBackendOptions(
        init_method=f"file://{job['meeting_place']}/rdmarpc",
        transport=job["device"],
        arena_limit=8 << 30,
        rpc_timeout=TIMEOUT_S,
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        measure(job, launcher)
    rpc.shutdown()


def measure(job: dict[str, Any], launcher: Launcher) -> None:
    """All rounds, as worker0 drives them."""
    samples = Samples()
    for name, model, number in turns(job, launcher):
        nbytes = 4 * model.parameters
        if number == 0:
            net = model.make()
            if job["batch"].get(name):
                samples.add("computation", 0, name, computation_us(net, model, job["batch"][name]))
            served = rpc.serve(net, ["worker1"], Still, timeout=TIMEOUT_S)
        for parameter, gradient in zip(served.parameters(), gradients(served)):
            parameter.grad = gradient
        memory = Copies(nbytes)
        for what, way in (("floor", kernels.copy), ("past_caches", kernels.copy_past_caches)):
            samples.add(name, nbytes, what, per_iteration(partial(memory.there_and_back, way), iterations(nbytes)))
        del memory
        for staging in ("traced", "always") if number % 2 == 0 else ("always", "traced"):
            served.staging = staging
            exchange(served)  # the first one finds out where the gradients lie, or makes the memory for the copies
            before = served.counters()["bytes_staged"]
            samples.add(name, nbytes, staging, per_iteration(partial(exchange, served), iterations(nbytes)))
            steps = iterations(nbytes) + 1
            samples.add(name, nbytes, f"{staging}_staged", (served.counters()["bytes_staged"] - before) / steps)
        served.optimizer.zero_grad()
        if number == job["rounds"] - 1:
            served.close()
            del net, served
    launcher.tell(("measured", samples.records()))


def exchange(served: Any) -> None:
    """The communication of a mini-batch: all gradients there, all weights back."""
    served.optimizer.step()
    served.pull()


def computation_us(net: nn.Module, model: Model, batch: int) -> float:
    """A forward and a backward, in microseconds."""
    x, y = model.sample(batch)
    elapsed = []
    for _ in range(STEPS + 1):
        net.zero_grad()
        start = time.perf_counter_ns()
        loss_of(net(x), y).backward()
        elapsed.append(time.perf_counter_ns() - start)
    net.zero_grad()
    return sum(elapsed[1:]) / STEPS / 1e3


class Copies:
    """Private memory for weights and gradients, and as much that could be shared, all of it touched."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._pairs = [(_shared(nbytes), mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)) for _ in range(2)]
        for pair in self._pairs:
            for memory in pair:
                torch.frombuffer(memory, dtype=torch.uint8).fill_(1)

    def there_and_back(self, way: Callable[[int, int, int], int]) -> None:
        for shared, private in self._pairs:
            way(address_of(shared), address_of(private), self._nbytes)


def _shared(nbytes: int) -> mmap.mmap:
    fd = os.memfd_create("floor")
    os.ftruncate(fd, nbytes)
    memory = mmap.mmap(fd, nbytes)
    os.close(fd)
    return memory
