"""Training loops that are drawn from a seed. The same dice give the same loop for a model of one process, wrapped or served."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import drawn_models
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, update_bn

OPTIMIZERS: list[Callable[[Any], Any]] = [
    lambda make: make(torch.optim.SGD, lr=0.1),
    lambda make: make(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    lambda make: make(torch.optim.Adam, lr=0.01),
    lambda make: make(torch.optim.AdamW, lr=0.01, amsgrad=True),
    lambda make: make(torch.optim.RMSprop, lr=0.01),
    lambda make: make(torch.optim.Adagrad, lr=0.05),
]
LBFGS: Callable[[Any], Any] = lambda make: make(torch.optim.LBFGS, lr=0.1, max_iter=3)  # noqa: E731
SCHEDULES: list[Callable[[Any], Any]] = [
    lambda o: None,
    lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=30, cycle_momentum=False),
]


class Loop:
    """``make(kind, params, **settings)`` gives an optimizer for ``model``. ``run`` gives what is to be compared, by name."""

    def __init__(self, model: Any, make: Callable[..., Any], dice: random.Random, changes: bool) -> None:
        self.model, self.dice, self.changes = model, dice, changes
        drawn_models.LEVEL, drawn_models.COUNT = 1.0, 0
        self.searches = changes and dice.random() < 0.1
        self.split = not self.searches and dice.random() < 0.2
        self.later = not (self.searches or self.split) and dice.random() < 0.2
        names = [name for name, _ in model.named_parameters()]
        groups = [names[::2], names[1::2]] if self.split or self.later else [names]
        kind = LBFGS if self.searches else dice.choice(OPTIMIZERS)
        self.make = lambda chosen: kind(lambda cls, **settings: make(cls, self._named(chosen), **settings))
        self.groups = groups
        self.optimizers = [self.make(chosen) for chosen in (groups if self.split else groups[:1])]
        schedule = dice.choice(SCHEDULES)
        self.schedules = [made for o in self.optimizers if (made := schedule(o)) is not None]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=not self.searches and dice.random() < 0.2)
        self.average: Any = None
        self.cast: torch.dtype | None = None
        self.rounds_more = False
        """Whether it has computed with fewer bits."""
        self.kept: Any = None
        self.clip = dice.choice(["", "", "norm", "value", "inf"])
        self.zero = dice.choice(["none", "none", "zeros"])
        self.number = 0

    def _named(self, names: list[str]) -> list[Any]:
        known = dict(self.model.named_parameters())
        return [known[name] for name in names]

    def run(self, steps: int) -> Iterator[tuple[str, Any]]:
        for number in range(steps):
            for event in self.dice.sample(EVENTS, self.dice.choice([0, 1, 1, 2])):
                torch.manual_seed(number)
                yield from ((f"{number} {event.__name__}", seen) for seen in event(self))
            yield f"{number} step", self.step()
        yield from self.model.state_dict().items()

    # -- one step

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.number += 1
        generator = torch.Generator().manual_seed(self.number)
        count = self.dice.choice([8, 8, 8, 5])
        x = torch.randn(count, 6, generator=generator)
        kind = self.dice.choice([torch.float32] * 4 + [torch.float64, torch.int64])
        return (x * 3).to(kind), torch.randint(0, 4, (count,), generator=generator)

    def loss(self) -> torch.Tensor:
        x, y = self.data()
        torch.manual_seed(self.number)
        self.rounds_more |= self.cast is not None
        with torch.autocast("cpu", self.cast or torch.bfloat16, enabled=self.cast is not None):
            return F.cross_entropy(self.model(x), y)

    def step(self) -> Any:
        return self._searched() if self.searches else self._stepped()

    def _searched(self) -> Any:
        [optimizer] = self.optimizers
        number, dice = self.number, self.dice.getstate()

        def closure() -> torch.Tensor:
            self.number = number
            self.dice.setstate(dice)
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        return [optimizer.step(closure).detach()]

    def _stepped(self) -> Any:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.zero == "none")
        losses = []
        for _ in range(self.dice.choice([1, 1, 1, 2])):
            loss = self.loss()
            self.scaler.scale(loss).backward()
            losses.append(loss.detach())
        if self.dice.random() < 0.2:
            self._two_losses(losses)
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        losses += self._clipped()
        self._edited()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        for schedule in self.schedules:
            schedule.step()
        if self.average is not None:
            self.average.update_parameters(self.model)
        return losses

    def _two_losses(self, losses: list[Any]) -> None:
        first, second = self.loss(), self.loss().square()
        self.scaler.scale(second).backward()
        self.scaler.scale(first).backward()
        losses += [first.detach(), second.detach()]

    def _clipped(self) -> list[Any]:
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if self.clip in ("norm", "inf") and parameters:
            kind = 2.0 if self.clip == "norm" else float("inf")
            return [torch.nn.utils.clip_grad_norm_(parameters, 0.5, kind)]
        if self.clip == "value":
            torch.nn.utils.clip_grad_value_(parameters, 0.05)
        return []

    def _edited(self) -> None:
        how = self.dice.choice(["", "", "", "", "scaled", "dropped", "added"])
        chosen = self.dice.randrange(64)
        parameters = list(self.model.parameters())
        one = parameters[chosen % len(parameters)]
        if how == "dropped":
            one.grad = None
        elif one.grad is not None and how == "scaled":
            one.grad.mul_(0.5)
        elif one.grad is not None and how == "added":
            one.grad = one.grad + 0.01 * one.detach()

    def remake(self) -> None:
        """One optimizer, for the parameters that there are now."""
        self.split = self.later = False
        self.groups = [[name for name, _ in self.model.named_parameters()]]
        self.optimizers, self.schedules, self.kept = [self.make(self.groups[0])], [], None


# -- what comes between steps


def evaluated(loop: Loop) -> Iterator[Any]:
    was = loop.model.training
    loop.model.eval()
    x, _ = loop.data()
    with torch.inference_mode() if loop.dice.random() < 0.5 else torch.no_grad():
        yield loop.model(x).clone()
    loop.model.train(was)


def switched(loop: Loop) -> Iterator[Any]:
    block = loop.model.blocks[loop.dice.randrange(len(loop.model.blocks))]
    block.train(not block.training)
    yield from ()


def frozen(loop: Loop) -> Iterator[Any]:
    module = loop.dice.choice([loop.model.start, loop.model.head, *loop.model.blocks, *(b.one for b in loop.model.blocks)])
    module.requires_grad_(loop.dice.random() < 0.5)
    yield from ()


def states_there_and_back(loop: Loop) -> Iterator[Any]:
    state = copy.deepcopy(loop.model.state_dict())
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.mul_(0.9)
    loop.model.load_state_dict(state)
    for optimizer in loop.optimizers:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    yield list(state.values())


def copied(loop: Loop) -> Iterator[Any]:
    twin = copy.deepcopy(loop.model)
    x, _ = loop.data()
    twin.eval()
    with torch.no_grad():
        yield twin(x)


def averaged(loop: Loop) -> Iterator[Any]:
    if loop.average is None:
        loop.average = AveragedModel(loop.model)
    loop.average.update_parameters(loop.model)
    update_bn([loop.data()[0].float()], loop.average)
    yield [value.clone() for value in loop.average.state_dict().values()]


def gain_changed(loop: Loop) -> Iterator[Any]:
    if loop.changes:
        block = loop.dice.choice(list(loop.model.blocks))
        block.gain = loop.dice.choice([1.0, 0.5, 2.0])
        if hasattr(block, "rounds"):
            block.rounds = loop.dice.choice([1, 2, 3])
    yield from ()


def spare_replaced(loop: Loop) -> Iterator[Any]:
    if loop.changes:
        loop.model.spare = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    yield from ()


def group_added(loop: Loop) -> Iterator[Any]:
    if loop.later:
        loop.later = False
        loop.optimizers[0].add_param_group({"params": loop._named(loop.groups[1]), "lr": 0.02})
        loop.schedules = []
    yield from ()


def written(loop: Loop) -> Iterator[Any]:
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.clamp_(-0.4, 0.4)
    yield [float(p.detach().abs().max()) for p in loop.model.parameters()]


def norms(loop: Loop) -> Iterator[Any]:
    yield [None if p.grad is None else float(p.grad.norm()) for p in loop.model.parameters()]


def unfinished(loop: Loop) -> Iterator[Any]:
    """A forward whose result nobody uses."""
    yield loop.loss().detach()


def state_of_before(loop: Loop) -> Iterator[Any]:
    """The model and its optimizers go back to an earlier step, now and then with new optimizers."""
    if loop.kept is None:
        loop.kept = copy.deepcopy([loop.model.state_dict(), *(optimizer.state_dict() for optimizer in loop.optimizers)])
    elif len(loop.kept[1]["param_groups"]) == len(loop.optimizers[0].param_groups):
        state, *states = copy.deepcopy(loop.kept)
        if loop.dice.random() < 0.5 and not loop.split and not loop.later and len(loop.groups) == 1:
            kept = loop.kept
            loop.remake()
            loop.kept = kept
        loop.model.load_state_dict(state)
        for optimizer, before in zip(loop.optimizers, states):
            optimizer.load_state_dict(before)
    yield from ()


def head_replaced(loop: Loop) -> Iterator[Any]:
    if loop.changes and loop.dice.random() < 0.5:
        loop.model.head = nn.Linear(drawn_models.SIZE, 4)
        loop.average = None
        loop.remake()
    yield from ()


def cast_switched(loop: Loop) -> Iterator[Any]:
    loop.cast = loop.dice.choice([torch.bfloat16, torch.float16, None])
    yield from ()


def function_set(loop: Loop) -> Iterator[Any]:
    function = loop.dice.choice([torch.relu, drawn_models.leveled, drawn_models.counted])
    for block in loop.model.blocks:
        if isinstance(block, drawn_models.Acting) and loop.changes:
            block.one.act = function
    yield from ()


def level_changed(loop: Loop) -> Iterator[Any]:
    drawn_models.LEVEL = loop.dice.choice([0.5, 2.0])
    yield drawn_models.COUNT


EVENTS = [evaluated, evaluated, switched, frozen, states_there_and_back, copied, averaged, gain_changed, spare_replaced]
EVENTS += [group_added, written, norms, unfinished, state_of_before, state_of_before, head_replaced, cast_switched]
EVENTS += [function_set, function_set, level_changed]
