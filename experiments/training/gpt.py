"""A small GPT in stages, one a worker: the same weights and data in every process."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(job["vocabulary"], job["width"])
        self.positions = nn.Parameter(0.02 * torch.randn(job["tokens"], job["width"]))

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens(x) + self.positions


class Block(nn.Module):
    """Causal attention, then a perceptron, each behind a norm and beside an identity."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__()
        width = job["width"]
        self.heads = job["heads"]
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(2, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.norms[0](x)).chunk(3, 2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def stages(job: dict[str, Any]) -> list[nn.Sequential]:
    """The blocks dealt out evenly, embeddings in the first stage, norm and logits in the last."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [Embedding(job), *(Block(job) for _ in range(job["blocks"]))]
    layers += [nn.Sequential(nn.LayerNorm(job["width"]), nn.Linear(job["width"], job["vocabulary"], bias=False))]
    cuts = [0, *(1 + job["blocks"] * at // job["stages"] for at in range(1, job["stages"])), len(layers)]
    return [nn.Sequential(*layers[begin:end]) for begin, end in pairwise(cuts)]


def batch(job: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow, (samples, tokens) each."""
    text = torch.randint(job["vocabulary"], (job["samples"], job["tokens"] + 1), generator=torch.Generator().manual_seed(1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class WithLoss(nn.Module):
    """The last stage and the loss, so that no logits travel."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(self.stage(x), y)


class Gpt(nn.Module):
    """From tokens and those that follow to the loss."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__()
        *first, last = stages(job)
        self.stages = nn.ModuleList([*first, WithLoss(last)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for number, stage in enumerate(self.stages):
            x = stage(x, y) if number == len(self.stages) - 1 else stage(x)
        return x
