"""Nets and data of the zoo's training loops, and the plainest loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .sides import Alone

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


class Block(nn.Module):
    def __init__(self, width: int, again: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.again = nn.Linear(width, width), nn.Linear(width, width), again

    def inner(self, x):
        return self.two(torch.tanh(self.one(x)))

    def forward(self, x):
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.again and self.training else self.inner(x))


class Net(nn.Module):
    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.body = nn.ModuleList([Block(16, again), Block(16)])
        self.head = nn.Linear(16, 4)
        self.scale = 1.0

    def forward(self, x):
        x = self.stem(x)
        for block in self.body:
            x = block(x)
        return self.head(x) * self.scale


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 10))
        self.critic = nn.Sequential(nn.Linear(10, 16), nn.LeakyReLU(), nn.Linear(16, 1))

    def forward(self, z, real=None):
        fake = self.generator(z)
        return self.critic(fake), (self.critic(real) if real is not None else None)


def data(number: int, count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randn(count, 10, generator=generator), torch.randint(0, 4, (count,), generator=generator)


def error(side: Alone, number: int, count: int = 8) -> torch.Tensor:
    x, y = data(number, count)
    return F.cross_entropy(side.model(x), y)


Seen = Iterator[Any]
"""What a loop shows of itself: losses, gradients, norms. Its model's ``state_dict`` is compared at its end."""


def plain_steps(side: Alone, optimizer: Any, steps: int = 3, start: int = 0, after: Callable[[], Any] = lambda: None) -> Seen:
    for number in range(start, start + steps):
        optimizer.zero_grad()
        loss = error(side, number)
        loss.backward()
        optimizer.step()
        after()
        yield loss.detach()


def grads_of(side: Alone) -> Any:
    return {name: None if grad is None else grad.detach().clone() for name, grad in side.gradients().items()}
