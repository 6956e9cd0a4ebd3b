"""Training loops of the zoo: what is done with gradients, and by which optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .loop_nets import SGD, Adam, AdamW, Seen, data, error, grads_of, plain_steps
from .sides import Alone

# -- gradients


def accumulation(side: Alone) -> Seen:
    optimizer = side.optimizer(Adam, lr=0.01)
    for number in range(6):
        loss = error(side, number) / 3
        loss.backward()
        yield loss.detach()
        if number % 3 == 2:
            yield grads_of(side)
            optimizer.step()
            optimizer.zero_grad()


def _clipped(side: Alone, clip: Callable[[Any], Any]) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.5, momentum=0.9)
    for number in range(4):
        optimizer.zero_grad()
        error(side, number).backward()
        yield clip(list(side.model.parameters()))
        optimizer.step()


def clip_norm(side: Alone) -> Seen:
    yield from _clipped(side, lambda p: nn.utils.clip_grad_norm_(p, 0.1))


def clip_norm_inf(side: Alone) -> Seen:
    yield from _clipped(side, lambda p: nn.utils.clip_grad_norm_(p, 0.01, norm_type=float("inf"), error_if_nonfinite=True))


def clip_value(side: Alone) -> Seen:
    yield from _clipped(side, lambda p: nn.utils.clip_grad_value_(p, 0.01))


def clip_by_hand(side: Alone) -> Seen:
    def clip(parameters: Any) -> float:
        norm = sum(p.grad.norm().item() ** 2 for p in parameters) ** 0.5
        for p in parameters:
            p.grad.mul_(min(1.0, 0.1 / norm))
        return norm

    yield from _clipped(side, clip)


def zeros_kept(side: Alone) -> Seen:
    optimizer = side.optimizer(Adam, lr=0.01)
    for number in range(4):
        error(side, number).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    yield grads_of(side)


def retained(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        loss = error(side, number)
        loss.backward(retain_graph=True)
        (loss * 0.5).backward()
        optimizer.step()
        yield loss.detach()


def several_losses(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)
    for number in range(3):
        x, y = data(number)
        out = side.model(x)
        losses = F.cross_entropy(out, y), out.pow(2).mean(), out.logsumexp(1).mean() * 0.1
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
        yield [loss.detach() for loss in losses]


def two_forwards(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)
    for number in range(3):
        a, b = side.model(data(number)[0]), side.model(data(number + 50)[0])
        loss = (F.normalize(a) @ F.normalize(b).t()).logsumexp(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


def gradient_penalty(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)
    for number in range(3):
        x = data(number)[0].requires_grad_()
        out = side.model(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        loss = out * 0.01 + (slope.norm(dim=1) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


def adversarial(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)
    for number in range(3):
        x, y = data(number)
        x.requires_grad_()
        F.cross_entropy(side.model(x), y).backward()
        yield x.grad
        attacked = (x + 0.1 * x.grad.sign()).detach()
        optimizer.zero_grad()
        loss = F.cross_entropy(side.model(attacked), y)
        loss.backward()
        optimizer.step()
        yield loss.detach()


def gradients_by_name(side: Alone) -> Seen:
    parameters = list(side.model.parameters())
    yield list(torch.autograd.grad(error(side, 0), parameters))


def norms_logged(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        error(side, number).backward()
        yield {name: p.grad.norm().item() for name, p in side.model.named_parameters()}
        optimizer.step()
        yield {name: p.detach().norm().item() for name, p in side.model.named_parameters()}


def noise_on_gradients(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)
    torch.manual_seed(5)
    for number in range(3):
        optimizer.zero_grad()
        error(side, number).backward()
        for p in side.model.parameters():
            p.grad.add_(torch.randn(p.shape) * 0.01)
        optimizer.step()
    yield grads_of(side)


def anomaly(side: Alone) -> Seen:
    with torch.autograd.detect_anomaly(check_nan=True):
        yield from plain_steps(side, side.optimizer(SGD, lr=0.1))


# -- optimizers and schedules


def _scheduled(side: Alone, make: Callable[[Any], Any], metric: bool = False, **settings: Any) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1, momentum=0.9, **settings)
    schedule = make(optimizer)
    for number in range(8):
        loss = error(side, number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step(*([loss.item()] if metric else []))
        yield loss.detach(), optimizer.param_groups[0]["lr"]


LR = torch.optim.lr_scheduler
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: LR.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: LR.MultiStepLR(o, [2, 5]),
    "CosineAnnealingWarmRestarts": lambda o: LR.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: LR.OneCycleLR(o, 0.3, total_steps=10),
    "CyclicLR": lambda o: LR.CyclicLR(o, 0.01, 0.2, step_size_up=2),
    "LambdaLR": lambda o: LR.LambdaLR(o, lambda n: min(1.0, (n + 1) / 4)),
    "PolynomialLR": lambda o: LR.PolynomialLR(o, 8, 2.0),
    "SequentialLR": lambda o: LR.SequentialLR(
        o, [LR.LinearLR(o, 0.1, total_iters=3), LR.ExponentialLR(o, 0.8)], milestones=[3]
    ),
    "ChainedScheduler": lambda o: LR.ChainedScheduler([LR.ConstantLR(o, 0.5, 3), LR.ExponentialLR(o, 0.9)]),
}


def plateau(side: Alone) -> Seen:
    yield from _scheduled(side, lambda o: LR.ReduceLROnPlateau(o, patience=0, factor=0.5), metric=True)


def layers_rates(side: Alone) -> Seen:
    model = side.model
    groups = [
        {"params": list(model.stem.parameters()), "lr": 0.01},
        {"params": list(model.body.parameters()), "lr": 0.02, "weight_decay": 0.1},
        {"params": list(model.head.parameters())},
    ]
    yield from plain_steps(side, side.optimizer(AdamW, groups, lr=0.05), 4)


def two_optimizers(side: Alone) -> Seen:
    model = side.model
    one = side.optimizer(Adam, [*model.stem.parameters(), *model.head.parameters()], lr=0.01)
    two = side.optimizer(SGD, model.body.parameters(), lr=0.1)
    for number in range(4):
        loss = error(side, number)
        model.zero_grad()
        loss.backward()
        one.step()
        if number % 2:
            two.step()
        yield loss.detach()


def group_added(side: Alone) -> Seen:
    optimizer = side.optimizer(Adam, side.model.head.parameters(), lr=0.01)
    yield from plain_steps(side, optimizer, 2)
    optimizer.add_param_group({"params": list(side.model.body.parameters()), "lr": 0.001})
    yield from plain_steps(side, optimizer, 3, 2)


def closure(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1, momentum=0.9)
    for number in range(3):

        def evaluate(number: int = number) -> torch.Tensor:
            optimizer.zero_grad()
            loss = error(side, number)
            loss.backward()
            return loss

        yield optimizer.step(evaluate).detach()


def lbfgs(side: Alone) -> Seen:
    optimizer = side.optimizer(torch.optim.LBFGS, lr=0.1, max_iter=4)
    side.model.eval()
    for _ in range(2):

        def evaluate() -> torch.Tensor:
            optimizer.zero_grad()
            loss = error(side, 0)
            loss.backward()
            return loss

        yield optimizer.step(evaluate).detach()


def tensor_rate(side: Alone) -> Seen:
    rate = torch.tensor(0.01)
    optimizer = side.optimizer(Adam, lr=rate)
    for number in range(4):
        yield from plain_steps(side, optimizer, 1, number)
        rate.mul_(0.5)


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "AMSGrad": (AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}),
}


class GlobalNorm(torch.optim.Optimizer):
    """Its one step looks at all gradients together."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / (norm + 1e-6), alpha=-group["lr"])


