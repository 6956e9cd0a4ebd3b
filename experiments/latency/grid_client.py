"""What the client of a turn measures."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..harness.functions import function
from ..harness.libraries import Client
from ..harness.turns import Figure


def under_way(size: int, job: dict[str, Any]) -> int:
    """Calls at once with tensors of so many bytes."""
    return job["calls_large"] if size >= job["large"] else job["calls"]


def batches(size: int, job: dict[str, Any]) -> int:
    """How many batches are measured in a turn, besides the one that does not count."""
    return job["batches_large"] if size >= job["large"] else job["batches"]


def contents(size: int) -> Tensor:
    """A square of numbers that differ, as many bytes as asked for or up to a row less. Doubling keeps them exact."""
    side = round((size // 4) ** 0.5)
    return torch.arange(side * side, dtype=torch.float32).remainder_(65521.0).reshape(side, side)


def drive(client: Client, job: dict[str, Any]) -> list[Figure]:
    """Every cell: a batch that does not count and whose results are compared with what they must be, then those that count.
    Milliseconds: the mean from a call's start until its result is there ("delay"), and all of a batch ("total")."""
    figures: list[Figure] = []
    for size in job["sizes"]:
        x = contents(size)
        calls = under_way(size, job)
        for name in job["functions"]:
            check(client, name, x, calls)
            for _ in range(batches(size, job)):
                total, delay = batch(client, name, x, calls)
                figures += [(f"{name} total", size, total), (f"{name} delay", size, delay)]
    return figures


def check(client: Client, name: str, x: Tensor, calls: int) -> None:
    pending = [client.start(name, x) for _ in range(calls)]
    while pending:
        found = client.finish(pending.pop(0))
        if not torch.equal(found.view(-1), x.view(-1)):
            raise RuntimeError(f"{name} of {x.nbytes} bytes came back with other contents")


def batch(client: Client, name: str, x: Tensor, calls: int) -> tuple[float, float]:
    """Milliseconds of all calls together, and of one in the mean. Results are kept until all are there."""
    begins, ends = [0.0] * calls, [0.0] * calls
    clock = time.perf_counter

    def done(number: int) -> None:
        ends[number] = clock()

    pending = []
    start = clock()
    for number in range(calls):
        begins[number] = clock()
        pending.append(client.start(name, x, partial(done, number)))
    results = [client.finish(call) for call in pending]
    total = clock() - start
    if any(len(each.view(-1)) != x.numel() for each in results):
        raise RuntimeError(f"{name} of {x.nbytes} bytes came back with another size")
    # A result may be there before its callback has run.
    while not all(ends):
        time.sleep(1e-4)
    return 1e3 * total, 1e3 * statistics.mean(end - begin for begin, end in zip(begins, ends))


def local_ms(size: int, name: str, calls: int) -> float:
    """Milliseconds of as many calls of the function here, one after the other, in one thread."""
    x = contents(size)
    run = function(name)
    run(x)
    start = time.perf_counter()
    for _ in range(calls):
        run(x)
    return 1e3 * (time.perf_counter() - start)
