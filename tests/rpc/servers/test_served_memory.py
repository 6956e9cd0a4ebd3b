"""The memory of a served model's parameters: what else shows it, and who reads it while weights are on their way."""

from __future__ import annotations

import copy
import os
import pickle
import select
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from group import results, run_group
from test_served import assert_same, on_workers
from test_served_object import Lazy
from test_served_optimizers import net, step
from torch import nn

import rdmarpc as rpc

SERVERS = ["worker1", "worker2"]


class Showing(nn.Module):
    """A buffer and an attribute show the memory of its weight, and its forward writes by one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.register_buffer("rows", self.layer.weight.data[1:])
        self.column = self.layer.weight.detach()[:, 1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.rows.mul_(0.9)
        return self.layer(x) * self.column


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.flat = torch.zeros(15)
        self.layer.weight.data, self.layer.bias.data = self.flat[:12].view(3, 4), self.flat[12:]


def shows(rank: int) -> None:
    twin = Showing()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = rpc.serve(Showing(), SERVERS, torch.optim.SGD, lr=0.1)
    alone = torch.optim.SGD(twin.parameters(), lr=0.1)
    for number in range(4):
        assert step(model, model.optimizer, number) == step(twin, alone, number), number
        assert torch.equal(model.column, twin.column) and torch.equal(model.rows, twin.rows)
    assert_same(model.state_dict(), twin.state_dict())
    model.close()


def is_refused(rank: int) -> None:
    def refused(says: str, model: nn.Module) -> None:
        with pytest.raises(rpc.NotSupported, match=says):
            rpc.serve(model, SERVERS, torch.optim.SGD, lr=0.1)

    two = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    two[1].weight = nn.Parameter(two[0].weight.data)
    refused("'0.weight' and '1.weight' lie in the same memory", two)
    refused("'flat' shares memory with 'layer.weight'", Flat())
    first = net()
    kept = first.state_dict()
    with pytest.warns(UserWarning, match="outside of the model shares the memory of '0.weight'"):
        model = rpc.serve(first, SERVERS, torch.optim.SGD, lr=0.1)
    assert len(kept) == 4
    refused("'0.weight' is served already", first)
    refused("'0.0.weight' is served already", nn.Sequential(first))
    with pytest.raises(rpc.NotSupported, match=r"'0.weight' is a parameter of a served model"):
        rpc.wrap(model, {"2": "worker1"})
    step(model, model.optimizer, 0)
    model.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rpc.serve(first, SERVERS, torch.optim.SGD, lr=0.1).close()
    wrapped = rpc.wrap(net(), {"2": "worker1"})
    refused("'2.weight' lies at a worker", wrapped)
    wrapped.close()


def of_a_child(read: Callable[[], bytes]) -> bytes:
    """What a forked child reads."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(theirs, read())
        finally:
            os._exit(0)
    os.close(theirs)
    ready = select.select([ours], [], [], 30.0)[0]
    found = os.read(ours, 1 << 16) if ready else b"nothing came"
    os.waitpid(child, 0)
    os.close(ours)
    return found


def forks(rank: int) -> None:
    twin = net()
    model = rpc.serve(net(), SERVERS[:1], Lazy, lr=0.1)
    weight = model[0].weight
    step(model, model.optimizer, 0), step(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 0)
    assert of_a_child(lambda: weight.detach().numpy().tobytes()) == twin[0].weight.detach().numpy().tobytes()
    model.close()


def ended_meanwhile(rank: int) -> None:
    """An exception comes in the middle of a step."""
    twin = net()
    model = rpc.serve(net(), SERVERS[:1], Lazy, lr=0.1)
    weight = model[0].weight
    trainer = model._there.trainer
    finish = trainer.finish

    def ends() -> None:
        raise KeyboardInterrupt

    trainer.finish = ends  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        step(model, model.optimizer, 0)
    trainer.finish = finish  # type: ignore[method-assign]
    alone = torch.optim.SGD(twin.parameters(), lr=0.1)
    step(twin, alone, 0)
    assert torch.equal(weight.detach(), twin[0].weight.detach())
    step(model, model.optimizer, 1), step(twin, alone, 1)
    assert_same(model.state_dict(), twin.state_dict())
    model.close()


def other_dtypes(rank: int) -> None:
    """Nothing is sent to the first server when a gradient for the second cannot be."""
    model = rpc.serve(net().bfloat16(), SERVERS, torch.optim.SGD, lr=0.1)
    for number in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if number:
            bias = model[0].bias
            bias.grad = None
            bias.grad_dtype = torch.float16
            bias.grad = torch.ones(8, dtype=torch.float16)
            with pytest.raises(rpc.NotSupported, match=r"a gradient is torch.float16, and its parameter torch.bfloat16"):
                model.optimizer.step()
            bias.grad = None
            bias.grad_dtype = torch.bfloat16
        model.optimizer.step()
        model.pull()
    model.close()


def copies(rank: int) -> None:
    """Copies of a served model and its optimizer train on here."""
    model = rpc.serve(net(), SERVERS, torch.optim.Adam, lr=0.1)
    step(model, model.optimizer, 0)
    made = [copy.deepcopy((model, model.optimizer)), pickle.loads(pickle.dumps((model, model.optimizer)))]
    for number in range(1, 4):
        losses = {step(one, optimizer, number) for one, optimizer in [*made, (model, model.optimizer)]}
        assert len(losses) == 1, number
    for one, optimizer in made:
        assert type(optimizer) is torch.optim.Adam
        assert_same(one.state_dict(), model.state_dict())
    model.close()


@pytest.mark.parametrize("scenario", [shows, is_refused, forks, ended_meanwhile, other_dtypes, copies])
def test_the_memory_of_parameters(scenario: Any) -> None:
    results(run_group(partial(on_workers, scenario, 1), 3, transport="shm"))
