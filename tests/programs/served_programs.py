"""Programs that train a model over servers (``rpc.serve``), drawn from a seed, as plain source: ``source(recipe(seed))``.

The text defines ``program(place, keep)`` as in ``drawn_programs``; its statements are functions of ``served_statements``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import judge
from served_nets import NETS
from served_statements import COMMON, STATEMENTS

SERVERS = ["worker1", "worker2"]

OPTIMIZERS = [
    "SGD, dict(lr=0.1)",
    "SGD, dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "SGD, dict(lr=0.1, momentum=0.9, foreach=True, maximize=True)",
    "Adam, dict(lr=0.01)",
    "Adam, dict(lr=0.01, foreach=True)",
    "AdamW, dict(lr=0.01, amsgrad=True)",
    "AdamW, dict(lr=0.01, fused=True)",
    "RMSprop, dict(lr=0.01, momentum=0.5, centered=True)",
    "Adagrad, dict(lr=0.05)",
    "Adadelta, dict(lr=0.5)",
    "NAdam, dict(lr=0.01)",
    "RAdam, dict(lr=0.01)",
    "Rprop, dict(lr=0.01)",
    "ASGD, dict(lr=0.05)",
    "Adamax, dict(lr=0.01)",
    "Adafactor, dict(lr=0.01)",
]

EXCLUDES = {
    "transposes_data": ("fused", "Adafactor"),  # kernels of torch's that take gradients and weights to lie in one order
    "keeps_a_graph": ("fused",),  # torch's fused steps write unseen by autograd: it would go on with wrong values
    "keeps_a_graph_over_calls": ("fused",),  # and what is posted again does not (docs/graphed.md)
}
"""Statements that say nothing beside some optimizers."""


@dataclass(frozen=True)
class Line:
    """A statement, and what it draws from."""

    statement: str
    seed: int
    share: float


@dataclass(frozen=True)
class Recipe:
    seed: int
    net: str
    optimizer: str
    placement: str
    staging: str
    lines: tuple[Line, ...]


def recipe(seed: int) -> Recipe:
    dice = random.Random(seed)
    net, optimizer = dice.choice(NETS), dice.choice(OPTIMIZERS)
    placement, staging = dice.choice(["round_robin", "balanced"]), dice.choice(["traced", "always"])
    names = [name for name in STATEMENTS if not any(word in optimizer for word in EXCLUDES.get(name, ()))]
    lines = tuple(drawn_line(dice, COMMON, 0.35, names) for _ in range(dice.randint(6, 22)))
    return Recipe(seed, net, optimizer, placement, staging, lines)


def drawn_line(dice: random.Random, common: list[str], share: float, names: list[str]) -> Line:
    """``share``: how often it is one of the common ones."""
    name = dice.choice(common if dice.random() < share else names)
    return Line(name, dice.randrange(10**6), round(dice.random(), 3))


def source(made: Recipe) -> str:
    """The program's text."""
    return text(made, SERVERS, "one_trainer")


def text(made: Recipe, servers: list[str], trainer: str) -> str:
    """``trainer``: the name of a function."""
    lines = [
        "import torch",
        "from served_nets import *",
        "from served_pairs import Pair",
        "from served_statements import *",
        "",
        "def program(place, keep):",
        f"    torch.manual_seed({made.seed})",
        f"    kind, options = torch.optim.{made.optimizer}",
        f"    served = dict(placement={made.placement!r}, staging={made.staging!r}, name='m{made.seed}')",
        f"    net = place({made.net}(), dict(servers={servers}, optimizer=kind, **served, **options))",
        f"    trainer = {trainer}(net, kind, options, keep)",
        *(f"    trainer.does({line.statement}, {line.seed}, {line.share})" for line in made.lines),
        "    trainer.ends()",
        "",
    ]
    return "\n".join(lines)


def smaller(made: Recipe) -> Iterator[Recipe]:
    """The same with less lines."""
    for lines in judge.less(made.lines):
        yield replace(made, lines=lines)
