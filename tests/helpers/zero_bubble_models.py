"""Models for the tests of split backwards: parts that split, and parts that must not."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

SIZE = 20


def real(x: torch.Tensor) -> bool:
    return not isinstance(x, FakeTensor)


class Residual(nn.Module):
    """Attention over the features, behind a norm, beside an identity."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(SIZE), nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x):
        q, k, v = (each.unflatten(1, (4, -1)) for each in self.qkv(self.norm(x)).chunk(3, 1))
        return x + self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v).flatten(1))


class Scaled(nn.Module):
    """Parameters that no layer has, one of them through a chain of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.rand(SIZE) + 0.5), nn.Parameter(torch.randn(SIZE))

    def forward(self, x):
        return torch.tanh(x * self.gain.exp() + self.shift)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.one.weight.requires_grad_(False)
        self.two.requires_grad_(False)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(SIZE, SIZE, bias=False), nn.BatchNorm1d(SIZE)

    def forward(self, x):
        return torch.relu(self.norm(self.layer(x)))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, groups=4), nn.GroupNorm(2, 4)
        self.last, self.slope = nn.Linear(4 * 2 * 3, SIZE), nn.PReLU()

    def forward(self, x):
        return self.last(self.slope(self.norm(self.second(self.first(x.view(-1, 1, 4, 5))))).flatten(1))


class Twice(nn.Module):
    """Uses a layer two times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return torch.tanh(self.layer(torch.tanh(self.layer(x))))


class Again(nn.Module):
    """Computes a part of its forward once more in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh())

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if real(x) else self.inner(x)


class Recurring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(SIZE, SIZE, batch_first=True)

    def forward(self, x):
        return self.cell(x.unsqueeze(1))[0].squeeze(1)


class Hooked(nn.Module):
    """A hook that counts what it sees in a buffer, and changes gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if real(x) and not self.layer.weight._post_accumulate_grad_hooks:
            self.layer.weight.register_post_accumulate_grad_hook(self.count)
            self.layer.bias.register_hook(lambda grad: grad * 3)
        return torch.tanh(self.layer(x))

    def count(self, weight: torch.Tensor) -> None:
        self.seen += weight.grad.sum()  # depends on the order of micro-batches


class Hooking(nn.Module):
    """A hook on a tensor of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        x = self.layer(x)
        if real(x):
            x.register_hook(lambda grad: grad * 2)
        return torch.tanh(x)


class Doubling(torch.autograd.Function):
    """May do anything in its backward, for all that one can see."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return torch.tanh(Doubling.apply(self.layer(x)))


SPLIT: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)),
    "residual": Residual,
    "scaled": Scaled,
    "frozen": Frozen,
    "normed": Normed,
    "images": Images,
    "bare": nn.Tanh,
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(SIZE, SIZE)),
}
WHOLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "twice": (Twice, "a parameter that several operations read"),
    "again": (Again, "saved tensors that are unpacked by Python (a checkpoint)"),
    "recurring": (Recurring, "MkldnnRnnLayerBackward0, which has not been tried in halves"),
    "hooked": (Hooked, "hooks on its parameters"),
    "hooking": (Hooking, "hooks that its forward sets"),
    "opaque": (Opaque, "Doubling, whose backward may do anything"),
}
"""And why."""


def drawn_chain(dice: random.Random, length: int, workers: int) -> tuple[nn.Sequential, dict[str, str]]:
    """Parts of all kinds, and where they go; the last part stays here or not."""
    kinds = [*SPLIT.values(), *(make for make, _ in WHOLE.values())]
    parts = [dice.choice(kinds)() for _ in range(length)]
    homes = [f"worker{1 + at * workers // length}" for at in range(length)]
    if dice.random() < 0.3:
        homes[-1] = homes[0]
    placement = {str(at): home for at, home in enumerate(homes) if dice.random() < 0.85}
    return nn.Sequential(*parts, nn.Linear(SIZE, 4)), placement or {"0": "worker1"}


class Blast(torch.autograd.Function):
    """Where a weight takes its gradient: fails, or ends the process."""

    generate_vmap_rule = True

    @staticmethod
    def forward(ctx, weight, code):
        ctx.code = code
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.code == 300:
            raise ZeroDivisionError("the gradient of this weight fails")
        if ctx.code == 400:
            os.kill(os.getpid(), signal.SIGKILL)
        return grad, None


class Blasting(nn.Module):
    """What it does with the gradient of its weight is what the input says (its first element)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        weight = Blast.apply(self.layer.weight, int(x[0, 0])) if real(x) else self.layer.weight
        return torch.nn.functional.linear(x, weight, self.layer.bias)


class Begins(nn.Module):
    """Leaves a file in ``folder`` for each of its forwards: its number."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder, self.forwards = folder, 0

    def forward(self, x):
        if real(x):
            (Path(self.folder) / str(self.forwards)).touch()
            self.forwards += 1
        return x * 1


class Wait(torch.autograd.Function):
    """Where a weight takes its gradient: waits for a file."""

    generate_vmap_rule = True

    @staticmethod
    def forward(ctx, weight, path):
        ctx.path = path
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        deadline = time.monotonic() + 100
        while ctx.path and not Path(ctx.path).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{ctx.path} has not come")
            time.sleep(0.001)
        return grad, None


class Waits(nn.Module):
    """The gradient of its weight, of its first forward, waits for a file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.layer, self.path, self.forwards = nn.Linear(SIZE, SIZE), path, 0

    def forward(self, x):
        if not real(x):
            return torch.tanh(self.layer(x))
        weight = Wait.apply(self.layer.weight, "" if self.forwards else self.path)
        self.forwards += 1
        return torch.tanh(torch.nn.functional.linear(x, weight, self.layer.bias))
