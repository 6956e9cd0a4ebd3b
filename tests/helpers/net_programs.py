"""A small model, and programs for it that a test runs with the wrapped one and with that of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from beside import batches, beside, sgd, step
from torch import nn
from torch.utils.checkpoint import checkpoint

PLACEMENTS = {"turns": {"stem": "worker1", "body.0": "worker2", "head": "worker1"}, "half": {"body": "worker1"}}
DATA = batches(4, 8, 10)
Program = Callable[[Any], Iterator[Any]]


class Programs(dict[str, tuple[Program, Callable[[], nn.Module]]]):
    """By name: a program, and what makes its model."""

    def __call__(self, found: Program) -> Program:
        """Decorates a program for ``Net``."""
        self[found.__name__] = found, Net
        return found

    def net(self, kind: type[Net]) -> type[Net]:
        """Decorates a model that is trained for some steps."""
        self[kind.__name__] = plainly, kind
        return kind

    def run(self, name: str, how: str) -> None:
        warnings.simplefilter("ignore")
        found, make = self[name]
        beside(found, make, PLACEMENTS[how])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.again = nn.Linear(16, 16), nn.Linear(16, 16), None

    def inner(self, x):
        return self.two(torch.tanh(self.one(x)))

    def forward(self, x):
        return x + (self.inner(x) if self.again is None else checkpoint(self.inner, x, use_reentrant=self.again))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True))
        self.body, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(16, 4)
        self.gain, self.kept = 1.0, []

    def begin(self) -> None:
        """Before its first step."""

    def middle(self, x):
        for block in self.body:
            x = block(x)
        return x

    def forward(self, x):
        return self.head(self.middle(self.stem(x))) * self.gain


def loss_of(net: Any, at: int = 0) -> torch.Tensor:
    return F.cross_entropy(net(DATA[at][0]), DATA[at][1])


def given(net: Any) -> list[torch.Tensor]:
    return [p.grad for p in net.parameters() if p.grad is not None]


def plainly(net: Any, change: Callable[[int], Any] = lambda number: None) -> Iterator[Any]:
    net.begin()
    optimizer = sgd(net)
    for number, (x, y) in enumerate(DATA):
        change(number)
        yield step(net, optimizer, x, y)
    yield net.kept
