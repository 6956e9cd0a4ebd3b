"""The processes of a turn with several workers and servers: over rdmarpc, torch RPC and gRPC, each as a careful user would
write it. The first ``job["clients"]`` ranks are the workers.

A step sends the gradients of each server's tensors to it, to all servers at once, and gets their weights. torch RPC takes lists
of tensors, and what arrives becomes the weights; gRPC takes bytes, joined to one message and looked at in place at the server.
Its weights are copied into the parameters, because tensors over a message lie at any address, which changes the bits of what
is computed with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..harness.libraries import TENSORPIPE, grpc_channels, serve_grpc
from ..harness.meeting import init_method
from ..harness.processes import Launcher
from .others import joined, parted
from .shard import Shard, parts, shard
from .steps import LR, Output, Way, drive, made

Send = Callable[[int, list[Tensor]], Callable[[], list[Tensor]]]
"""Takes the number of a server and gradients; what it returns waits for the weights."""


def _finish(way: Way, rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """All steps of a worker; worker 0 tells what was found."""
    found, results = drive(way, job | {"rank": rank})
    if rank == 0:
        launcher.tell(("figures", found))
        launcher.tell(("results", results))


class Called:
    """``Way`` by calls of a library that knows nothing of models."""

    def __init__(self, net: nn.Module, job: dict[str, Any], send: Send, copies: bool) -> None:
        """``copies``: what comes is copied into the parameters rather than taken for them."""
        self._net, self._send, self._copies = net, send, copies
        self._parts = parts(net, job["servers"], job["placement"])

    def forward(self, x: Tensor) -> Output:
        output: Output = self._net(x)
        return output

    def forget(self) -> None:
        self._net.zero_grad()

    def exchange(self) -> None:
        sent = [
            self._send(server, [each.grad for each in mine if each.grad is not None]) for server, mine in enumerate(self._parts)
        ]
        for mine, wait in zip(self._parts, sent):
            for parameter, new in zip(mine, wait()):
                if self._copies:
                    parameter.data.copy_(new)
                else:
                    parameter.data = new

    def weights(self) -> Iterable[Tensor]:
        return self._net.parameters()


# -- rdmarpc


class Served:
    """``Way`` by ``rpc.serve``."""

    def __init__(self, served: Any) -> None:
        self._served = served

    def forward(self, x: Tensor) -> Output:
        output: Output = self._served(x)
        return output

    def forget(self) -> None:
        self._served.optimizer.zero_grad()

    def exchange(self) -> None:
        self._served.optimizer.step()
        self._served.pull()

    def weights(self) -> Iterable[Tensor]:
        found: Iterable[Tensor] = self._served.parameters()
        return found


def rdmarpc(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A process from its first line to its last."""
    import rdmarpc as rpc

    workers = [f"worker{number}" for number in range(job["clients"])]
    servers = [f"server{number}" for number in range(job["servers"])]
    options = rpc.RpcBackendOptions(
        init_method=init_method(rank, job),
        transport=job["device"],
        arena_limit=16 << 30,
        rpc_timeout=job["timeout_s"],
    )
    rpc.init_rpc([*workers, *servers][rank], rank=rank, world_size=len(workers) + len(servers), rpc_backend_options=options)
    if rank < len(workers):
        given = {"placement": job["placement"], "workers": workers, "timeout": job["timeout_s"], "lr": LR}
        served = rpc.serve(made(job), servers, torch.optim.SGD, **given)
        _finish(Served(served), rank, job, launcher)
        served.close()
    rpc.shutdown()


# -- torch RPC

_shard: Shard | None = None


def exchanged(worker: int, gradients: list[Tensor]) -> list[Tensor]:
    """Called at a server."""
    assert _shard is not None
    return _shard.exchange(worker, gradients)


def torch_rpc(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A process from its first line to its last."""
    import torch.distributed.rpc as rpc

    global _shard
    workers, servers = job["clients"], job["servers"]
    if rank >= workers:
        _shard = shard(rank - workers, job)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=init_method(rank, job), rpc_timeout=job["timeout_s"], **TENSORPIPE.get(job["device"], {})
    )
    name = f"worker{rank}" if rank < workers else f"server{rank - workers}"
    rpc.init_rpc(name, rank=rank, world_size=workers + servers, rpc_backend_options=options)

    def send(server: int, gradients: list[Tensor]) -> Callable[[], list[Tensor]]:
        wait: Callable[[], list[Tensor]] = rpc.rpc_async(f"server{server}", exchanged, args=(rank, gradients)).wait
        return wait

    if rank < workers:
        _finish(Called(made(job), job, send, copies=False), rank, job, launcher)
    rpc.shutdown()


# -- gRPC


def grpc(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A process from its first line to its last; each worker has a method of the server, whose messages are bytes."""
    workers, place = job["clients"], Path(job["meeting_place"])
    if rank >= workers:
        mine = shard(rank - workers, job)

        def answer(worker: int, request: bytes) -> bytes:
            return joined(mine.exchange(worker, parted(request, mine.weights)))

        methods = {f"worker{worker}": partial(answer, worker) for worker in range(workers)}
        serve_grpc(methods, place, rank - workers, job | {"threads": workers})
        return
    net = made(job)
    owned = parts(net, job["servers"], job["placement"])
    with grpc_channels(place, rank, job | {"calls": 1}) as channels:
        methods_of = [each.unary_unary(f"/Calls/worker{rank}") for [each] in channels]

        def send(server: int, gradients: list[Tensor]) -> Callable[[], list[Tensor]]:
            call = methods_of[server].future(joined(gradients), timeout=job["timeout_s"])
            return lambda: parted(call.result(), owned[server])

        _finish(Called(net, job, send, copies=True), rank, job, launcher)
