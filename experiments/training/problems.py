"""What can be learned: a model, its data, how good it is on what it has not seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from .images import Images
from .sentences import Sentences
from .sequences import Sequences


class Learning(Protocol):
    """One model and its data; two that were made with the same seed and width are equal bit for bit."""

    @property
    def net(self) -> nn.Module: ...

    def loss(self, batch: int, drawn: torch.Generator) -> Tensor:
        """Of so many samples, drawn by ``drawn``."""

    def held_out(self) -> float:
        """How good the model is on what it does not learn from, from 0 to 1. Called without autograd."""


@dataclass(frozen=True)
class Problem:
    """``make`` takes a seed and a width. ``good``: what ``held_out`` is a share of."""

    title: str
    good: str
    make: Callable[[int, int], Learning]


PROBLEMS = {
    "images": Problem("a convolutional net, 3 x 32 x 32", "held-out digits recognised", Images),
    "sequences": Problem("sequence to sequence, GRU", "held-out symbols right", Sequences),
    "sentences": Problem("an encoder of sentences, GRU", "held-out neighbours in the top 10", Sentences),
}
