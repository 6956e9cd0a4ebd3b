"""``torch.utils.checkpoint`` within a forward runs what it calls twice: what that changes changes twice, as in one process."""

from __future__ import annotations

import torch
from test_wrap import drive
from test_wrap_kept import SIZE, train, verdict
from torch import nn
from torch.utils.checkpoint import checkpoint

import rdmarpc as rpc


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.calls = nn.Linear(SIZE, SIZE), 0

    def forward(self, x):
        self.calls += 1
        return torch.relu(self.line(x)) * (1 + 0.1 * self.calls)


class Net(nn.Module):
    """``inside``: the forward has a norm in what is run twice."""

    def __init__(self, part: nn.Module, reentrant: bool, inside: bool = False) -> None:
        super().__init__()
        self.stem, self.part, self.head, self.norm = nn.Linear(SIZE, SIZE), part, nn.Linear(SIZE, 2), nn.BatchNorm1d(SIZE)
        self.reentrant, self.inside = reentrant, inside

    def forward(self, x):
        def twice(x):
            return self.norm(self.part(x)) if self.inside else self.part(x)

        return self.head(checkpoint(twice, self.stem(x), use_reentrant=self.reentrant))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE))


def twice_as_in_one_process() -> None:
    for reentrant in (False, True):
        for place in ("part", "head"):
            for part in (normed, Counting):
                assert verdict(lambda: Net(part(), reentrant), train, "auto", place) == "equal"  # noqa: B023
            assert verdict(lambda: Net(nn.Linear(SIZE, SIZE), reentrant, True), train, "auto", place) == "equal"  # noqa: B023
    assert "torch.utils.checkpoint runs it twice" in verdict(lambda: Net(normed(), False), train, "fx")
    model = rpc.wrap(Net(nn.Linear(SIZE, SIZE), False), {"part": "worker1"})
    model(torch.randn(4, SIZE))
    assert model.captured == "fx"
    model.close()


def test_what_is_run_twice_acts_twice():
    drive(twice_as_in_one_process, timeout=200.0)
