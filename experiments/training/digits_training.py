"""One way to train the model, and what is recorded of it; the same for every way."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .digits_data import Digits

Batches = list[tuple[Tensor, Tensor]]


class Trainer(Protocol):
    """One way to train the model."""

    def step(self, x: Tensor, y: Tensor) -> float:
        """One training step on a batch; returns its loss."""

    def infer(self, x: Tensor) -> Tensor:
        """Logits of `x`, in evaluation mode and without a graph."""


class PlainLoop:
    """PyTorch's plain loop; `model` may be an ordinary module or one that `rdmarpc.wrap` spread over workers."""

    def __init__(self, model: nn.Module, lr: float, momentum: float) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)

    def step(self, x: Tensor, y: Tensor) -> float:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def infer(self, x: Tensor) -> Tensor:
        self.model.eval()
        with torch.no_grad():
            logits = self.model(x)
        self.model.train()
        return logits


@dataclass
class Record:
    """What came of one way to train: one entry a step (milliseconds from before it to after it), and the last accuracy."""

    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    accuracy: float = 0.0

    def train(self, trainer: Trainer, batches: Batches) -> None:
        """Train on these batches."""
        for x, y in batches:
            start = time.perf_counter()
            self.losses.append(trainer.step(x, y))
            self.step_ms.append(1e3 * (time.perf_counter() - start))

    def evaluate(self, trainer: Trainer, digits: Digits) -> None:
        """Take the accuracy on the held-out images."""
        right = trainer.infer(digits.x_held_out).argmax(1) == digits.y_held_out
        self.accuracy = right.double().mean().item()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def blocks(digits: Digits, job: dict[str, Any]) -> Iterator[tuple[int, Batches]]:
    """(epochs done after it, batches): the very first step alone, because it traces and connects, then the epochs."""
    order = torch.Generator().manual_seed(job["seed"])
    for epoch in range(job["epochs"]):
        batches = list(digits.batches(job["batch_size"], order))
        if epoch == 0:
            yield 0, batches[:1]
            batches = batches[1:]
        yield epoch + 1, batches
