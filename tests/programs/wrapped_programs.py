"""Programs over a wrapped model, drawn from a seed, as plain source: ``source(recipe(seed))``."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from served_programs import EXCLUDES, OPTIMIZERS, Line, drawn_line, smaller
from wrapped_nets import NETS
from wrapped_statements import COMMON, STATEMENTS

EXCLUDED = EXCLUDES | {
    "wraps_as_proposed": ("normed",),  # which torch does not copy
    "converts": ("Complex",),
    "swaps_on_conversion": ("Complex", "normed"),
}

__all__ = ["recipe", "smaller", "source"]


@dataclass(frozen=True)
class Recipe:
    seed: int
    net: str
    optimizer: str
    early: bool
    lines: tuple[Line, ...]


def recipe(seed: int) -> Recipe:
    dice = random.Random(seed)
    net, optimizer, early = dice.choice(NETS), dice.choice(OPTIMIZERS), dice.random() < 0.3
    names = fitting(STATEMENTS, net, optimizer)
    lines = tuple(drawn_line(dice, COMMON, 0.35, names) for _ in range(dice.randint(5, 16)))
    return Recipe(seed, net, optimizer, early, lines)


def fitting(statements: Iterable[str], net: str, optimizer: str) -> list[str]:
    """Those that say something beside this model and this optimizer."""
    beside = f"{net} {optimizer}"
    return [name for name in statements if not any(word in beside for word in EXCLUDED.get(name, ()))]


def source(made: Recipe) -> str:
    lines = [
        "import torch",
        "from wrapped_nets import *",
        "from served_statements import *",
        "from wrapped_statements import *",
        "",
        "def program(place, keep):",
        f"    WORKERS[:] = {['worker0', 'worker1', 'worker2', 'worker3']}",
        f"    torch.manual_seed({made.seed})",
        f"    kind, options = torch.optim.{made.optimizer}",
        f"    trainer = Wrapped(place, {made.net}(), kind, options, keep, {made.early}, {made.seed})",
        *(f"    trainer.does({line.statement}, {line.seed}, {line.share})" for line in made.lines),
        "    trainer.ends()",
        "",
    ]
    return "\n".join(lines)
