"""Optimizers over a wrapped model: every class of torch's, and those whose one step combines parameters."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_wrap import batches, drive
from test_wrap_gradients import PLACEMENT, Net, assert_alike, equal
from torch import nn
from torch.optim import lr_scheduler

from rdmarpc import wrap

Make = Callable[[Any], torch.optim.Optimizer]


def plain(parameters: Any) -> list[nn.Parameter]:
    return [p for p in parameters if p.dim() == 2]


TORCH: dict[str, Make] = {
    "SGD": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, dampening=0.1, weight_decay=1e-3),
    "SGD foreach": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, foreach=True),
    "SGD tensor": lambda ps: torch.optim.SGD(ps, torch.tensor(0.1), maximize=True),
    "SGD fused": lambda ps: torch.optim.SGD(ps, 0.1, fused=True),
    "Adam": lambda ps: torch.optim.Adam(ps, 1e-2, amsgrad=True),
    "Adam tensor": lambda ps: torch.optim.Adam(ps, torch.tensor(1e-2), foreach=False),
    "AdamW": lambda ps: torch.optim.AdamW(ps, 1e-2),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, 1e-2, fused=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adadelta": lambda ps: torch.optim.Adadelta(ps),
    "Adamax": lambda ps: torch.optim.Adamax(ps),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, centered=True, momentum=0.5),
    "Rprop": lambda ps: torch.optim.Rprop(ps),
    "NAdam": lambda ps: torch.optim.NAdam(ps, decoupled_weight_decay=True),
    "RAdam": lambda ps: torch.optim.RAdam(ps),
    "ASGD": lambda ps: torch.optim.ASGD(ps, t0=2.0),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps),
    "Muon": lambda ps: torch.optim.Muon(plain(ps)),
}


class GlobalNorm(torch.optim.Optimizer):
    """Its steps have the length of the learning rate."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.norm(torch.stack([p.grad.norm() for p in given]))
        for p in given:
            state = self.state[p]
            if not state:
                state["mean"] = torch.zeros_like(p)
            state["mean"].mul_(0.9).add_(p.grad / norm)
            p.add_(state["mean"], alpha=-self.param_groups[0]["lr"])
        return loss


