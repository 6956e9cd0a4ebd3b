"""PyTorch's example of a recurrent language model: table and decoder at a server, distributed autograd and optimizer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from ranks import implementation, start
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

WORDS, SIZE, STEPS = 50, 16, 5


def _parameters(module: RRef) -> list[RRef]:
    return [RRef(parameter) for parameter in module.local_value().parameters()]


def _forward(module: RRef, x: torch.Tensor) -> torch.Tensor:
    return module.local_value()(x)


def _fill(module: nn.Module, seed: int) -> None:
    """From a generator of its own: two modules are made at once, and would take turns at the process's."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.drop = nn.Embedding(WORDS, SIZE), nn.Dropout(0.0)
        _fill(self, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.drop(self.table(words))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, WORDS)
        _fill(self, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Model(nn.Module):
    def __init__(self, server: str) -> None:
        super().__init__()
        self.table, self.decoder = rpc.remote(server, Table), rpc.remote(server, Decoder)
        torch.manual_seed(4)
        self.lstm = nn.LSTM(SIZE, SIZE, 2)

    def forward(self, words: torch.Tensor, hidden: Any) -> tuple[torch.Tensor, Any]:
        embedded = rpc.rpc_sync(self.table.owner(), _forward, args=(self.table, words))
        out, hidden = self.lstm(embedded, hidden)
        return rpc.rpc_sync(self.decoder.owner(), _forward, args=(self.decoder, out)), hidden

    def parameter_rrefs(self) -> list[RRef]:
        found = [RRef(parameter) for parameter in self.lstm.parameters()]
        for part in (self.table, self.decoder):
            found.extend(rpc.rpc_sync(part.owner(), _parameters, args=(part,)))
        return found


def train() -> dict[str, Any]:
    model = Model("ps")
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameter_rrefs(), lr=0.5)
    torch.manual_seed(5)
    hidden, losses = (torch.zeros(2, 4, SIZE), torch.zeros(2, 4, SIZE)), []
    for _ in range(STEPS):
        words, next_words = torch.randint(WORDS, (7, 4)), torch.randint(WORDS, (7, 4))
        with dist_autograd.context() as context:
            hidden = (hidden[0].detach(), hidden[1].detach())
            out, hidden = model(words, hidden)
            loss = nn.functional.cross_entropy(out.flatten(0, 1), next_words.flatten())
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.detach())
    values = [parameter.to_here().detach() for parameter in model.parameter_rrefs()]
    return {"losses": losses, "parameters": values, "rpc": implementation()}


def main(rank: int) -> dict[str, Any] | None:
    rpc.init_rpc("trainer" if rank == 0 else "ps", rank=rank, world_size=2)
    found = train() if rank == 0 else None
    rpc.shutdown()
    return found


if __name__ == "__main__":
    start(main, 2)
