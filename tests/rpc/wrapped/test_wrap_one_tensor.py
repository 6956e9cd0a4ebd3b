"""Parts that give back what they are given, in some calls: a forward has the bits of one process, or an error that names it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import torch
from test_wrap import drive
from torch import nn

import rdmarpc as rpc

SIZE, STEPS = 8, 5


class Back(nn.Module):
    """Gives back what it is given in the calls that ``when`` names."""

    def __init__(self, when: Callable[[int], bool]) -> None:
        super().__init__()
        self.line, self.calls, self.when = nn.Linear(SIZE, SIZE), 0, when

    def forward(self, x):
        self.calls += 1
        return x if self.when(self.calls) else self.line(x)


def never(call: int) -> bool:
    return False


def always(call: int) -> bool:
    return True


def late(call: int) -> bool:
    return call > 2


def early(call: int) -> bool:
    return call <= 2


class Net(nn.Module):
    """``asks``: whether the second part gave what the first ``gives``, or what that was ``given``; or it writes into it."""

    def __init__(self, first: Callable[[int], bool], second: Callable[[int], bool], asks: str) -> None:
        super().__init__()
        self.stem, self.head, self.asks = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), asks
        self.first, self.second = Back(first), Back(second)

    def forward(self, x):
        x = self.stem(x)
        y = self.first(x)
        z = self.second(y)
        factor = 1.0
        if self.asks in ("given", "gives"):
            factor = 2.0 if z is (x if self.asks == "given" else y) else 3.0
        if self.asks == "writes":
            x.mul_(1.5)
        return self.head(torch.tanh(z) * factor) + torch.sin(x) + torch.cos(y)


def steps(model: nn.Module, grad: bool) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    found = []
    for number in range(STEPS):
        x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(number))
        with torch.set_grad_enabled(grad):
            found.append(model(x))
        if grad:
            optimizer.zero_grad()
            found[-1].square().mean().backward()
            optimizer.step()
    return [output.detach() for output in found]


def verdict(net: Net, grad: bool) -> str:
    expected = steps(copy.deepcopy(net), grad)
    model = rpc.wrap(net, {"first": "worker1", "second": "worker2"}, capture="fx", timeout=20.0)
    try:
        return "equal" if all(map(torch.equal, steps(model, grad), expected)) else "wrong"
    except rpc.NotSupported as error:
        return error.message
    finally:
        model.close()


def chains() -> None:
    for asks, grad in (("given", True), ("gives", False), ("nothing", True), ("nothing", False), ("writes", False)):
        for first, second in itertools.product((never, always, late, early), repeat=2):
            torch.manual_seed(0)
            came = verdict(Net(first, second, asks), grad)
            assert came != "wrong", (asks, grad, first, second)
            if {first, second} <= {never, always}:
                assert came == "equal" or asks == "writes", (asks, grad, first, second, came)
            if asks == "nothing" and not grad and early not in (first, second):
                assert came == "equal", (first, second, came)
    assert "asks whether they are one" in verdict(Net(late, always, "given"), grad=False)


def test_chains_of_parts_that_give_back_what_they_are_given():
    drive(chains, 3, timeout=200.0)
