"""Writes in place: what nobody else sees is allowed, in a step and in micro-batches; everything else is refused."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_wrap import assert_same_state, batches, both, drive
from test_wrap_pipeline import one_after_another
from torch import nn

import rdmarpc as rpc


class Spectral(nn.Module):
    """As a Fourier neural operator: a table that is made at the caller before anything has come is filled afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.mix, self.head = nn.Linear(20, 16), nn.Linear(6, 6), nn.Linear(16, 4)
        self.weights = nn.Parameter(torch.randn(5, dtype=torch.cfloat) * 0.3)

    def forward(self, x):
        table = torch.zeros(x.shape[0], 9, dtype=torch.cfloat)
        base = torch.tanh(x[:, :16])
        y = self.lift(x)
        table[:, :5] = torch.fft.rfft(y)[:, :5] * self.weights
        y = torch.fft.irfft(table, n=16)
        y += base
        y[:, 0] = 0.5
        y[:, 10:] = self.mix(y[:, 4:10].clone())
        y.mul_(2.0)
        return self.head(y)


class Masked(nn.Module):
    """Written through a view, read before and after; results of writes that nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(20, 20), nn.Linear(20, 4)

    def forward(self, x):
        y = self.a(x) * 1.0
        row = y.view(-1)
        row.mul_(0.5)
        y[:, ::2].fill_(1.0)
        size = y.shape[0]
        y.div_(size)
        return self.b(y) + y[:, :4]


class Late(nn.Module):
    """``b`` reads what is written afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(20, 20), nn.Linear(20, 4), nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.a(x)
        z = self.b(y)
        return z + self.c(y)[:, :4]


class Own(nn.Module):
    """Writes into the model's input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.ReLU(inplace=True), nn.Linear(20, 4)

    def forward(self, x):
        return self.layer(self.first(x))


def harmless() -> None:
    for make, placement in (
        (Spectral, {"lift": "worker1"}),
        (Spectral, {"lift": "worker1", "mix": "worker1", "head": "worker1"}),
        (Masked, {"b": "worker1"}),
        (Masked, {"a": "worker1"}),
    ):
        model, twin = both(make, placement)
        mine, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin))
        for x, y in batches(3, 8, 20):
            for network, optimizer in ((model, mine), (twin, theirs)):
                F.cross_entropy(network(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            loss = model.forward_backward(F.cross_entropy, x, target=y, chunks=4)
            assert torch.equal(loss, one_after_another(twin, F.cross_entropy, 4, x, y))
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert_same_state(model, twin)
        assert model.captured.startswith("fx"), (make, placement, model.captured)
        model.close()


def seen() -> None:
    for make, placement in ((Late, {"b": "worker1"}), (Late, {"b": "worker1", "c": "worker1"}), (Own, {"first": "worker1"})):
        model, twin = both(make, placement)
        x = torch.randn(4, 20)
        mine, theirs = x.clone(), x.clone()
        try:
            result: Any = model(mine)
        except rpc.NotSupported as error:
            assert "writes into" in str(error), error
        else:
            assert torch.equal(result, twin(theirs)), (make, placement, model.captured)
            assert torch.equal(mine, theirs)
        model.close()
    model, _ = both(Own, {"first": "worker1"})
    with pytest.raises(rpc.NotSupported, match="writes into"):
        model(torch.randn(4, 20))
    model.close()


class Statistics(nn.Module):
    """The forward reads a buffer that a part has written: by batch norm, which no version tells, or in place."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(20, 20), nn.Linear(20, 4)
        self.part = nn.BatchNorm1d(20) if norm else Counted()

    def forward(self, x):
        y = self.part(torch.tanh(self.first(x)))
        return self.head(y - self.part.running_mean)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(20))

    def forward(self, x):
        self.running_mean.mul_(0.5).add_(x.detach().mean(0))
        return x * 2


def statistics() -> None:
    """``first`` is another segment of the same worker, which comes before the write."""
    for norm, capture in itertools.product((True, False), ("auto", "eager")):
        model, twin = both(lambda: Statistics(norm), {"first": "worker1", "part": "worker1"}, capture=capture)  # noqa: B023
        for x, _ in batches(3, 6, 20):
            assert torch.equal(model(x), twin(x)), (norm, capture, model.captured)
        with torch.inference_mode():
            assert torch.equal(model.part.running_mean + 1, twin.part.running_mean + 1)
        model.close()


def everything() -> None:
    harmless()
    seen()


def test_writes_in_place():
    drive(everything, timeout=250.0)


def test_buffers_that_parts_write():
    drive(statistics, timeout=250.0)


class LaterOtherwise(nn.Module):
    """Does otherwise from the third call on: no capture of parts as they are sees that."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.late(x) if self.calls > 2 else x + 1

    def late(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class WritesLate(LaterOtherwise):
    def late(self, x):
        return x.add_(1)


class FailsLate(LaterOtherwise):
    """Its result is used by nobody."""

    def late(self, x):
        time.sleep(0.3)  # when the caller has all that it waits for
        raise ValueError("the third call")


class Two(nn.Module):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.line, self.other = nn.Linear(4, 4), other

    def forward(self, x):
        y = self.line(x)
        z = self.other(y)
        return (y, z) if isinstance(self.other, WritesLate) else y


def found_without_a_backward():
    writes, fails = (WritesLate(), rpc.NotSupported, "written in place"), (FailsLate(), ValueError, "the third call")
    for other, kind, text in (writes, fails):
        model = rpc.wrap(Two(other), {"line": "worker1", "other": "worker2"}, capture="fx", timeout=20.0)
        done = 0
        with torch.no_grad(), pytest.raises(kind, match=text):
            for _ in range(4):
                model(torch.ones(2, 4))
                done += 1
                time.sleep(0.5)
        assert done == 2 if isinstance(other, WritesLate) else done in (2, 3), done
        model.close()


def test_what_is_found_without_a_backward_is_not_lost():
    """Of writes before anybody has what was written; of a part that nobody waits for when the model is used next."""
    drive(found_without_a_backward, 3)
