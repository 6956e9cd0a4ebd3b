"""A worker: computes gradients of its own batches, sends them to every server and goes on with the weights that come back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from ..harness.libraries import Client
from ..harness.meeting import meet
from ..harness.turns import Figure
from .problems import PROBLEMS
from .vectors import Vectors


@dataclass
class Record:
    """Of every step the loss, and milliseconds: computing the gradients; from the calls' start until all weights are in place.
    ``quality``: (steps before it, what ``held_out`` was)."""

    losses: list[float] = field(default_factory=list)
    computation: list[float] = field(default_factory=list)
    exchange: list[float] = field(default_factory=list)
    quality: list[tuple[int, float]] = field(default_factory=list)


def drive(client: Client, job: dict[str, Any]) -> tuple[list[Figure], dict[str, bytes]]:
    """Steps until the target is reached, or ``most_steps``. All workers see the same weights, so all of them stop at the same
    step. The clock stands while they look at held-out samples."""
    rank = job["rank"]
    learning = PROBLEMS[job["problem"]].make(job["seed"], job["width"])
    vectors = Vectors(learning.net, job["servers"], rank)
    if rank == 0:
        vectors.begin(client)
    meet("begun", job)
    drawn = torch.Generator().manual_seed(1000 * (1 + job["seed"]) + rank)
    record = Record()
    while True:
        with torch.no_grad():
            record.quality.append((len(record.losses), learning.held_out()))
        if record.quality[-1][1] >= job["target"] or len(record.losses) >= job["most_steps"]:
            break
        meet(f"step{len(record.losses)}", job)
        for _ in range(min(job["look_every"], job["most_steps"] - len(record.losses))):
            start = time.perf_counter()
            vectors.forget()
            loss = learning.loss(job["batch"], drawn)
            loss.backward()
            computed = time.perf_counter()
            vectors.exchange(client)
            record.computation.append(1e3 * (computed - start))
            record.exchange.append(1e3 * (time.perf_counter() - computed))
            record.losses.append(float(loss.detach()))
    losses = torch.tensor(record.losses)
    results = {"losses of worker 0": losses.numpy().tobytes(), "weights": vectors.digest()}
    parameters = list(learning.net.parameters())
    counts = [("parameters", sum(each.numel() for each in parameters)), ("tensors", len(parameters))]
    known: list[Figure] = [(f"{job['problem']}: {name}", 0, count) for name, count in counts]
    return known + figures(record, vectors.spent(client), job), results


def figures(record: Record, spent: list[float], job: dict[str, Any]) -> list[Figure]:
    """Milliseconds of each step but the first; and by steps: milliseconds until then, the mean loss since the look before, and
    what was found on held-out samples."""
    problem, passed = job["problem"], 0.0
    found: list[Figure] = []
    for computing, exchanging, served in list(zip(record.computation, record.exchange, spent))[1:]:
        found += [
            (f"{problem}: computation", 0, computing),
            (f"{problem}: communication", 0, exchanging - served),
            (f"{problem}: at servers", 0, served),
            (f"{problem}: step", 0, computing + exchanging),
        ]
    before = 0
    for steps, quality in record.quality:
        if steps:
            passed += sum(record.computation[before:steps]) + sum(record.exchange[before:steps])
            found.append((f"{problem}: loss", steps, sum(record.losses[before:steps]) / (steps - before)))
        found += [(f"{problem}: ms", steps, passed), (f"{problem}: held out", steps, quality)]
        before = steps
    if quality >= job["target"]:
        found.append((f"{problem}: to the target", 0, passed))
    return found
