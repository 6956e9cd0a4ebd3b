"""Programs that train models at several workers by distributed autograd, drawn from a seed, as plain source."""

from __future__ import annotations

import random
from dataclasses import dataclass

from distributed_statements import COMMON, STATEMENTS, WORKERS
from served_nets import NETS
from served_programs import OPTIMIZERS, Line, drawn_line, smaller

__all__ = ["recipe", "smaller", "source"]


@dataclass(frozen=True)
class Recipe:
    seed: int
    nets: tuple[tuple[str, str, int], ...]
    optimizer: str
    lines: tuple[Line, ...]


def recipe(seed: int) -> Recipe:
    dice = random.Random(seed)
    net = dice.choice([each for each in NETS if each != "weight_normed"])
    owners = [*WORKERS, *WORKERS, "worker0"]
    nets = tuple((dice.choice(owners), net, dice.randrange(1000)) for _ in range(dice.randint(1, 2)))
    if net != "in_double" and dice.random() < 0.3:
        nets += ((dice.choice(owners), "Relay", dice.randrange(1000)),)
    lines = tuple(drawn_line(dice, COMMON, 0.3, list(STATEMENTS)) for _ in range(dice.randint(4, 14)))
    return Recipe(seed, nets, dice.choice(OPTIMIZERS), lines)


def source(made: Recipe) -> str:
    lines = [
        "import torch",
        "from distributed_statements import *",
        "",
        "def program(place, keep):",
        f"    WORKERS[:] = {['worker1', 'worker2']}",
        f"    torch.manual_seed({made.seed})",
        f"    kind, options = torch.optim.{made.optimizer}",
        f"    session = Session(keep, {list(made.nets)}, kind, options)",
        *(f"    session.does({line.statement}, {line.seed}, {line.share})" for line in made.lines),
        "    session.ends()",
        "",
    ]
    return "\n".join(lines)
