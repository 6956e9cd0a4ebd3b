"""Images of CIFAR's size, 3 x 32 x 32: scikit-learn's handwritten digits, enlarged, somewhere in a picture of two colours and
noise; and a convolutional net that names the digit."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .digits_data import load_digits

SIDE, ENLARGED = 32, 3


class Images:
    """Its net, and what it learns from."""

    def __init__(self, seed: int, width: int) -> None:
        """``width``: channels of the first layer."""
        digits = load_digits(seed)
        drawn = torch.Generator().manual_seed(seed)
        self._x, self._y = pictures(digits.x, drawn), digits.y
        self._x_held_out, self._y_held_out = pictures(digits.x_held_out, drawn), digits.y_held_out
        torch.manual_seed(seed)
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(2 * width * (SIDE // 4) ** 2, 16 * width), nn.ReLU(),
            nn.Linear(16 * width, 10),
        )  # fmt: skip

    def loss(self, batch: int, drawn: torch.Generator) -> Tensor:
        chosen = torch.randint(len(self._x), (batch,), generator=drawn)
        return F.cross_entropy(self.net(self._x[chosen]), self._y[chosen])

    def held_out(self) -> float:
        """The share of held-out digits that are recognised."""
        right = self.net(self._x_held_out).argmax(1) == self._y_held_out
        return float(right.double().mean())


def pictures(digits: Tensor, drawn: torch.Generator) -> Tensor:
    """Digits (n, 1, 8, 8) in [0, 1] as float32 (n, 3, 32, 32) about 0."""
    count, size = len(digits), ENLARGED * digits.shape[-1]
    large = F.interpolate(digits, scale_factor=ENLARGED, mode="bilinear")
    shape = torch.zeros(count, 1, SIDE, SIDE)
    for number, (down, right) in enumerate(torch.randint(SIDE - size + 1, (count, 2), generator=drawn).tolist()):
        shape[number, :, down : down + size, right : right + size] = large[number]
    ground, ink = 0.5 * torch.rand(2, count, 3, 1, 1, generator=drawn)
    noise = 0.1 * torch.randn(count, 3, SIDE, SIDE, generator=drawn)
    return ground + shape * (ink + 0.5 - ground) + noise - 0.4
