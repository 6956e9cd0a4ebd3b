"""Forwards that write into tensors of their own model, and functions with a backward of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_wrap import assert_same_state, batches, both, drive
from torch import nn

import rdmarpc as rpc


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -0.5 * grad


@torch.library.custom_op("rdmarpc_tests::increment", mutates_args={"x"})
def increment(x: torch.Tensor) -> None:
    x.add_(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.part, self.key = (nn.Linear(20, 20) for _ in range(3))
        self.head = nn.Linear(20, 4)
        self.register_buffer("seen", torch.zeros(20))

    def forward(self, x):
        self.write(x)
        y = self.part(self.first(x))
        with torch.no_grad():
            z = self.key(x)
        return self.head(y - z - self.seen)

    def write(self, x: torch.Tensor) -> None:
        pass


class InPlace(Net):
    @torch.no_grad()
    def write(self, x):
        for key, query in zip(self.key.parameters(), self.part.parameters()):
            key.mul_(0.9).add_(query, alpha=0.1)


class ByData(Net):
    def write(self, x):
        for key, query in zip(self.key.parameters(), self.part.parameters()):
            key.data.mul_(0.9).add_(query.data, alpha=0.1)


class Assigned(Net):
    """As in MoCo."""

    @torch.no_grad()
    def write(self, x):
        for key, query in zip(self.key.parameters(), self.part.parameters()):
            key.data = key.data * 0.9 + query.data * 0.1


class Named(Net):
    @torch.no_grad()
    def write(self, x):
        self.key.weight.div_(self.key.weight.norm())


class Buffers(Net):
    def write(self, x):
        for buffer in self.buffers():
            buffer.add_(1)


class Operation(Net):
    """An operation that gives nothing."""

    def write(self, x):
        increment(self.seen)

    def forward(self, x):
        y = super().forward(x)
        z = y.detach().clone()
        increment(z)
        return y * z


class Attribute(Net):
    """A tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(20)

    def write(self, x):
        self.count.add_(1)

    def forward(self, x):
        return super().forward(x + self.count)


class Listed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.counts = [torch.zeros(20), torch.zeros(20)]

    def write(self, x):
        self.counts[1].add_(1)

    def forward(self, x):
        return super().forward(x + self.counts[1])


SEEN = torch.zeros(20)


class Global(Net):
    def forward(self, x):
        SEEN.add_(1)
        return super().forward(x + SEEN)


class GlobalByInput(Net):
    def forward(self, x):
        SEEN.add_(x.sum())
        return super().forward(x + SEEN)


class GlobalAsOut(Net):
    def forward(self, x):
        with torch.no_grad():
            torch.add(x[0], SEEN, out=SEEN)
        return super().forward(x + SEEN)


def same(make: Callable[[], nn.Module], placement: dict[str, str], **options: Any) -> str:
    """Trains both; how the model was captured, or the error that refused the first forward."""
    model, twin = both(make, placement, **options)
    mine, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin))
    try:
        for x, y in batches(3, 6, 20):
            for network, optimizer in ((model, mine), (twin, theirs)):
                optimizer.zero_grad()
                loss = F.cross_entropy(network(x), y)
                loss.backward()
                optimizer.step()
                if network is model:
                    first = loss
            assert torch.equal(first, loss), (make, placement, model.captured)
        assert_same_state(model, twin)
        return str(model.captured)
    except rpc.NotSupported as error:
        return str(error)
    finally:
        model.close()


def equal(makes: Iterable[Callable[[], nn.Module]], *placements: dict[str, str], **options: Any) -> None:
    for make in makes:
        for placement in placements:
            how = same(make, placement, **options)
            assert how.startswith(("fx", "export", "eager")), (make, placement, how)


PLACEMENTS = ({"part": "worker1"}, {"key": "worker1"}, {"part": "worker1", "key": "worker1"})


def captured(make: Callable[[], nn.Module], count: int = 1) -> None:
    equal((make,), *PLACEMENTS[:count])


def of_no_module(capture: str) -> None:
    """What is in no table of a module is written once a step too, and not by the capture."""
    for make in (Attribute, Listed):
        how = same(make, PLACEMENTS[0], capture=capture)
        assert how.startswith(("fx", "export", "eager") if capture != "export" else ("export", "torch.export of")), (make, how)
    for make in (Global, GlobalByInput, GlobalAsOut):
        into_a_global(make, capture)


def into_a_global(make: Callable[[], nn.Module], capture: str) -> None:
    SEEN.zero_()
    model, twin = both(make, PLACEMENTS[0], capture=capture)
    for x, _ in batches(3, 6, 20):
        before = SEEN.clone()
        theirs = twin(x)
        after = SEEN.clone()
        SEEN.copy_(before)
        try:
            mine = model(x)
        except rpc.NotSupported:
            assert capture == "export" and torch.equal(SEEN, before), make
            break
        assert torch.equal(SEEN, after) and torch.equal(mine, theirs), (make, model.captured, SEEN[0], after[0])
    model.close()


def without_a_graph() -> None:
    """An eager forward has copies of what lies elsewhere: it reads them, and does not write them without a word."""
    equal((InPlace, ByData, Assigned), PLACEMENTS[0], capture="eager")
    for make in (InPlace, ByData, Named):
        assert "writes into 'key.weight'" in same(make, PLACEMENTS[1], capture="eager"), make
    for capture in ("auto", "eager"):
        assert "an assignment of its 'data' in the forward" in same(Assigned, PLACEMENTS[1], capture=capture)


class Adversarial(Net):
    def forward(self, x):
        return self.head(Reversed.apply(self.part(self.first(x))))


reverse = Reversed.apply


class LookedUp(Net):
    """Calls what was looked up before any capture."""

    def forward(self, x):
        return self.head(reverse(self.part(self.first(x))))


def own_backward() -> None:
    base = torch.autograd.function._SingleLevelFunction
    for kind in (Adversarial, LookedUp):
        assert same(kind, PLACEMENTS[0]).startswith("fx")
        assert "has a backward of its own" in same(kind, PLACEMENTS[0], capture="export")
    assert "apply" not in vars(base)


class Freezing(Net):
    """All of one module, and by its name a parameter of the other."""

    def write(self, x):
        self.key.requires_grad_(False)
        self.part.weight.requires_grad = False


def freezing() -> None:
    for placement in PLACEMENTS:
        how = same(Freezing, placement)
        assert how.startswith("eager") or "requires_grad" in how or "was frozen" in how, (placement, how)


@pytest.mark.parametrize("make", [InPlace, ByData, Named, Buffers, Operation, Assigned])
def test_what_a_captured_forward_writes_itself(make):
    count = 3 if make in (InPlace, ByData, Named) else 1
    drive(partial(captured, make, count), timeout=250.0)


@pytest.mark.parametrize("capture", ["auto", "export", "eager"])
def test_writes_into_tensors_of_no_module(capture):
    drive(partial(of_no_module, capture), timeout=250.0)


@pytest.mark.parametrize("program", [without_a_graph, own_backward, freezing])
def test_what_a_forward_does_itself(program):
    drive(program, timeout=250.0)