def global_norm(side: Alone) -> Seen:
    yield from plain_steps(side, side.optimizer(GlobalNorm, lr=0.1))


class Sam:
    """Sharpness-aware: climbs by the norm of all gradients, then steps from where it was."""

    def __init__(self, parameters: Any, optimizer: Any) -> None:
        self.parameters, self.optimizer, self.old = list(parameters), optimizer, []

    @torch.no_grad()
    def climb(self) -> None:
        norm = torch.stack([p.grad.norm() for p in self.parameters]).norm()
        self.old = [p.detach().clone() for p in self.parameters]
        for p in self.parameters:
            p.add_(p.grad * (0.05 / (norm + 1e-12)))
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        for p, old in zip(self.parameters, self.old):
            p.data.copy_(old)
        self.optimizer.step()
        self.optimizer.zero_grad()


def sam(side: Alone) -> Seen:
    optimizer = Sam(side.model.parameters(), side.optimizer(SGD, lr=0.1, momentum=0.9))
    for number in range(3):
        loss = error(side, number)
        loss.backward()
        optimizer.climb()
        error(side, number).backward()
        optimizer.step()
        yield loss.detach()


def by_hand(side: Alone) -> Seen:
    """No optimizer at all."""
    for number in range(3):
        loss = error(side, number)
        side.model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in side.model.parameters():
                p -= 0.1 * p.grad
        yield loss.detach()


def weights_clamped(side: Alone) -> Seen:
    def clamp() -> None:
        for p in side.model.parameters():
            p.data.clamp_(-0.2, 0.2)

    yield from plain_steps(side, side.optimizer(torch.optim.RMSprop, lr=0.05), 4, after=clamp)


def weights_clamped_in_place(side: Alone) -> Seen:
    parameters = list(side.model.parameters())

    def clamp() -> None:
        with torch.no_grad():
            for p in parameters:
                p.clamp_(-0.2, 0.2)

    yield from plain_steps(side, side.optimizer(SGD, lr=0.5), 4, after=clamp)


def decay_by_hand(side: Alone) -> Seen:
    def decay() -> None:
        for p in side.model.parameters():
            p.data = p.data * 0.9

    yield from plain_steps(side, side.optimizer(SGD, lr=0.1), 4, after=decay)


def outer_weights(side: Alone) -> Seen:
    """Weights of the losses are learned beside the model, by an optimizer of their own."""
    noise = nn.Parameter(torch.zeros(2))
    optimizer, own = side.optimizer(Adam, lr=0.01), Adam([noise], lr=0.01)
    for number in range(4):
        x, y = data(number)
        out = side.model(x)
        losses = torch.stack([F.cross_entropy(out, y), out.pow(2).mean()])
        loss = (losses * torch.exp(-noise) + noise).sum()
        optimizer.zero_grad(), own.zero_grad()
        loss.backward()
        optimizer.step(), own.step()
        yield loss.detach(), noise.detach().clone()
