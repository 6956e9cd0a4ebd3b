"""Optimizers over a wrapped model, whose parameters lie at several workers: every class of torch's, those whose step combines
parameters, schedules, groups and states that change."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside import assert_same, batches, beside, both, step
from torch import nn
from torch.optim import lr_scheduler as rates

import rdmarpc as rpc

PLACEMENT = {"a": "worker1", "c": "worker2"}
DATA = batches(5, 8, 20)
Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """One parameter is a scalar, one gets no gradient, one is a sparse table."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(20, 16), nn.Linear(16, 16), nn.Linear(16, 4, bias=False)
        self.c.scale, self.c.unused = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(3, 3))

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.relu(self.a(x))))) * self.c.scale


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.out = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 4)

    def forward(self, x):
        return self.out(self.rows((x > 0).sum(1)))


def matrices(parameters: Any) -> list[Any]:
    return [p for p in parameters if p.dim() == 2]


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, dampening=0.1, weight_decay=1e-3),
    "SGD foreach": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD one by one": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, foreach=False),
    "SGD tensor": lambda ps: torch.optim.SGD(ps, torch.tensor(0.1), maximize=True),
    "SGD fused": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, fused=True),
    "Adam": lambda ps: torch.optim.Adam(ps, 1e-2, amsgrad=True),
    "Adam tensor": lambda ps: torch.optim.Adam(ps, torch.tensor(1e-2), foreach=False),
    "Adam fused": lambda ps: torch.optim.Adam(ps, 1e-2, fused=True),
    "AdamW": lambda ps: torch.optim.AdamW(ps, 1e-2, betas=(0.8, 0.99)),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, 1e-2, foreach=True),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, 1e-2, fused=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adagrad fused": lambda ps: torch.optim.Adagrad(ps, 0.1, fused=True),
    "Adadelta": lambda ps: torch.optim.Adadelta(ps),
    "Adamax": lambda ps: torch.optim.Adamax(ps),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, centered=True, momentum=0.5),
    "Rprop": lambda ps: torch.optim.Rprop(ps),
    "NAdam": lambda ps: torch.optim.NAdam(ps, decoupled_weight_decay=True),
    "RAdam": lambda ps: torch.optim.RAdam(ps),
    "ASGD": lambda ps: torch.optim.ASGD(ps, t0=2.0),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps),
    "Muon": lambda ps: torch.optim.Muon(matrices(ps)),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, lr=0.5, max_iter=4, line_search_fn="strong_wolfe"),
    "groups": lambda ps: torch.optim.AdamW(
        [{"params": [p for p in ps if p.dim() != 2], "weight_decay": 0.0}, {"params": matrices(ps), "lr": 0.05}], 0.01
    ),
}


class GlobalNorm(torch.optim.Optimizer):
    """Its steps have the length of the learning rate: the update of one parameter depends on all."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.norm(torch.stack([p.grad.norm() for p in given]))
        for p in given:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            mean.mul_(0.9).add_(p.grad / norm)
            ratio = torch.where(mean.norm() > 0, p.norm() / mean.norm(), torch.ones(()))
            p.add_(mean * ratio.clamp(0.1, 1.0), alpha=-self.param_groups[0]["lr"])


class Sam(torch.optim.SGD):
    """Sharpness-aware minimization: goes up first, then down from where it was."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.norm(torch.stack([p.grad.norm() for p in parameters]))
        before = [p.data.clone() for p in parameters]
        for p in parameters:
            p.add_(p.grad * (0.05 / (norm + 1e-12)).to(p))
        with torch.enable_grad():
            loss = closure()
        for p, old in zip(parameters, before):
            p.data = old
        super().step()
        return loss


class ClippedAdam(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
        return super().step(closure)


OPTIMIZERS |= {"global norm": GlobalNorm, "SAM": lambda ps: Sam(ps, 0.1, momentum=0.9), "clipped Adam": ClippedAdam}


def trained(net: Any, make: Make) -> Iterator[Any]:
    """Steps with a schedule and closures; in the middle the state goes through a file into a new optimizer."""
    optimizer = make(list(net.parameters()))
    schedule = rates.ExponentialLR(optimizer, 0.7)
    for number, (x, y) in enumerate(DATA):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()  # noqa: B023
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss

        yield closure()
        loss = optimizer.step(closure if isinstance(optimizer, (torch.optim.LBFGS, Sam)) or number == 1 else None)
        yield None if loss is None else loss.detach()
        schedule.step()
        if number == 2:
            saved = io.BytesIO()
            torch.save((optimizer.state_dict(), schedule.state_dict()), saved)
            saved.seek(0)
            states = torch.load(saved)
            optimizer = make(list(net.parameters()))
            schedule = rates.ExponentialLR(optimizer, 0.7)
            optimizer.load_state_dict(states[0])
            schedule.load_state_dict(states[1])
    yield optimizer.state_dict()


def optimized(name: str) -> None:
    warnings.simplefilter("ignore")
    beside(lambda net: trained(net, OPTIMIZERS[name]), Net, PLACEMENT)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer(drive, name):
    drive(optimized, name)


def sparse() -> None:
    def program(net: Any) -> Iterator[Any]:
        optimizers = [torch.optim.SparseAdam([net.rows.weight], 0.1), torch.optim.SGD(net.out.parameters(), 0.1)]
        for x, y in DATA:
            net.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            yield loss, net.rows.weight.grad.is_sparse

    beside(program, Table, {"rows": "worker1", "out": "worker2"})


def test_sparse_gradients(drive):
    drive(sparse)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: rates.StepLR(o, 2, 0.5),
    "LambdaLR": lambda o: rates.LambdaLR(o, lambda n: 1 / (n + 1)),
    "CosineAnnealingWarmRestarts": lambda o: rates.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: rates.OneCycleLR(o, 0.2, total_steps=6),
    "ReduceLROnPlateau": lambda o: rates.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: rates.SequentialLR(o, [rates.ConstantLR(o, 0.5, 2), rates.ExponentialLR(o, 0.9)], [2]),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=2),
}


