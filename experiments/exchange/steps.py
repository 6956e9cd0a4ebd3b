"""The mini-batches of one worker among several: real computation, with batches that depend on worker and step alone, so that
every library computes the same and one process can do it again.

The documented order: a loss is divided by the number of workers; gradients are added up in the order of the workers; then one
step of plain gradient descent for each tensor. ``alone`` does that in one process, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..harness.meeting import meet
from ..harness.processes import Launcher
from ..harness.turns import Figure
from .models import MODELS, loss_of

LR = 0.01
Output = Tensor | tuple[Tensor, Tensor]


class Way(Protocol):
    """How the gradients of a worker reach the servers, and the new weights the worker."""

    def forward(self, x: Tensor) -> Output: ...

    def forget(self) -> None:
        """The gradients of the step before."""

    def exchange(self) -> None:
        """All gradients to their servers; returns when the weights after everybody's step are here."""

    def weights(self) -> Iterable[Tensor]:
        """In the order of the model."""


def made(job: dict[str, Any]) -> nn.Module:
    """The model with the same weights in every process."""
    torch.manual_seed(job["seed"])
    return MODELS[job["model"]].make()


def seed(job: dict[str, Any], worker: int, step: int) -> int:
    return 1 + job["seed"] + 1000 * step + worker


def batches(job: dict[str, Any], worker: int) -> list[tuple[Tensor, Tensor]]:
    """Those of all steps of this worker."""
    found = []
    for step in range(job["steps"] + 1):
        torch.manual_seed(seed(job, worker, step))
        found.append(MODELS[job["model"]].sample(job["samples"]))
    return found


def drive(way: Way, job: dict[str, Any]) -> tuple[list[Figure], dict[str, bytes]]:
    """All steps of worker ``job["rank"]``; the first does not count. Milliseconds, medians of this worker's steps, and losses
    and weights of all workers. For worker 0: the others answer with what is theirs."""
    rank, workers = job["rank"], job["clients"]
    given = batches(job, rank)
    meet("begun", job)
    computation, exchange, losses = [], [], []
    for step, (x, y) in enumerate(given):
        torch.manual_seed(seed(job, rank, step))  # a dropout of this step
        start = time.perf_counter()
        way.forget()
        loss = loss_of(way.forward(x), y) / workers
        loss.backward()
        computed = time.perf_counter()
        way.exchange()
        computation.append(1e3 * (computed - start))
        exchange.append(1e3 * (time.perf_counter() - computed))
        losses.append(float(loss.detach()))
    place = Path(job["meeting_place"])
    (place / f"found{rank}").write_text(json.dumps([_hex(losses), digest(way.weights())]))
    meet("measured", job)
    results: dict[str, bytes] = {}
    for worker in range(workers):
        said, weights = json.loads((place / f"found{worker}").read_text())
        results |= {f"losses of worker {worker}": bytes.fromhex(said), f"weights of worker {worker}": bytes.fromhex(weights)}
    return figures(job, computation, exchange), results


def figures(job: dict[str, Any], computation: list[float], exchange: list[float]) -> list[Figure]:
    """The median of the steps after the first, of each part and of their sum."""
    parts = {"computation": computation[1:], "exchange": exchange[1:]}
    parts["step"] = [sum(both) for both in zip(*parts.values())]
    return [(f"{job['case']}: {name}", 4 * MODELS[job["model"]].parameters, statistics.median(parts[name])) for name in parts]


def alone(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """One process computes the batches of all workers, one after the other, and takes the step: what it must come to."""
    net, workers = made(job), job["clients"]
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    given = [batches(job, worker) for worker in range(workers)]
    computation, rest = [], []
    losses: list[list[float]] = [[] for _ in range(workers)]
    for step in range(job["steps"] + 1):
        start, computed, total = time.perf_counter(), 0.0, None
        for worker in range(workers):
            torch.manual_seed(seed(job, worker, step))
            begin = time.perf_counter()
            optimizer.zero_grad()
            x, y = given[worker][step]
            loss = loss_of(net(x), y) / workers
            loss.backward()
            computed += time.perf_counter() - begin
            losses[worker].append(float(loss.detach()))
            total = added(total, [_gradient(parameter) for parameter in net.parameters()])
        for parameter, gradient in zip(net.parameters(), total or []):
            parameter.grad = gradient
        optimizer.step()
        computation.append(1e3 * computed)
        rest.append(1e3 * (time.perf_counter() - start - computed))
    weights = digest(net.parameters())
    results = {f"weights of worker {worker}": bytes.fromhex(weights) for worker in range(workers)}
    results |= {f"losses of worker {worker}": bytes.fromhex(_hex(losses[worker])) for worker in range(workers)}
    launcher.tell(("figures", figures(job, computation, rest)))
    launcher.tell(("results", results))


def added(total: list[Tensor] | None, gradients: list[Tensor]) -> list[Tensor]:
    """The sum so far and another worker's gradients, which stay as they are; the first ones are copied."""
    if total is None:
        return [gradient.clone() for gradient in gradients]
    return [sum_.add_(gradient) for sum_, gradient in zip(total, gradients)]


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def digest(weights: Iterable[Tensor]) -> str:
    total = hashlib.sha256()
    for each in weights:
        total.update(memoryview(each.detach().reshape(-1).view(torch.uint8).numpy()))
    return total.hexdigest()


def _hex(losses: list[float]) -> str:
    return torch.tensor(losses).numpy().tobytes().hex()
