"""Models that are drawn from a seed: blocks that do to tensors and to Python what a trace, or another worker, may get wrong."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

SIZE = 12


class Block(nn.Module):
    """From (any, ``SIZE``) to the same, by two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.gain = 1.0

    def forward(self, x):
        return torch.tanh(self.two(torch.relu(self.one(x)))) * self.gain


class Norm(Block):
    """The forward reads the statistics of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False), nn.BatchNorm1d(SIZE))

    def forward(self, x):
        return self.two(torch.relu(self.one(x))) - 0.1 * self.one[1].running_mean


class Tied(Block):
    def __init__(self) -> None:
        super().__init__()
        self.two.weight = self.one.weight


class Unused(Block):
    """A parameter that nobody uses, one that only training uses, one of every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.two = Choosy()


class Choosy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never, self.calls = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.Linear(2, 2), 0

    def forward(self, x):
        self.calls += 1
        if self.training and self.calls % 2:
            return self.first(x)
        return self.second(x)


class Leaving(nn.Module):
    """Leaves values of its last call in its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.calls, self.last, self.table, self.seen = nn.Linear(SIZE, SIZE), 0, None, {}, (0,)

    def forward(self, x):
        self.calls += 1
        self.last = 0.5 / self.calls
        self.table["calls"] = self.calls
        self.seen = (*self.seen[-1:], x.shape[0])
        return self.line(x)


class Left(Block):
    def __init__(self) -> None:
        super().__init__()
        self.two = Leaving()

    def forward(self, x):
        y = super().forward(x)
        return y * self.two.last + self.two.table["calls"] + self.two.seen[-1]


class Appending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(SIZE, SIZE)

    def forward(self, x, noted, table=None):
        y = self.line(x)
        noted.append(y.pow(2).mean())
        if table is not None:
            table["mean"] = y.mean(0)
            table["count"] = table.get("count", 0) + 1
        return y


class Handed(Block):
    """A list and a dict that parts write into."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Appending(), Appending()

    def forward(self, x):
        noted: list[Any] = []
        table: dict[str, Any] = {}
        x = torch.relu(self.one(x, noted))
        x = self.two(x, noted, table=table)
        return x + sum(noted) + table["mean"] * table["count"]


class Assigned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(SIZE, SIZE)
        self.register_buffer("mean", torch.zeros(SIZE))

    def forward(self, x):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return self.line(x - self.mean)


class Replaced(Block):
    """A buffer that a part replaces, and the forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Assigned()

    def forward(self, x):
        return super().forward(x) + self.one.mean


class Written(Block):
    def forward(self, x):
        y = self.one(x)
        y += 1
        z = self.two(torch.relu(y))
        z[:, :2] = 0
        return z.mul_(2)


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(SIZE, SIZE)

    def forward(self, x, mask=None, *, scale=1.0):
        y = self.line(x) * scale
        return (y, None) if mask is None else (y * mask, y.argmax(1))


class Optionals(Block):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Optional(), Optional()

    def forward(self, x):
        y, nothing = self.one(x)
        assert nothing is None
        y, chosen = self.two(x=torch.tanh(y), mask=y > 0, scale=self.gain)
        return y + F.one_hot(chosen, SIZE)


class Twice(Block):
    """One part called in a loop whose length is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = 2

    def forward(self, x):
        for _ in range(self.rounds):
            x = torch.tanh(self.one(x))
        return self.two(x)


class Cut(Block):
    def forward(self, x):
        y = self.one(x)
        with torch.no_grad():
            scale = self.two(y).abs().mean()
        return self.two(torch.relu(y).detach() + x) / (1 + scale)


class Split(Block):
    def forward(self, x):
        left, right = self.one(x).chunk(2, 1)
        y = torch.cat([right, left.flip(1)], 1)
        return self.two(y.t().t()) + left.mean(1, keepdim=True).expand(-1, SIZE)


class Dropping(Block):
    """Draws in a part."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Dropout(0.3))


class Decides(Block):
    """Looks at values, so nothing but an eager forward takes it."""

    def forward(self, x):
        y = self.one(x)
        return self.two(y) if y.sum() > 0 else torch.relu(y)


LEVEL = 1.0
"""Read by ``leveled``."""
COUNT = 0
"""Changed by ``counted``."""


def leveled(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * LEVEL


def counted(x: torch.Tensor) -> torch.Tensor:
    global COUNT
    COUNT += 1
    return torch.tanh(x)


class Acts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.act = nn.Linear(SIZE, SIZE), torch.tanh

    def forward(self, x):
        return self.act(self.line(x))


class Acting(Block):
    """A part calls a function that is its attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Acts()


KINDS = [Block, Norm, Tied, Unused, Left, Handed, Replaced, Written, Optionals, Twice, Cut, Split, Dropping, Decides, Acting]


class Net(nn.Module):
    def __init__(self, kinds: list[type[Block]]) -> None:
        super().__init__()
        self.start, self.blocks, self.head = nn.Linear(6, SIZE), nn.ModuleList(kind() for kind in kinds), nn.Linear(SIZE, 4)
        self.spare = nn.Linear(3, 3)

    def forward(self, x):
        x = self.start(x.float())
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def drawn_net(dice: random.Random) -> tuple[Net, dict[str, str]]:
    """A model, and where its parts go."""
    kinds = dice.choices(KINDS, k=dice.choice([1, 2, 2, 3]))
    placement = {"head": "worker2"} if dice.random() < 0.5 else {}
    for at in range(len(kinds)):
        place = dice.choice(["here", "one", "two", "both", "both", "whole"])
        if place == "whole":
            placement[f"blocks.{at}"] = dice.choice(["worker1", "worker2"])
        for name in ("one", "two"):
            if place in (name, "both"):
                placement[f"blocks.{at}.{name}"] = dice.choice(["worker1", "worker2"])
    return Net(kinds), placement or {"head": "worker1"}
