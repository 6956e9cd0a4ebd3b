"""The collectives as exchanges. All sizes are bytes unless they are called counts. Tensors here are flat and contiguous.

Which way a call takes follows from its size and the number of ranks alone, so all ranks take the same:

* a small ``all_reduce``: everybody sends everything to everybody, and adds up for itself;
* a large one: everybody adds up one part, and sends that to the others, in one pass (``transport/exchange/reduction``). Where
  torch has to add up, block by block: everybody adds up its part of the block, then sends that to the others;
* all others: straight from the rank that has it to the rank that needs it.

The first call of a signature makes a plan: what goes where, as offsets from the tensor, or (of lists, and of parts of several
sizes) as addresses. Later ones run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from ..transport import kernels
from ..transport.exchange.streams import COPY_PAST, Fold, Plan, Span, Streams
from .engine import Engine
from .signature import Signature, code_of
from .sums import Sum

ONE_SHOT = 128 << 10
"""Bytes that a rank receives of all others, at most, where everybody sends everything to everybody."""
PART = 512 << 10
"""Bytes of a block that one rank adds up."""
Flat = torch.Tensor
Run = Callable[[Engine], None]


def span(tensor: Flat) -> Span:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _copy(target: Flat, source: Flat) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source.clone() if overlap([span(source)], [span(target)]) else source)


def overlap(some: Iterable[Span], others: Iterable[Span]) -> bool:
    """Whether memory of one of these is also memory of one of those."""
    found = [(start, start + nbytes) for start, nbytes in others if nbytes]
    return any(start < end and begin < start + nbytes for start, nbytes in some if nbytes for begin, end in found)


def _sum(engine: Engine, outs: dict[int, Span], own: Flat, result: Flat, how: Sum) -> None:
    """Exchange: send ``outs``, and add up what comes from everybody else with ``own`` into ``result``."""
    assert engine.streams is not None
    nbytes = own.numel() * own.element_size()
    others = [rank for rank in range(engine.size) if rank != engine.rank]
    if how.code >= 0 and engine.streams.folds:
        ins, fold = dict.fromkeys(others, (0, nbytes)), Fold(how.code, own.data_ptr(), result.data_ptr(), nbytes, False)
        engine.exchange(outs, ins, fold)
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
        signature = Signature(name)
        engine.begin(signature, timeout)
        if engine.size > 1:
            engine.run(engine.plan(signature, lambda streams: _nothing(streams, signature)))
        engine.end()

    return run


def _nothing(streams: Streams, signature: Signature) -> Plan:
    empty = dict.fromkeys(streams.order, (0, 0))
    return streams.plan(code_of(signature), 0, empty, empty)


def all_reduce(data: torch.Tensor, how: Sum, timeout: float = 0.0) -> Run:
    """``data``: contiguous, of any shape."""

    def run(engine: Engine) -> None:
        size = engine.size
        signature = Signature("all_reduce", data.dtype, data.numel(), how.name)
        engine.begin(signature, timeout)
        if how.factor is not None:
            data.detach().mul_(how.factor)
        if size > 1:
            assert engine.streams is not None
            nbytes, small = span(data)[1], span(data)[1] * (size - 1) <= ONE_SHOT
            if how.code >= 0 and engine.folds:
                make = _everything if small else _parts
                engine.run(engine.plan(signature, lambda streams: make(streams, signature, how.code, nbytes)), *_at(data))
            else:
                _by_blocks(engine, data.detach().view(-1), how, small)
        if how.average:
            how.finish(data.detach(), size)
        engine.end()

    return run


def _at(data: Flat) -> tuple[int, int]:
    """The two addresses of a call in place."""
    return data.data_ptr(), data.data_ptr()


def _everything(streams: Streams, signature: Signature, fold: int, nbytes: int) -> Plan:
    whole = dict.fromkeys(streams.order, (0, nbytes))
    return streams.plan(code_of(signature), signature.elements, whole, whole, Fold(fold, 0, 0, nbytes, True))


def _parts(streams: Streams, signature: Signature, fold: int, nbytes: int) -> Plan:
    return streams.sum_plan(code_of(signature), signature.elements, fold, nbytes)


def _by_blocks(engine: Engine, data: Flat, how: Sum, small: bool) -> None:
    """Where kernels do not add up while they receive."""
    size, rank = engine.size, engine.rank
    if small:
        _sum(engine, {other: span(data) for other in range(size) if other != rank}, data, data, how)
        return
    block = size * (PART // data.element_size())
    for start in range(0, data.numel(), block):
        piece = data[start : start + block]
        parts = [piece[begin:end] for begin, end in cut(piece.numel(), size)]
        mine, sent = parts[rank], {other: span(part) for other, part in enumerate(parts) if other != rank}
        _sum(engine, sent, mine, mine, how)
        engine.exchange(dict.fromkeys(sent, span(mine)), sent)


def reduce(data: Flat, how: Sum, root: int, timeout: float = 0.0) -> Run:
    def run(engine: Engine) -> None:
        engine.begin(Signature("reduce", data.dtype, data.numel(), how.name, root), timeout)
        if engine.rank != root:
            part = how.part(data)
            engine.exchange({root: span(part)})
        else:
            if how.factor is not None:
                data.mul_(how.factor)
            if engine.size > 1:
                _sum(engine, {}, data, data, how)
            how.finish(data, engine.size)
        engine.end()

    return run


def reduce_scatter(output: Flat, inputs: Sequence[Flat], how: Sum, timeout: float = 0.0) -> Run:
    """Part ``r`` of ``inputs`` is summed at rank ``r``. Parts may differ in size."""

    def run(engine: Engine) -> None:
        engine.begin(Signature("reduce_scatter", output.dtype, 0, how.name), timeout)
        parts = inputs if how.factor is None else [how.part(each) for each in inputs]
        own, result = parts[engine.rank], span(output)
        sent = {rank: span(part) for rank, part in enumerate(parts) if rank != engine.rank}
        if overlap([*sent.values(), *([] if span(own) == result else [span(own)])], [result]):
            parts = [part.clone() for part in parts]  # the sums would be written over what has still to be read
            own, sent = parts[engine.rank], {rank: span(parts[rank]) for rank in sent}
        if engine.size > 1:
            _sum(engine, sent, own, output, how)
        else:
            _copy(output, own)
        how.finish(output, engine.size)
        engine.end()

    return run


def broadcast(data: Flat, root: int, timeout: float = 0.0) -> Run:
    def run(engine: Engine) -> None:
        signature = Signature("broadcast", data.dtype, data.numel(), "", root)
        engine.begin(signature, timeout)
        if engine.size > 1:
            nbytes, rank = span(data)[1], engine.rank

            def make(streams: Streams) -> Plan:
                outs = dict.fromkeys(streams.order, (0, nbytes)) if rank == root else {}
                ins = {root: (0, nbytes)} if rank != root else {}
                return streams.plan(code_of(signature), signature.elements, outs, ins)

            engine.run(engine.plan(signature, make), *_at(data))
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
        me, given = engine.rank, inputs
        others = [rank for rank in range(engine.size) if rank != me and root in (-1, me, rank)]
        ins = {rank: span(outputs[rank]) for rank in others} if outputs and receives else {}
        if ins and overlap(map(span, given), ins.values()):  # what comes would be written over what has still to be sent
            given = [each.clone() for each in inputs]
        outs = {rank: span(given[rank]) for rank in others} if given and sends else {}
        if outs or ins:
            engine.exchange(outs, ins)
        if given and outputs:
            _copy(outputs[me], given[me])
        engine.end()

    return run


def even(name: str, output: torch.Tensor, input: torch.Tensor, timeout: float = 0.0) -> Run:
    """``all_to_all`` or ``all_gather`` of two contiguous tensors, whose parts for the ranks have one size."""
    nbytes = span(input)[1]

    def run(engine: Engine) -> None:
        size, rank = engine.size, engine.rank
        signature = Signature(name, input.dtype)
        part, step = (nbytes // size,) * 2 if name == "all_to_all" else (nbytes, 0)
        engine.begin(signature, timeout)

        def make(streams: Streams) -> Plan:
            outs = {other: (other * step, part) for other in streams.order}
            ins = {other: (other * part, part) for other in streams.order}
            return streams.plan(code_of(signature), 0, outs, ins)

        source, target = input.data_ptr(), output.data_ptr()
        kept = input
        if _in_the_way(span(input), span(output), target + rank * part if name == "all_gather" else 0):
            kept = input.clone()
            source = kept.data_ptr()
        if size > 1:
            engine.run(engine.plan((signature, nbytes), make), source, target)
        if source + rank * step != target + rank * part:
            _keep(target + rank * part, source + rank * step, part)
        engine.end()

    return run


def _keep(target: int, source: int, nbytes: int) -> None:
    """Copy what stays at this rank."""
    if nbytes >= COPY_PAST:
        kernels.copy_past_caches(target, source, nbytes)
    else:
        kernels.copy(target, source, nbytes)


def _in_the_way(source: Span, target: Span, place: int) -> bool:
    """Whether what comes would be written over what has still to be sent. At ``place`` the source may lie."""
    return source[0] != place and source[0] < target[0] + target[1] and target[0] < source[0] + source[1]


def scatter_sum(output: torch.Tensor, input: torch.Tensor, how: Sum, timeout: float = 0.0) -> Run:
    """``reduce_scatter`` of two contiguous tensors, by an operation that kernels have."""
    nbytes = span(output)[1]

    def run(engine: Engine) -> None:
        signature = Signature("reduce_scatter", output.dtype, 0, how.name)
        engine.begin(signature, timeout)

        def make(streams: Streams) -> Plan:
            outs = {other: (other * nbytes, nbytes) for other in streams.order}
            fold = Fold(how.code, engine.rank * nbytes, 0, nbytes, False)
            return streams.plan(code_of(signature), 0, outs, dict.fromkeys(streams.order, (0, nbytes)), fold)

        own, kept = input.data_ptr() + engine.rank * nbytes, input
        if _in_the_way(span(output), span(input), own):
            kept = input.clone()
        if engine.size > 1:
            engine.run(engine.plan((signature, nbytes), make), kept.data_ptr(), output.data_ptr())
        else:
            kernels.copy(output.data_ptr(), kept.data_ptr(), nbytes)
        if how.average:
            how.finish(output.detach(), engine.size)
        engine.end()

    return run
