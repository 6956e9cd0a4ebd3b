"""What is measured: calls of torch.distributed over tensors of a given size, by any group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Call = Callable[[Any], object]
"""One call by this group."""


def prepared(case: str, nbytes: int, rank: int, size: int) -> Call:
    """A call over float32 tensors of ``nbytes`` that were made, and touched, before."""
    made: Call = _MAKE[case](max(nbytes // 4, 1), rank, size)
    return made


def received(case: str, nbytes: int, size: int) -> int:
    """The bytes that reach a rank in one call from other ranks, on the way of the fewest."""
    others = size - 1
    whole = {"all_reduce": 2 * nbytes * others / size, "all_gather": nbytes * others, "broadcast": nbytes, "pair": 2 * nbytes}
    return int(whole.get(case, nbytes * others / size))


def _barrier(count: int, rank: int, size: int) -> Call:
    return lambda group: dist.barrier(group)


def _all_reduce(count: int, rank: int, size: int) -> Call:
    data = torch.zeros(count)
    return lambda group: dist.all_reduce(data, group=group)


def _all_gather(count: int, rank: int, size: int) -> Call:
    data, out = torch.ones(count), torch.zeros(count * size)
    return lambda group: dist.all_gather_into_tensor(out, data, group)


def _reduce_scatter(count: int, rank: int, size: int) -> Call:
    data, out = torch.ones(count // size * size), torch.zeros(count // size)

    def call(group: Any) -> None:
        dist.reduce_scatter_tensor(out, data, group=group)

    return call


def _all_to_all(count: int, rank: int, size: int) -> Call:
    data, out = torch.ones(count // size * size), torch.zeros(count // size * size)
    return lambda group: dist.all_to_all_single(out, data, group=group)


def _broadcast(count: int, rank: int, size: int) -> Call:
    data = torch.ones(count)
    return lambda group: dist.broadcast(data, 0, group)


def _pair(count: int, rank: int, size: int) -> Call:
    """A tensor from rank 0 to rank 1 and back. Other ranks do nothing."""
    data = torch.ones(count)

    def call(group: Any) -> None:
        if rank == 0:
            dist.send(data, 1, group)
            dist.recv(data, 1, group)
        elif rank == 1:
            dist.recv(data, 0, group)
            dist.send(data, 0, group)

    return call


_MAKE: dict[str, Callable[[int, int, int], Call]] = {
    "barrier": _barrier,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "pair": _pair,
}
CASES = (*_MAKE, "ddp")
