"""Calls of two workers that both RPC layers run with the same code; `layer` is the module.

A cell takes the layer, a tensor of the size in question and how often to call, and returns microseconds a call by the case
that they are samples of.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..harness.measure import identity, per_iteration
from . import fresh

TENSORS = 8
"""The number of tensors in a call of `several`."""
NEW_FUNCTIONS, CALLS_OF_EACH = 10, 12
"""The numbers of functions, and of calls of each, in a round of `first`."""


def plus_one(x: Tensor) -> Tensor:
    return x + 1


def identity_of_all(*received: Tensor) -> tuple[Tensor, ...]:
    return received


def arena(layer: Any, x: Tensor, times: int) -> dict[str, float]:
    """As `identity`, with an `x` whose memory the caller has chosen."""
    return {"arena": per_iteration(lambda: layer.rpc_sync("worker1", identity, args=(x,)), times)}


def result(layer: Any, x: Tensor, times: int) -> dict[str, float]:
    """The callee computes, so that its result lies in memory that torch allocated."""
    return {"result": per_iteration(lambda: layer.rpc_sync("worker1", plus_one, args=(x,)), times)}


def several(layer: Any, x: Tensor, times: int) -> dict[str, float]:
    """Tensors with a storage of their own each, there and back."""
    tensors = tuple(piece.clone() for piece in x.chunk(TENSORS))
    return {"several": per_iteration(lambda: layer.rpc_sync("worker1", identity_of_all, args=tensors), times)}


def remote(layer: Any, x: Tensor, times: int) -> dict[str, float]:
    """A reference to the result, and its value; deleting it falls into the next call."""
    return {"remote": per_iteration(lambda: layer.remote("worker1", identity, args=(x,)).to_here(), times)}


def first(layer: Any, x: Tensor, times: int) -> dict[str, float]:
    """The first call of a function never called before with a size never sent before, the second, and those that follow."""
    calls_ns = []
    for _ in range(NEW_FUNCTIONS):
        function, number = fresh.take()
        tensor = torch.ones(x.numel() + number, dtype=x.dtype)
        elapsed_ns = []
        for _ in range(CALLS_OF_EACH):
            start = time.perf_counter_ns()
            layer.rpc_sync("worker1", function, args=(tensor,))
            elapsed_ns.append(time.perf_counter_ns() - start)
        calls_ns.append(elapsed_ns)
    firsts, seconds, *later = zip(*calls_ns)
    parts = {"first": firsts, "second": seconds, "later": [ns for each in later for ns in each]}
    return {case: statistics.median(elapsed_ns) / 1e3 for case, elapsed_ns in parts.items()}


Cell = Callable[[Any, Tensor, int], dict[str, float]]
CELLS: dict[str, Cell] = {"first": first, "arena": arena, "result": result, "several": several, "remote": remote}


def turns(job: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """(cell, bytes, number of the round): what each layer measures, turn by turn."""
    for case, sizes in job["cells"].items():
        for size in sizes:
            for number in range(job["rounds"]):
                yield case, size, number
