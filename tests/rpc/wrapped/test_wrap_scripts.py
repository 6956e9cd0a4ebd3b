"""TorchScript in a wrapped model: the bits of one process, whose gradients depend on how often a function has run in it. And
``torch.cond``, which a dispatch mode breaks for good."""

from __future__ import annotations

import warnings

import pytest
import torch
from group import results, run_group
from torch import nn

import rdmarpc as rpc

with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    @torch.jit.script
    def bent(x: torch.Tensor, times: int) -> torch.Tensor:
        for at in range(times):
            x = torch.tanh(x) + at
        return x

    @torch.jit.script
    def curved(x: torch.Tensor, times: int) -> torch.Tensor:
        for at in range(times):
            x = torch.tanh(x) - at
        return x


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        for at in range(3):
            x = torch.tanh(x) + at
        return x

    @torch.jit.export
    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x) * 2


class Calls(nn.Module):
    """A part that calls a function of TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return bent(self.layer(x), 3)


def chosen(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: torch.tanh(x), lambda x: x.sin(), (x,))


class Chooses(Calls):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return chosen(self.layer(x))


class Net(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        kind = Chooses if "condition" in where else Calls
        self.one = kind() if "in a part here" in where else nn.Linear(8, 8)
        self.two = kind() if "elsewhere" in where else nn.Linear(8, 8)
        self.three = torch.jit.script(Plain()) if where in ("a part", "a method of a part") else nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.two(self.one(x))
        if self.where == "a condition between parts":
            x = chosen(x)
        elif "between parts" in self.where:
            x = curved(x, 3)  # one that runs at a single worker
        return self.three.twice(x) if self.where == "a method of a part" else self.three(x)


def trained(net: nn.Module, model: nn.Module) -> list[torch.Tensor]:
    seen = []
    torch.manual_seed(1)
    for _ in range(4):
        x = torch.randn(4, 8, requires_grad=True)
        y = model(x)
        model.zero_grad()
        y.sum().backward()
        seen += [y.detach(), x.grad]
    return seen


def wrapped_or_not(where: str, rank: int) -> tuple[list[torch.Tensor], str]:
    """Rank 2 is a process of its own: what has run in it counts."""
    torch.manual_seed(0)
    net = Net(where)
    seen, captured = [], ""
    if rank == 2:
        seen = trained(net, net)
    elif rank == 0:
        model = rpc.wrap(net, {"two": "worker1"})
        seen, captured = trained(net, model), model.captured
        model.close()
    rpc.shutdown()
    return [each.tolist() for each in seen], captured


class Scenario:
    def __init__(self, where: str) -> None:
        self.where = where

    def __call__(self, rank: int) -> tuple[list[torch.Tensor], str]:
        return wrapped_or_not(self.where, rank)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "where, how",
    [
        ("between parts", "eager"),
        ("between parts and in a part elsewhere", "eager"),
        ("in a part here", "fx"),
        ("in a part elsewhere", "fx"),
        ("a part", ""),
        ("a method of a part", "eager"),
        ("a condition between parts", "eager"),
        ("a condition in a part here", "eager"),
        ("a condition in a part elsewhere", "eager"),
    ],
)
def test_scripts(where, how):
    (ours, captured), _, (theirs, _) = results(run_group(Scenario(where), 3))
    assert ours == theirs
    assert captured.startswith(how)
