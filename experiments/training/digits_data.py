"""scikit-learn's handwritten digits: 1,797 real 8x8 images, shipped with scikit-learn, so nothing is downloaded."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

IMAGES = 1797
HELD_OUT = 360


@dataclass(frozen=True)
class Digits:
    """Images as float32 (n, 1, 8, 8) in [0, 1], labels as int64 (n,)."""

    x: Tensor
    y: Tensor
    x_held_out: Tensor
    y_held_out: Tensor

    def batches(self, batch_size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch in an order drawn from `generator`; what does not fill a batch is left out."""
        order = torch.randperm(len(self.x), generator=generator)
        for chosen in order.split(batch_size):
            if len(chosen) == batch_size:
                yield self.x[chosen], self.y[chosen]


def load_digits(seed: int) -> Digits:
    """The digits with a split that depends on `seed` only."""
    from sklearn import datasets

    raw = datasets.load_digits()
    x = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, held_out = order[HELD_OUT:], order[:HELD_OUT]
    return Digits(x[train], y[train], x[held_out], y[held_out])
