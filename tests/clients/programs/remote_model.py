"""PyTorch's example of a server that holds the model: trainers call its forward, gradients arrive in their contexts."""

from __future__ import annotations

from threading import Lock
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from ranks import implementation, start
from torch import nn
from torch.distributed.optim import DistributedOptimizer

TRAINERS, STEPS = 2, 4
_lock, _server = Lock(), []


def call_method(method: Any, rref: rpc.RRef, *args: Any, **kwargs: Any) -> Any:
    return method(rref.local_value(), *args, **kwargs)


def remote_method(method: Any, rref: rpc.RRef, *args: Any, **kwargs: Any) -> Any:
    return rpc.rpc_sync(rref.owner(), call_method, args=[method, rref, *args], kwargs=kwargs)


class Server(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def gradients(self, context: int) -> dict[torch.Tensor, torch.Tensor]:
        return dict(dist_autograd.get_gradients(context))

    def parameter_rrefs(self) -> list[rpc.RRef]:
        return [rpc.RRef(parameter) for parameter in self.net.parameters()]


def server() -> Server:
    """The same one for every trainer."""
    with _lock:
        if not _server:
            _server.append(Server())
    return _server[0]


class Trainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.server = rpc.remote("server", server)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return remote_method(Server.forward, self.server, x)


def train(number: int) -> dict[str, Any]:
    net = Trainer()
    optimizer = DistributedOptimizer(torch.optim.SGD, remote_method(Server.parameter_rrefs, net.server), lr=0.03, momentum=0.5)
    generator, losses, sums = torch.Generator().manual_seed(number), [], []
    for _ in range(STEPS):
        x, y = torch.randn(8, 1, 8, 8, generator=generator), torch.randint(10, (8,), generator=generator)
        with dist_autograd.context() as context:
            loss = nn.functional.cross_entropy(net(x), y)
            dist_autograd.backward(context, [loss])
            sums.append(sorted(float(value.sum()) for value in remote_method(Server.gradients, net.server, context).values()))
            optimizer.step(context)
        losses.append(loss.detach())
    return {"losses": losses, "sums": sums}


def main(rank: int) -> dict[str, Any] | None:
    rpc.init_rpc(f"trainer{rank}" if rank else "server", rank=rank, world_size=1 + TRAINERS)
    found = None
    if rank == 0:  # one after the other: together they would step in any order
        found = {name: rpc.rpc_sync(name, train, args=(i,)) for i, name in enumerate(("trainer1", "trainer2"))}
        found |= {"model": server().state_dict(), "rpc": implementation()}
    rpc.shutdown()
    return found


if __name__ == "__main__":
    start(main, 1 + TRAINERS)
