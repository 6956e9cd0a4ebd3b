"""Training on scikit-learn's digits, whose gradients are averaged over the ranks in every n-th step alone."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .ddp_models import parallel
from .digits_data import load_digits
from .digits_models import mlp


def trained(group: Any, rank: int, job: dict[str, Any], batch: int, rate: float, every: int) -> tuple[list[float], float]:
    """The loss of each batch, a mean over all ranks, and the part of held-out digits that are recognised in the end.

    Each rank draws batches of its own from its own part of the data. Gradients of ``every`` batches add up, the last of them
    averages over the ranks, then the optimizer steps: as ``no_sync`` is used."""
    size = dist.get_world_size(group)
    digits = load_digits(job["seed"])
    x, y = digits.x[rank::size], digits.y[rank::size]
    torch.manual_seed(job["seed"])
    model = parallel(mlp([64, 32]), group, 25)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    draw = torch.Generator().manual_seed(job["seed"] + 1 + rank)
    losses = []
    for number in range(job["batches"]):
        last = number % every == every - 1
        chosen = torch.randint(len(x), (batch,), generator=draw)
        with contextlib.nullcontext() if last else model.no_sync():
            loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
            loss.backward()
        losses.append(loss.detach())
        if last:
            optimizer.step()
            optimizer.zero_grad()
    total = torch.stack(losses)
    dist.all_reduce(total, group=group)
    with torch.no_grad():
        right = (model.module(digits.x_held_out).argmax(1) == digits.y_held_out).double().mean()
    return (total / size).tolist(), float(right)
