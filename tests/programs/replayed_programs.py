"""Programs with graphed steps over a wrapped model, drawn from a seed, as plain source: ``source(recipe(seed))``."""

from __future__ import annotations

import random

from replayed_statements import COMMON, STATEMENTS, STEPPING
from served_programs import OPTIMIZERS, drawn_line, smaller
from wrapped_nets import NETS
from wrapped_programs import Recipe, fitting

QUICK = [
    "SGD, dict(lr=0.1)",
    "SGD, dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "SGD, dict(lr=0.1, momentum=0.9, fused=True)",
    "SGD, dict(lr=torch.tensor(0.1), momentum=0.9, fused=True)",
    "AdamW, dict(lr=0.01, fused=True)",
    "Adam, dict(lr=torch.tensor(0.01), amsgrad=True, fused=True)",
    "Adagrad, dict(lr=0.05, fused=True)",
    "Adam, dict(lr=0.01)",
]
"""Optimizers whose steps are posted again, as a rule."""
SLOW = ("Rare", "Recomputed", "Experts", "Tied")
"""Models that run as Python in every call."""

__all__ = ["recipe", "smaller", "source"]


def recipe(seed: int) -> Recipe:
    dice = random.Random(seed)
    nets = NETS if dice.random() < 0.2 else [name for name in NETS if name not in SLOW]
    net, early = dice.choice(nets), dice.random() < 0.3
    optimizer = dice.choice(QUICK if dice.random() < 0.85 else OPTIMIZERS)
    if net == "halved" and "fused" in optimizer:
        optimizer = QUICK[0]  # torch's fused SGD reads momentum in bfloat16 that nobody has written
    names = fitting(STATEMENTS, net, optimizer)
    stepping = [name for name in names if name in STEPPING]
    first = drawn_line(dice, COMMON[:1], 1.0, names)
    lines = tuple(drawn_line(dice, COMMON, 0.4, names if dice.random() < 0.5 else stepping) for _ in range(dice.randint(3, 10)))
    return Recipe(seed, net, optimizer, early, (first, *lines))


def source(made: Recipe) -> str:
    lines = [
        "import torch",
        "from wrapped_nets import *",
        "from served_statements import *",
        "from wrapped_statements import *",
        "from replayed_statements import *",
        "",
        "def program(place, keep):",
        f"    torch.manual_seed({made.seed})",
        f"    kind, options = torch.optim.{made.optimizer}",
        f"    trainer = Replayed(place, {made.net}(), kind, options, keep, {made.early}, {made.seed})",
        *(f"    trainer.does(STATEMENTS[{line.statement!r}], {line.seed}, {line.share})" for line in made.lines),
        "    trainer.ends()",
        "",
    ]
    return "\n".join(lines)
