"""The models of the experiment: chains of equal layers, as many a worker as there are rounds of interleaved stages."""

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from rdmarpc.graph.schedules.rounds import Rounds

from .critical import BACKWARD, FORWARD, SECOND, Span
from .simulated import Level, length

ROUNDS = 2
"""Layers a worker: all in one stage, or each a stage of its own."""


class Asleep(torch.autograd.Function):
    """Stands for a computation that needs no core: seconds forward, and backward."""

    generate_vmap_rule = True  # it does nothing but torch's operations, and takes its time

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_s = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grads[0], None, None


class Layer(nn.Module):
    """A linear layer and a tanh; where ``forward_s`` is not 0 it sleeps too: as long for the gradient of its weight as for that
    of its input."""

    def __init__(self, width: int, forward_s: float = 0.0, backward_s: float = 0.0) -> None:
        super().__init__()
        self.linear, self.forward_s, self.backward_s = nn.Linear(width, width), forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        if not self.forward_s or isinstance(x, FakeTensor):
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

    def order_ms(self, workers: int, chunks: int, schedule: str, caller: str) -> float | None:
        """As ``theory_ms``, by the agenda of our workers; ``caller``: which stage it has."""
        if not self.forward_ms:
            return None
        interleaved = schedule == "interleaved"
        half, each = self.backward_ms / 2, 1 if interleaved else ROUNDS
        owners = stages(workers, interleaved, caller)[::each]
        levels = [Level(owner, each * self.forward_ms, each * half, each * half) for owner in owners]
        levels[0] = replace(levels[0], sink=True)
        before, after = [Level(0, backward=False)] * (caller == "last"), [Level(0)] * (caller == "first")
        rounds = Rounds(workers, ROUNDS, {at + len(before): at for at in range(len(levels))}) if interleaved else None
        return length([*before, *levels, *after], chunks, rounds, schedule == "zero_bubble")

    def sleeps(self, span: Span, workers: int, schedule: str, caller: str) -> float:
        """For how many seconds the layers of a task of ours do."""
        stage = span.level - (caller == "last")
        interleaved = schedule == "interleaved"
        layers = 1 if interleaved else ROUNDS
        if not 0 <= stage < ROUNDS * workers // layers:
            return 0.0  # what the caller has before the first stage, or behind the last one
        half = self.backward_ms / 2
        first, second = (0.0, 2 * half) if stage == 0 else (half, half)
        if schedule != "zero_bubble":
            first = 2 * half
        return layers * {FORWARD: self.forward_ms, BACKWARD: first, SECOND: second}[span.way] / 1e3


def stages(workers: int, interleaved: bool, caller: str) -> list[int]:
    """The worker of each layer; the caller, worker 0, has the first one or the ``last``."""
    order = [at % workers if interleaved else at // ROUNDS for at in range(ROUNDS * workers)]
    return [(worker + (caller == "last")) % workers for worker in order]


def chunks(job: dict[str, Any]) -> int:
    """Micro-batches of a batch."""
    return int(job["chunks_a_worker"] * job["count"])
