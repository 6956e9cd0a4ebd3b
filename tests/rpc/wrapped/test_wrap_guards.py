"""What a forward reads, draws and leaves besides tensors: trained as one process trains it, or refused with the reason.

Models are drawn from a seed: blocks with such features, each here, cut, or at another worker. ``GUARDS=300``
draws so many, and takes every feature.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
import time
import types
from typing import Any

import guard_settings as settings
import numpy as np
import torch
import torch.nn.functional as F
from test_wrap import drive
from torch import nn

import rdmarpc as rpc
from rdmarpc import wrap

STEPS = 6
GAIN = 1.0
COUNTS = {"n": 0}
HOLDER = {"scale": 1.0}
AUX: list[Any] = []


class Block(nn.Module):
    """``between`` is what the loop does to it; ``local``: it cannot travel, or draws from the generators of its process."""

    local = False

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.second = nn.Linear(12, 12), nn.Linear(12, 12)

    @staticmethod
    def between(block: Any, step: int) -> None:
        pass

    def forward(self, x):
        return torch.tanh(self.second(torch.relu(self.lin(x))))


class Temperature(Block):
    temp = 1.0

    def forward(self, x):
        return super().forward(x) / self.temp

    @staticmethod
    def between(block, step):
        block.temp = 1.0 + step // 2 % 2


class Often(Block):
    temp = 1.0
    between = staticmethod(lambda block, step: setattr(block, "temp", 1.0 + step))

    def forward(self, x):
        return super().forward(x) / getattr(self, "temp", 3)


class Appears(Block):
    def forward(self, x):
        return super().forward(x) * (self.late if hasattr(self, "late") else 1)

    @staticmethod
    def between(block, step):
        if step == 2:
            block.late = 0.5
        if step == 4:
            del block.late


class Listed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scales, self.tree = [1.0, 2.0], {"a": {"b": [0.5]}, "signs": {1}}

    def forward(self, x):
        return super().forward(x * self.scales[1]) * self.tree["a"]["b"][0] + len(self.tree["signs"])

    @staticmethod
    def between(block, step):
        block.scales[1] = float(step % 3)
        block.tree["a"]["b"][0] = -0.0 if step % 2 else 0.0
        block.tree["signs"].add(step // 3)


class Configured(Block):
    def __init__(self) -> None:
        super().__init__()
        self.cfg = settings.Settings(more=types.SimpleNamespace(deep=settings.Slotted()))

    def forward(self, x):
        return super().forward(x) * self.cfg.beta + self.cfg.more.deep.alpha

    @staticmethod
    def between(block, step):
        block.cfg.beta = 0.5 + step % 2
        block.cfg.more.deep.alpha = step // 2


class Arrays(Block):
    def __init__(self) -> None:
        super().__init__()
        self.array = np.ones(3)

    def forward(self, x):
        return super().forward(x) * float(self.array[1])

    @staticmethod
    def between(block, step):
        block.array[1] = 1 + step % 2


class Globals(Block):
    local = True

    def forward(self, x):
        return super().forward(x) * GAIN + settings.OFFSET * settings.Knobs.turn

    @staticmethod
    def between(block, step):
        global GAIN
        GAIN = 1.0 + step % 2
        settings.OFFSET = 0.1 * (step // 2)
        settings.Knobs.turn = step % 3


def helper(x):
    from guard_settings import TABLE

    return x * TABLE["factor"]


class Helped(Block):
    local = True

    def forward(self, x):
        return helper(super().forward(x))

    @staticmethod
    def between(block, step):
        settings.TABLE["factor"] = 1 + step % 2


def scaler():
    scale, holder = 1.0, HOLDER

    def apply(x):
        return x * scale * holder["scale"]

    def change(value):
        nonlocal scale
        scale = value

    return apply, change


class Closed(Block):
    local = True

    def __init__(self) -> None:
        super().__init__()
        self.apply_scale, self.change = scaler()

    def forward(self, x):
        return self.apply_scale(super().forward(x))

    @staticmethod
    def between(block, step):
        block.change(1.0 + step % 2)
        HOLDER["scale"] = 1.0 + step // 3


class Dropped(Block):
    """A layer that is left out by chance."""

    local, how = True, "torch"

    def forward(self, x):
        chance = {
            "torch": lambda: torch.rand([]) < 0.5,
            "python": lambda: random.random() < 0.5,
            "numpy": lambda: np.random.rand() < 0.5,
        }[self.how]()
        return x if self.training and chance else super().forward(x)


class DroppedPython(Dropped):
    how = "python"


class DroppedNumpy(Dropped):
    how = "numpy"


class Noisy(Block):
    local = True

    def forward(self, x):
        return super().forward(x + torch.randn(8, 12) * 0.1) + torch.randn_like(x) * 0.1


class NoisyPart(Block):
    """It draws beside what is left out."""

    local = True

    def forward(self, x):
        y = self.lin(x)
        return self.second(y + torch.rand(12)) * random.uniform(0.5, 1.5)


class Collects(Block):
    """Hooks for the duration of the forward."""

    def forward(self, x):
        found: list[torch.Tensor] = []
        handle = self.lin.register_forward_hook(lambda module, args, output: found.append(output))
        try:
            y = super().forward(x)
        finally:
            handle.remove()
        return y + sum(value.sum() for value in found) * 0.01


class Replaces(Block):
    """A forward that wraps the forward of a part for its duration."""

    def forward(self, x):
        plain = self.lin.forward
        self.lin.forward = lambda *args: plain(*args) * 2
        try:
            return super().forward(x)
        finally:
            del self.lin.forward


class Hooked(Block):
    """The loop sets a hook on a part for a while."""

    local = True

    @staticmethod
    def between(block, step):
        if step == 2:
            block.handle = [block.lin.register_forward_hook(lambda module, args, output: output * 0.5)]
        if step == 4:
            block.handle[0].remove()


class HookedCut(Block):
    local = True

    @staticmethod
    def between(block, step):
        if step == 1:
            block.scale = {"by": 2.0}
            block.register_forward_hook(lambda module, args, output: output * module.scale["by"])
        if step == 3:
            block.scale["by"] = 3.0


class Leaves(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.lin, self.what, self.calls, self.kept = nn.Linear(12, 12), what, 0, []
        self.aux = None

    def forward(self, x):
        y = self.lin(x)
        self.calls += 1
        if self.what == "float":
            self.aux = 0.25 * self.calls
        elif self.what == "tensor":
            self.aux = y.pow(2).mean()
        elif self.what == "list":
            self.kept.append(float(self.calls))
        elif self.what == "global":
            AUX.append(self.calls)
        return y


class Auxiliary(Block):
    """A part leaves a value that the forward reads."""

    what = "float"

    def __init__(self) -> None:
        super().__init__()
        self.second = Leaves(self.what)

    def forward(self, x):
        y = super().forward(x)
        if self.what == "list":
            return y * len(self.second.kept)
        return y * len(AUX) if self.what == "global" else y + self.second.aux


class AuxiliaryTensor(Auxiliary):
    what = "tensor"


class AuxiliaryList(Auxiliary):
    what = "list"


class AuxiliaryGlobal(Auxiliary):
    local = True
    what = "global"


class Assigns(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return super().forward(x - self.mean)


class Remembers(Block):
    """A plain tensor attribute instead of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(12)

    def forward(self, x):
        self.state = self.state * 0.5 + x.detach().mean(0)
        return super().forward(x + self.state)


