"""PyTorch's example of a parameter server that answers trainers together, by ``async_execution``."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed.rpc as rpc
from ranks import implementation, start
from torch import nn

TRAINERS, STEPS = 2, 8


class Server:
    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
        self.lock, self.future, self.waiting = threading.Lock(), torch.futures.Future(), 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def get_model(self) -> nn.Module:
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch(server: rpc.RRef, gradients: list[torch.Tensor]) -> torch.futures.Future:
        self = server.local_value()
        with self.lock:
            for parameter, gradient in zip(self.model.parameters(), gradients):
                parameter.grad += gradient
            self.waiting += 1
            future = self.future
            if self.waiting == TRAINERS:
                for parameter in self.model.parameters():
                    parameter.grad /= TRAINERS
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                self.waiting, self.future = 0, torch.futures.Future()
                future.set_result(self.model)
        return future


def train(server: rpc.RRef, number: int) -> list[torch.Tensor]:
    torch.manual_seed(10 + number)
    model, losses = server.rpc_sync().get_model(), []
    for _ in range(STEPS):
        x, y = torch.randn(8, 16), torch.randint(4, (8,))
        loss = nn.functional.cross_entropy(model(x), y)
        losses.append(loss.detach())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        model = rpc.rpc_sync(server.owner(), Server.update_and_fetch, args=(server, list(gradients)))
    return losses


def main(rank: int) -> dict[str, Any] | None:
    rpc.init_rpc("ps" if rank == 0 else f"trainer{rank}", rank=rank, world_size=1 + TRAINERS)
    found = None
    if rank == 0:
        server = rpc.RRef(Server())
        losses = [rpc.rpc_async(f"trainer{number}", train, args=(server, number)) for number in (1, 2)]
        values = torch.futures.wait_all(losses)
        found = {"losses": values, "model": server.local_value().model.state_dict(), "rpc": implementation()}
    rpc.shutdown()
    return found


if __name__ == "__main__":
    start(main, 1 + TRAINERS)