class ClippedAdam(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
        return super().step(closure)


class Lamb(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        total = torch.zeros(())
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                total.add_(p.grad.pow(2).sum())
        clip = total.sqrt().clamp(min=1.0)
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
            grad = p.grad / clip
            state["m"].lerp_(grad, 0.1)
            state["v"].mul_(0.999).addcmul_(grad, grad, value=1e-3)
            update = state["m"] / (state["v"].sqrt() + 1e-6)
            ratio = torch.where(update.norm() > 0, p.norm() / update.norm(), torch.ones(()))
            p.add_(update * ratio, alpha=-self.param_groups[0]["lr"])


class Lookahead(torch.optim.Optimizer):
    """Around another one; counts its steps itself."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.steps = inner, 0
        super().__init__(inner.param_groups, {})
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for slow, p in zip(self.slow, [p for group in self.inner.param_groups for p in group["params"]]):
                slow.add_(p.data - slow, alpha=0.5)
                p.data.copy_(slow)


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization, as github.com/davda54/sam has it."""

    def __init__(self, parameters: Any, base: Any, rho: float = 0.05, **more: Any) -> None:
        super().__init__(parameters, {"rho": rho, **more})
        self.base = base(self.param_groups, **more)
        self.param_groups = self.base.param_groups
        self.defaults.update(self.base.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norm = self._norm()
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()

    def _norm(self) -> torch.Tensor:
        where = self.param_groups[0]["params"][0].device
        norms = [p.grad.norm(p=2).to(where) for group in self.param_groups for p in group["params"] if p.grad is not None]
        return torch.norm(torch.stack(norms), p=2)


OTHERS: dict[str, Make] = {
    "global norm": lambda ps: GlobalNorm(ps),
    "clipped": lambda ps: ClippedAdam(ps, 1e-2),
    "lamb": lambda ps: Lamb(ps),
    "lookahead": lambda ps: Lookahead(torch.optim.Adam(ps, 1e-2)),
    "sam": lambda ps: Sam(ps, torch.optim.SGD, lr=0.1, momentum=0.9),
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, lr=0.5, max_iter=4, line_search_fn="strong_wolfe"),
}


def trained(make: Make, closures: bool) -> None:
    """Five steps with a schedule; between them the state of model and optimizer goes into new ones."""
    torch.manual_seed(3)
    net = Net()
    twin = copy.deepcopy(net)
    model = wrap(net, PLACEMENT)
    runs = []
    for network in (model, twin):
        torch.manual_seed(4)
        optimizer = make(network.parameters())
        schedule = lr_scheduler.ExponentialLR(optimizer, 0.7)
        losses = []
        for number, (x, y) in enumerate(batches(5, 8, 20)):

            def closure(network=network, optimizer=optimizer, x=x, y=y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(network(x), y)
                loss.backward()
                return loss

            if closures:
                if isinstance(optimizer, Sam):
                    closure()
                loss = optimizer.step(closure)
            else:
                loss = closure()
                optimizer.step()
            losses.append(None if loss is None else loss.detach())
            schedule.step()
            if number == 2 and not isinstance(optimizer, (Lookahead, Sam)):
                saved = io.BytesIO()
                torch.save((optimizer.state_dict(), schedule.state_dict()), saved)
                saved.seek(0)
                states = torch.load(saved, weights_only=False)
                optimizer = make(network.parameters())
                schedule = lr_scheduler.ExponentialLR(optimizer, 0.7)
                optimizer.load_state_dict(states[0])
                schedule.load_state_dict(states[1])
        runs.append((losses, optimizer.state_dict()))
    (ours, mine), (expected, theirs) = runs
    assert equal(ours, expected), f"{ours} {expected}"[:300]
    assert_alike(model, twin)
    assert list(mine["state"]) == list(theirs["state"]), (list(mine["state"]), list(theirs["state"]))
    for index, entries in theirs["state"].items():
        for key, value in entries.items():
            assert equal(mine["state"][index][key], value), (index, key)
    model.close()


def every_one(table: dict[str, Make], closures: tuple[bool, ...]) -> dict[str, str]:
    warnings.simplefilter("ignore")
    wrong = {}
    for name, make in table.items():
        for closure in closures:
            if closure or name not in ("lbfgs", "sam"):
                try:
                    trained(make, closure)
                except Exception as error:
                    wrong[f"{name} {closure}"] = f"{type(error).__name__}: {error}"[:1500]
    return wrong


def everything() -> dict[str, str]:
    return every_one(TORCH, (False,)) | every_one(OTHERS, (False, True))


def test_optimizers_are_equal_to_the_bit():
    assert not drive(everything, 3)


def assert_alike_with(make: Callable[[Any], torch.optim.Optimizer], steps: int, change: Callable[[int, Any], None]) -> None:
    """``change(n, optimizer)`` before step n of one process and of a wrapped model leaves both with the same weights."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    sides = []
    for model in (copy.deepcopy(net), wrap(net, {"2": "worker1"})):
        optimizer = make(model.parameters())
        for number in range(steps):
            change(number, optimizer)
            optimizer.zero_grad()
            model(torch.ones(3, 6)).square().sum().backward()
            optimizer.step()
        sides.append([*model.state_dict().values()])
    model.close()
    assert all(map(torch.equal, *sides))


def states_from_before_the_first_step() -> None:
    """An optimizer goes back to a state without entries: what it had is gone."""
    first: dict[str, Any] = {}

    def change(number: int, optimizer: torch.optim.Optimizer) -> None:
        if number == 0:
            first.update(copy.deepcopy(optimizer.state_dict()))
        elif number == 2:
            optimizer.load_state_dict(first)

    for make in (lambda p: torch.optim.Adam(p, 0.01), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)):
        assert_alike_with(make, 4, change)


def test_an_optimizer_goes_back_to_its_first_state() -> None:
    drive(states_from_before_the_first_step)


def numbered_from(first: int, state: dict[str, Any]) -> dict[str, Any]:
    """The same state, with other numbers of the parameters."""
    groups = [{**group, "params": [first + index for index in group["params"]]} for group in state["param_groups"]]
    return {"state": {first + index: entries for index, entries in state["state"].items()}, "param_groups": groups}


def refused_and_renumbered_states() -> None:
    """What torch refuses to load changes nothing, and entries belong to the parameters by the numbers of the saved groups."""

    def change(number: int, optimizer: torch.optim.Optimizer) -> None:
        state = copy.deepcopy(optimizer.state_dict())
        if number == 2:
            state["param_groups"][0]["params"].pop()
            with pytest.raises(ValueError, match="parameter group"):
                optimizer.load_state_dict(state)
        elif number == 4:
            optimizer.load_state_dict(numbered_from(100, state))

    assert_alike_with(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 6, change)


def test_refused_and_renumbered_states() -> None:
    drive(refused_and_renumbered_states)


def betas_that_change_in_place() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        betas = torch.tensor(0.9), torch.tensor(0.99)
        return torch.optim.Adam(parameters, torch.tensor(0.01), betas=betas, foreach=False, capturable=False)

    def change(number: int, optimizer: torch.optim.Optimizer) -> None:
        if number == 2:
            optimizer.param_groups[0]["betas"][0].fill_(0.5)

    assert_alike_with(make, 4, change)


def test_betas_that_change_in_place() -> None:
    drive(betas_that_change_in_place)


def members_that_are_exchanged() -> None:
    """A group gets as many other parameters; one group of two goes, and the state of those who stay does not."""
    everything: dict[int, list[nn.Parameter]] = {}

    def exchange(number: int, optimizer: torch.optim.Optimizer) -> None:
        group = optimizer.param_groups[0]
        if number == 0:
            everything[id(optimizer)] = group["params"]
        if number in (1, 3):
            group["params"] = everything[id(optimizer)][number - 1 : number]

    def part(number: int, optimizer: torch.optim.Optimizer) -> None:
        group = optimizer.param_groups[0]
        if number == 1:
            members = group["params"]
            optimizer.param_groups[:] = [{**group, "params": members[:1]}, {**group, "params": members[1:], "lr": 0.2}]
        if number == 3:
            del optimizer.param_groups[0]

    for change in (exchange, part):
        assert_alike_with(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 5, change)


def test_members_of_groups_that_are_exchanged() -> None:
    drive(members_that_are_exchanged)