def scheduled() -> None:
    warnings.simplefilter("ignore")
    for name, make in SCHEDULES.items():

        def program(net: Any, make: Any = make, name: str = name) -> Iterator[Any]:
            optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
            schedule = make(optimizer)
            for x, y in DATA:
                loss = step(net, optimizer, x, y)
                schedule.step(*([loss] if name == "ReduceLROnPlateau" else []))
                yield loss, optimizer.param_groups[0]["lr"]

        beside(program, Net, PLACEMENT)


def test_schedules(drive):
    drive(scheduled)


CHANGES: dict[str, Callable[[int, Any, Any], Any]] = {}


def change(found: Callable[[int, Any, Any], Any]) -> Callable[[int, Any, Any], Any]:
    """``found(number, net, optimizer)`` before a step."""
    CHANGES[found.__name__] = found
    return found


@change
def a_group_is_added(number: int, net: Any, optimizer: Any) -> None:
    if number == 1:
        optimizer.add_param_group({"params": [net.b.weight], "lr": 0.01})


@change
def rates_by_hand(number: int, net: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
    optimizer.param_groups[0]["momentum"] = 0.5


@change
def members_are_exchanged(number: int, net: Any, optimizer: Any) -> None:
    group = optimizer.param_groups[0]
    if number in (1, 3):
        group["params"] = [net.a.weight, net.c.weight][number // 2 : number // 2 + 1]
    elif number == 4:
        group["params"] = list(net.parameters())


@change
def states_are_changed(number: int, net: Any, optimizer: Any) -> None:
    if number == 2:
        optimizer.state[net.a.weight]["momentum_buffer"].zero_()
        optimizer.state[net.c.weight] = {"momentum_buffer": torch.ones_like(net.c.weight)}
        del optimizer.state[net.a.bias]


@change
def states_that_do_not_fit(number: int, net: Any, optimizer: Any) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    if number == 2:
        state["param_groups"][0]["params"].pop()
        with pytest.raises(ValueError, match="parameter group"):
            optimizer.load_state_dict(state)
    elif number == 4:
        group = state["param_groups"][0]
        group["params"] = [100 + index for index in group["params"]]
        state["state"] = {100 + index: entries for index, entries in state["state"].items()}
        optimizer.load_state_dict(state)


FIRST: dict[str, Any] = {}


@change
def back_to_the_first_state(number: int, net: Any, optimizer: Any) -> None:
    if number == 0:
        FIRST["state"] = copy.deepcopy(optimizer.state_dict())
    elif number == 2:
        optimizer.load_state_dict(FIRST["state"])


@change
def hooks_of_steps(number: int, net: Any, optimizer: Any) -> None:
    if number == 1:
        optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05))
        optimizer.register_step_post_hook(lambda *_: net.a.bias.data.add_(0.1))


@change
def zeros_and_none(number: int, net: Any, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=number % 2 == 0)
    if number == 2:
        net.a.weight.grad = torch.ones(16, 20)


def changed(name: str) -> None:
    def program(net: Any) -> Iterator[Any]:
        some = [p for n, p in net.named_parameters() if n != "b.weight" or name != "a_group_is_added"]
        optimizer = torch.optim.SGD(some, 0.1, momentum=0.9)
        for number, (x, y) in enumerate(DATA):
            CHANGES[name](number, net, optimizer)
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            yield loss
            if number % 2:
                optimizer.zero_grad()
        yield optimizer.state_dict()

    beside(program, Net, PLACEMENT)


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_loop_changes_in_an_optimizer(drive, name):
    drive(changed, name)


def several() -> None:
    """Two optimizers over one model, and one over two models and what lies here."""

    def program(net: Any) -> Iterator[Any]:
        other, weight = nn.Linear(4, 4), nn.Parameter(torch.zeros(2))
        nn.init.eye_(other.weight)
        optimizers = [torch.optim.Adam([*net.a.parameters(), *other.parameters()], 0.01)]
        optimizers.append(torch.optim.SGD([*net.b.parameters(), *net.c.parameters(), weight], 0.1))
        for x, y in DATA:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = F.cross_entropy(other(net(x)), y) * torch.exp(-weight[0]) + weight.sum()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            yield loss, weight

    beside(program, Net, PLACEMENT)


def test_several_optimizers(drive):
    drive(several)


def distributed() -> None:
    """What lies at a worker goes into calls to that worker and to another, and gradients come back."""
    net, twin = both(Net, PLACEMENT)
    ours = rpc.optim.DistributedOptimizer(torch.optim.SGD, [rpc.RRef(p) for p in net.parameters()], lr=0.1)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
    for (x, _), worker in zip(DATA, ("worker1", "worker2", "worker0")):
        with rpc.autograd.context() as context_id:
            rpc.autograd.backward(context_id, [rpc.rpc_sync(worker, torch.mul, (net(x), 2.0)).pow(2).mean()])
            ours.step(context_id)
        theirs.zero_grad()
        (twin(x) * 2.0).pow(2).mean().backward()
        theirs.step()
        assert_same(net.state_dict(), twin.state_dict(), worker)


def test_a_distributed_optimizer(drive):
    drive(distributed)
