"""The models of the experiment: chains of equal layers, as many a worker as there are rounds of interleaved stages."""

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROUNDS = 2
"""Layers a worker: all in one stage, or each a stage of its own."""


_library = torch.library.Library("rdmarpc", "FRAGMENT")  # operators that workers run
_library.define("asleep(Tensor x, float seconds) -> Tensor")


def _asleep(x: Tensor, seconds: float) -> Tensor:
    time.sleep(seconds)
    return x.clone()


_library.impl("asleep", _asleep, "CPU")
_library.impl("asleep", lambda x, seconds: torch.empty_like(x), "Meta")  # so what it gives is known without asking


class Asleep(torch.autograd.Function):
    """Stands for a computation that needs no core: seconds forward, and backward, where its tensor lies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_s = backward
        return torch.ops.rdmarpc.asleep(x, forward)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return torch.ops.rdmarpc.asleep(grads[0], ctx.backward_s), None, None


class Layer(nn.Module):
    """A linear layer and a tanh; where ``forward_s`` is not 0 it sleeps too: as long for the gradient of its weight as for that
    of its input."""

    def __init__(self, width: int, forward_s: float = 0.0, backward_s: float = 0.0) -> None:
        super().__init__()
        self.linear, self.forward_s, self.backward_s = nn.Linear(width, width), forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        if not self.forward_s:
            return torch.tanh(self.linear(x))
        weight = Asleep.apply(self.linear.weight, 0.0, self.backward_s / 2)
        x = Asleep.apply(F.linear(x, weight, self.linear.bias), self.forward_s, self.backward_s / 2)
        return torch.tanh(x)  # last: torch's pipelines do not split the backward of a stage that gives a view


@dataclass(frozen=True)
class Case:
    """``samples``: of a micro-batch; ``steps``: batches in a round. ``forward_ms``, ``backward_ms``: what a layer sleeps for
    one; 0: it only computes."""

    width: int
    samples: int
    steps: int
    forward_ms: float = 0.0
    backward_ms: float = 0.0

    def layers(self, workers: int) -> list[Layer]:
        """The same ones in every process."""
        torch.manual_seed(0)
        return [Layer(self.width, self.forward_ms / 1e3, self.backward_ms / 1e3) for _ in range(ROUNDS * workers)]

    def batch(self, chunks: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        drawn = torch.Generator().manual_seed(1)
        x, y = (torch.randn(chunks * self.samples, self.width, generator=drawn) for _ in range(2))
        return x, y

    def theory_ms(self, workers: int, chunks: int, rounds: int, split: bool = False) -> float | None:
        """How long a batch takes where only layers take time: the pipeline fills and drains over one round of stages; with
        backwards that are ``split`` it does other work for half of a backward, and for another half. ``None`` if layers do not
        sleep."""
        layer = self.forward_ms + self.backward_ms
        idle = layer - self.backward_ms * split  # F + B + W, or F + B - W
        return ROUNDS * chunks * layer + (workers - 1) * ROUNDS / rounds * idle if layer else None


def stages(workers: int, interleaved: bool) -> list[int]:
    """The worker of each layer, from 1 on: 0 is the caller."""
    return [1 + (at % workers if interleaved else at // ROUNDS) for at in range(ROUNDS * workers)]


def chunks(job: dict[str, Any]) -> int:
    """Micro-batches of a batch."""
    return int(job["chunks_a_worker"] * job["count"])
