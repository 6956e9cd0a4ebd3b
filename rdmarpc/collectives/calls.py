"""The collectives as exchanges. All sizes are bytes unless they are called counts. Tensors here are flat and contiguous.

Which way a call takes follows from its size and the number of ranks alone, so all ranks take the same:

* a small ``all_reduce``: everybody sends everything to everybody, and adds up for itself;
* a large one goes block by block: everybody adds up its part of the block (``reduce_scatter``), then sends that to the others
  (``all_gather``). A block fits into caches;
* all others: straight from the rank that has it to the rank that needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..transport.exchange.streams import Fold, Span
from .engine import Engine
from .signature import Signature
from .sums import Sum

ONE_SHOT = 32 << 10
PART = 512 << 10
"""Bytes of a block that one rank adds up."""
Flat = torch.Tensor
Run = Callable[[Engine], None]


def span(tensor: Flat) -> Span:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _copy(target: Flat, source: Flat) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def _sum(engine: Engine, outs: dict[int, Span], own: Flat, result: Flat, how: Sum, *, whole: bool = False) -> None:
    """Exchange: send ``outs``, and add up what comes from everybody else with ``own`` into ``result``."""
    assert engine.streams is not None
    nbytes = own.numel() * own.element_size()
    others = [rank for rank in range(engine.size) if rank != engine.rank]
    if how.code >= 0 and engine.streams.folds:
        fold = Fold(how.code, own.data_ptr(), result.data_ptr(), nbytes, whole)
        engine.exchange(outs, dict.fromkeys(others, (0, nbytes)), fold)
        return
    parts = {rank: torch.empty_like(own) for rank in others}
    engine.exchange(outs, {rank: span(part) for rank, part in parts.items()})
    parts[engine.rank] = own
    how.add_up(result, [parts[rank] for rank in range(engine.size)])


def cut(count: int, size: int) -> list[tuple[int, int]]:
    """Start and end of each rank's part of ``count`` elements."""
    part = -(-count // size)
    return [(min(rank * part, count), min((rank + 1) * part, count)) for rank in range(size)]


def barrier(name: str = "barrier", timeout: float = 0.0) -> Run:
    def run(engine: Engine) -> None:
        engine.begin(Signature(name), timeout)
        if engine.size > 1:
            empty = {rank: (0, 0) for rank in range(engine.size) if rank != engine.rank}
            engine.exchange(empty, empty)
        engine.end()

    return run


def all_reduce(data: Flat, how: Sum, timeout: float = 0.0) -> Run:
    def run(engine: Engine) -> None:
        size, rank = engine.size, engine.rank
        engine.begin(Signature("all_reduce", data.dtype, data.numel(), how.name), timeout)
        if size > 1 and data.numel() * data.element_size() <= ONE_SHOT:
            others = {other: span(data) for other in range(size) if other != rank}
            _sum(engine, others, data, data, how, whole=True)
        elif size > 1:
            block = size * (PART // data.element_size())
            for start in range(0, data.numel(), block):
                piece = data[start : start + block]
                parts = [piece[begin:end] for begin, end in cut(piece.numel(), size)]
                mine, sent = parts[rank], {other: span(part) for other, part in enumerate(parts) if other != rank}
                _sum(engine, sent, mine, mine, how)
                engine.exchange(dict.fromkeys(sent, span(mine)), sent)
        how.finish(data, size)
        engine.end()

    return run


def reduce(data: Flat, how: Sum, root: int, timeout: float = 0.0) -> Run:
    def run(engine: Engine) -> None:
        engine.begin(Signature("reduce", data.dtype, data.numel(), how.name, root), timeout)
        if engine.rank != root:
            engine.exchange({root: span(data)})
        else:
            if engine.size > 1:
                _sum(engine, {}, data, data, how)
            how.finish(data, engine.size)
        engine.end()

    return run


def reduce_scatter(output: Flat, inputs: Sequence[Flat], how: Sum, timeout: float = 0.0) -> Run:
    """Part ``r`` of ``inputs`` is summed at rank ``r``. Parts may differ in size."""

    def run(engine: Engine) -> None:
        engine.begin(Signature("reduce_scatter", output.dtype, 0, how.name), timeout)
        own = inputs[engine.rank]
        if engine.size > 1:
            _sum(engine, {rank: span(part) for rank, part in enumerate(inputs) if rank != engine.rank}, own, output, how)
        else:
            _copy(output, own)
        how.finish(output, engine.size)
        engine.end()

    return run


def broadcast(data: Flat, root: int, timeout: float = 0.0) -> Run:
    def run(engine: Engine) -> None:
        engine.begin(Signature("broadcast", data.dtype, data.numel(), "", root), timeout)
        if engine.rank == root:
            if engine.size > 1:
                engine.exchange({rank: span(data) for rank in range(engine.size) if rank != root})
        else:
            engine.exchange({}, {root: span(data)})
        engine.end()

    return run


def all_to_all(
    name: str,
    outputs: Sequence[Flat],
    inputs: Sequence[Flat],
    dtype: torch.dtype,
    root: int = -1,
    timeout: float = 0.0,
    *,
    sends: bool = True,
    receives: bool = True,
) -> Run:
    """Send part ``r`` of ``inputs`` to rank ``r``, and put what comes from rank ``r`` into part ``r`` of ``outputs``: also for
    ``all_gather``, whose inputs are all one. With a ``root`` only that rank sends to, or receives from, the others, and an
    empty list means that this rank has no part in one of the two."""

    def run(engine: Engine) -> None:
        engine.begin(Signature(name, dtype, 0, "", root), timeout)
        me = engine.rank
        others = [rank for rank in range(engine.size) if rank != me and root in (-1, me, rank)]
        outs = {rank: span(inputs[rank]) for rank in others} if inputs and sends else {}
        ins = {rank: span(outputs[rank]) for rank in others} if outputs and receives else {}
        if outs or ins:
            engine.exchange(outs, ins)
        if inputs and outputs:
            _copy(outputs[me], inputs[me])
        engine.end()

    return run