class Counts(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.stats = 0, {"calls": 0}

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls


class CountsInside(Counts):
    def forward(self, x):
        self.stats["calls"] += 1
        return Block.forward(self, x) / self.stats["calls"]


class CountsGlobally(Block):
    local = True

    def forward(self, x):
        COUNTS["n"] += 1
        return super().forward(x) / COUNTS["n"]


class Iterates(Block):
    def __init__(self) -> None:
        super().__init__()
        self.factors = itertools.cycle([1.0, 2.0, 0.5])

    def forward(self, x):
        return super().forward(x) * next(self.factors)


class Draws(Block):
    def __init__(self) -> None:
        super().__init__()
        self.python, self.numpy = random.Random(1), np.random.default_rng(2)

    def forward(self, x):
        return super().forward(x) * self.python.random() * float(self.numpy.random())


class DrawsTorch(Block):
    local = True

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(4)

    def forward(self, x):
        return super().forward(x) + torch.rand(12, generator=self.generator)


class Clocked(Block):
    def forward(self, x):
        return super().forward(x) * (1.0 if time.time() > 0 else 0.0)


class Swapped(Block):
    """The loop replaces a module."""

    local = True

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Tanh()

    def forward(self, x):
        return self.act(super().forward(x))

    @staticmethod
    def between(block, step):
        if step == 2:
            block.act = nn.Sequential(nn.Tanh(), nn.Sigmoid())
        if step == 3:
            block.act[1] = nn.ReLU()


class Grows(Block):
    local = True

    def forward(self, x):
        y = super().forward(x)
        return y * self.extra if "extra" in self._parameters else y

    @staticmethod
    def between(block, step):
        if step == 2:
            block.extra = nn.Parameter(torch.full((12,), 0.5))
        if step == 4:
            block.extra = nn.Parameter(torch.full((12,), 1.5))


class Patched(Block):
    local = True

    @staticmethod
    def between(block, step):
        if step == 2:
            block.forward = types.MethodType(lambda self, x: self.second(x), block)


class Prints(Block):
    """What it writes down is for people."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Any] = []

    def forward(self, x):
        y = super().forward(x)
        self.noted.append(y.shape)
        return y


FEATURES = [
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Block) and kind.__module__ == __name__ and kind is not Block
]


class Drawn(nn.Module):
    def __init__(self, kinds: list[type[Block]]) -> None:
        super().__init__()
        self.start, self.blocks, self.head = nn.Linear(6, 12), nn.ModuleList(kind() for kind in kinds), nn.Linear(12, 4)

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def reset() -> None:
    global GAIN
    GAIN = settings.OFFSET = 1.0
    settings.Knobs.turn = 1
    settings.TABLE["factor"] = 1
    HOLDER["scale"] = 1.0
    COUNTS["n"] = 0
    AUX.clear()


def trained(model: nn.Module, touched: list[int]) -> list[Any]:
    """Losses, gradients and state of some steps; the loop changes the blocks ``touched``."""
    reset()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(2)
    found: list[Any] = []
    for step in range(STEPS):
        x, y = torch.randn(8, 6, generator=generator), torch.randint(0, 4, (8,), generator=generator)
        for at in touched:
            KINDS[at].between(model.blocks[at], step)
        torch.manual_seed(step)
        random.seed(step)
        np.random.seed(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        found += [loss.detach(), torch.rand(1), torch.tensor(random.random()), torch.tensor(np.random.rand())]
    return [*found, *model.state_dict().values()]


KINDS: list[type[Block]] = []


def trial(seed: int, kinds: list[type[Block]], places: list[str]) -> str:
    """How it went: how it was captured, or why it was refused. Raises ``AssertionError`` where it was wrong."""
    KINDS[:] = kinds
    torch.manual_seed(seed)
    net = Drawn(kinds)
    twin = copy.deepcopy(net)
    placement = {"head": "worker2"}
    for at, place in enumerate(places):
        if place == "whole":
            placement[f"blocks.{at}"] = "worker1"
        elif place != "here":
            placement.update({f"blocks.{at}.{name}": f"worker{1 + (seed + at) % 2}" for name in place.split("+")})
    touched = [at for at, place in enumerate(places) if place != "whole"]
    expected = trained(twin, touched)
    model = None
    try:
        model = wrap(net, placement)
        found = trained(model, touched)
    except rpc.NotSupported as error:
        assert len(error.message) > 20
        return f"refused: {error}".replace("\n", " | ")
    finally:
        said = model.captured.replace("\n", " | ") if model is not None else ""
        if model is not None:
            model.close()
    assert len(found) == len(expected)
    for at, (ours, theirs) in enumerate(zip(found, expected)):
        where = f"step {at // 4}" if at < 4 * STEPS else list(twin.state_dict())[at - 4 * STEPS]
        assert torch.equal(ours, theirs), f"{where}: {ours.flatten()[:3]} for {theirs.flatten()[:3]}, captured {said}"
    return said


def draw(seed: int) -> tuple[list[type[Block]], list[str]]:
    dice = random.Random(seed)
    kinds = dice.choices(FEATURES, k=dice.choice([1, 2, 3]))
    wheres = ["here", "lin", "second", "lin+second", "lin+second", "whole"]
    return kinds, [dice.choice(wheres[: -1 if kind.local else None]) for kind in kinds]


def attempt(seed: int, kinds: list[type[Block]], places: list[str], wrong: list[str]) -> str:
    what = " ".join(f"{kind.__name__}:{place}" for kind, place in zip(kinds, places))
    try:
        said = trial(seed, kinds, places)
    except Exception as error:
        wrong.append(f"{seed} {what}: {type(error).__name__}: {error}")
        return wrong[-1]
    return f"{what}: {said}"


def drawn(first: int, count: int) -> list[str]:
    wrong: list[str] = []
    for seed in range(first, first + count):
        said = attempt(seed, *draw(seed), wrong)
        if MANY:
            print(said, flush=True)
    return wrong


MANY = int(os.environ.get("GUARDS", "0"))
QUICK = [Listed, Globals, DroppedPython, Collects, HookedCut, Swapped, Grows]


def trials() -> list[str]:
    """Every feature once, cut; then drawn models."""
    wrong: list[str] = []
    for kind in FEATURES if MANY else QUICK:
        said = attempt(0, [kind], ["lin+second"], wrong)
        if MANY:
            print(said, flush=True)
    return wrong + drawn(0, MANY or 3)


def test_models_are_right_or_refused():
    assert not drive(trials, 3, timeout=580.0 if MANY else 250.0)
