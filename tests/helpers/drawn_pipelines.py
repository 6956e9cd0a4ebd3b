"""Pipelines that are drawn from a seed: stages of all kinds, values that skip stages, tied parameters, stages without
gradients, over 2 to 4 workers."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import nn
from zero_bubble_models import SIZE, SPLIT, WHOLE

CLASSES = 4


class Stages(nn.Module):
    """One after the other. ``skips``: by stage, the earlier values that are added to its input; value 0 is the model's input.
    ``without``: stages that run under ``torch.no_grad()``."""

    def __init__(self, stages: list[nn.Module], skips: dict[int, list[int]], without: list[int]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.head = nn.Linear(SIZE, CLASSES)
        self.skips, self.without = skips, without

    def forward(self, x):
        values = [x]
        for at, stage in enumerate(self.stages):
            given = values[-1]
            for source in self.skips.get(at, ()):
                given = given + values[source]
            if at in self.without:
                with torch.no_grad():
                    values.append(stage(given))
            else:
                values.append(stage(given))
        return self.head(values[-1])


@dataclass
class Drawn:
    """``interleaved``: its stages go round the workers, and all of them take gradients. ``sizes``: of the batches."""

    net: Stages
    placement: dict[str, str]
    interleaved: bool
    chunks: int
    sizes: list[int]
    depth: int


def drawn(dice: random.Random) -> Drawn:
    """The workers are worker0, which calls, to worker3."""
    workers, rounds = dice.randint(2, 4), dice.choice([1, 1, 2, 2, 3])
    count = workers * rounds
    ring = [f"worker{rank}" for rank in dice.sample(range(4), workers)]
    if "worker0" in ring and dice.random() < 0.7:  # the caller first or last, as people place it
        ring.remove("worker0")
        ring.insert(dice.choice([0, len(ring)]), "worker0")
    chunks = dice.randint(1, 9)
    sizes = [dice.choice([2 * chunks, 3 * chunks, 3 * chunks - 1]) for _ in range(2)]
    smallest = min(size % -(-size // chunks) or -(-size // chunks) for size in sizes)
    kinds = [make for name, make in SPLIT.items() if name not in ("normed", "bare") or (name == "normed" and smallest > 1)]
    kinds += [dice.choice([make for make, _ in WHOLE.values()])] if dice.random() < 0.5 else []
    stages = [dice.choice(kinds)() for _ in range(count)]
    skips = {at: [dice.randrange(at)] for at in range(1, count) if dice.random() < 0.2}
    without = [at for at in range(count) if dice.random() < 0.3] if dice.random() < 0.3 else []
    for later in range(workers, count):  # a worker's next round: tied parameters stay at one worker
        if dice.random() < 0.2:
            stages[later - workers], stages[later] = _tied()
    placement = {f"stages.{at}": ring[at % workers] for at in range(count)}
    if dice.random() < 0.5:
        placement["head"] = ring[(count - 1) % workers]
    return Drawn(
        Stages(stages, skips, without),
        placement,
        rounds > 1 and not without,
        chunks,
        sizes,
        dice.choice([1, 2, 2 * workers]),
    )


def _tied() -> tuple[nn.Module, nn.Module]:
    one, two = (nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()) for _ in range(2))
    two[0].weight = one[0].weight
    return one, two
