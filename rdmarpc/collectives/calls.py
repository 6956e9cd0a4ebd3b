"""The collectives as exchanges. All sizes are bytes unless they are called counts. Tensors here are flat and contiguous.

Which way a call takes follows from its size and the number of ranks alone, so all ranks take the same:

* a small ``all_reduce``: everybody sends everything to everybody, and adds up for itself;
* a large one: everybody adds up one part, and sends that to the others, in one pass (``transport/exchange/kernels``). What
  torch has to add up goes as small ones do, block by block;
* all others: straight from the rank that has it to the rank that needs it.

The first call of a signature makes a plan: what goes where, as offsets from the tensor, or (of lists, and of parts of several
sizes) as addresses. Later ones run it.

Tensors are added up in the order of the ranks, pair by pair from the left, so with the same bits at every rank (``Sum``). Types
that kernels know (``words/atomics.FOLD_TYPES``) are summed by them, without the GIL; bfloat16 and float16 through float32,
rounded after each pair. Minima and maxima keep what is no number, as torch's do. Complex products and all other types are
summed by torch. Bools: a sum is an or, a product an and. An average of integers is rounded towards zero, as NCCL's. What is
multiplied before it is summed (``PREMUL_SUM``) is rounded to its type in between, as NCCL's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from functools import reduce as reduce_in_order
from typing import Any

import torch
import torch.distributed as dist

from ..transport import NotSupported, exchange, kernels
from .engine import Engine
from .signature import SUMS, Mismatch, Signature, code_of

_NAMES = {getattr(dist.ReduceOp, name.upper()): name for name in SUMS if name}
_OF_BOOLS = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}
_BY_TORCH: dict[str, Callable[..., torch.Tensor]]
_BY_TORCH = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}


class Sum:
    """An operation on tensors of one type. Raises ``ValueError`` or ``NotSupported`` for one that there is not."""

    __slots__ = ("average", "code", "dtype", "factor", "function", "name")

    def __init__(self, name: str, dtype: torch.dtype, factor: float | None = None) -> None:
        """``factor``: what each rank multiplies its part by before; ``None``: nothing."""
        self.name, self.dtype, self.factor = name, dtype, factor
        self.average = name == "avg"
        bits = name in ("band", "bor", "bxor")
        if bits and (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(f"{name} is for integers and bools, got {dtype}")
        if self.average and dtype is torch.bool:
            raise ValueError("an average of bools is not defined")
        if dtype.is_complex and name in ("min", "max"):
            raise ValueError(f"{name} of complex numbers is not defined")
        if factor is not None and not dtype.is_floating_point:
            raise ValueError(f"a premultiplied sum is for floating-point numbers, got {dtype}")
        plain = "sum" if self.average or factor is not None else name
        self.function = _BY_TORCH.get(plain)
        if dtype is torch.bool:
            dtype, plain = torch.uint8, _OF_BOOLS.get(plain, plain)
        elif dtype.is_complex and plain == "sum":
            dtype = dtype.to_real()
        self.code = exchange.fold_code(str(dtype).removeprefix("torch."), plain)
        if self.code < 0 and not self._has_torch():
            raise NotSupported(f"torch has no {name} of {self.dtype}", hint="convert the tensor before")

    def _has_torch(self) -> bool:
        """Whether torch has the operation for this type. Before the call begins: one that fails ends its group."""
        one = torch.zeros(1, dtype=self.dtype, device="cpu")
        try:
            return self.function is not None and self.function(one, one).dtype == self.dtype
        except (NotImplementedError, RuntimeError):
            return False

    def part(self, values: torch.Tensor) -> torch.Tensor:
        """What a rank with these values adds to the sum."""
        return values if self.factor is None else values * self.factor

    def finish(self, result: torch.Tensor, size: int) -> None:
        """What comes after the sum."""
        if self.average:
            rounded = not (self.dtype.is_floating_point or self.dtype.is_complex)
            result.div_(size, rounding_mode="trunc" if rounded else None)


_known = cache(Sum)


def sum_of(operation: dist.ReduceOp, dtype: torch.dtype) -> Sum:
    """As ``Sum``, by torch's name of the operation."""
    name = _NAMES.get(getattr(operation, "op", operation))  # ReduceOp has it, and is it, in turn
    if name is None:
        raise NotSupported(f"the backend rdmarpc has no reduction {operation}", hint="scale before, and sum")
    return Sum(name, dtype, _factor(operation)) if name == "premul_sum" else _known(name, dtype)


def _factor(operation: Any) -> float:
    """That of a ``PREMUL_SUM``: a number, or a tensor of one element."""
    if not hasattr(operation, "__getstate__") or not isinstance(state := operation.__getstate__(), tuple) or state[1] is None:
        raise ValueError("PREMUL_SUM needs a factor: ReduceOp.PREMUL_SUM(factor)")
    return float(state[1])


# -- the collectives

ONE_SHOT = 128 << 10
"""Bytes that a rank receives of all others, at most, where everybody sends everything to everybody."""
_BLOCK = 512 << 10
"""Bytes that torch adds up at once."""
Flat = torch.Tensor
Run = Callable[[Engine, float], None]
"""A call, with the seconds that it may take; 0: those of the group."""


def in_turn(runs: Iterable[Run]) -> Run:
    """Several as one call."""
    runs = list(runs)

    def run(engine: Engine, limit: float) -> None:
        for each in runs:
            each(engine, limit)

    return run


def _call(signature: Signature, body: Callable[[Engine], None], engine: Engine, limit: float) -> None:
    """Make one call of a group."""
    engine.begin(signature, limit)
    body(engine)
    engine.since = 0.0


def span(tensor: Flat) -> exchange.Span:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _copy(target: Flat, source: Flat) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source.clone() if _meet(span(source), span(target)) else source)


def _meet(one: exchange.Span, other: exchange.Span) -> bool:
    """Whether these have memory in common."""
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1] and min(one[1], other[1]) > 0


def _overlap(some: Iterable[exchange.Span], others: Iterable[exchange.Span]) -> bool:
    others = list(others)
    return any(_meet(one, other) for one in some for other in others)


def _sum(engine: Engine, outs: dict[int, exchange.Span], own: Flat, result: Flat, how: Sum) -> None:
    """Exchange: send ``outs``, and add up what comes from everybody else with ``own`` into ``result``."""
    nbytes = span(own)[1]
    others = [rank for rank in range(engine.size) if rank != engine.rank]
    if how.code >= 0:
        fold = exchange.Fold(how.code, own.data_ptr(), result.data_ptr(), nbytes, False)
        engine.move(outs, dict.fromkeys(others, (0, nbytes)), fold)
        return
    parts = {rank: torch.empty_like(own) for rank in others}
    engine.move(outs, {rank: span(part) for rank, part in parts.items()})
    parts[engine.rank] = own
    assert how.function is not None
    result.copy_(reduce_in_order(how.function, [parts[rank] for rank in range(engine.size)]))


def barrier(name: str = "barrier") -> Run:
    signature = Signature(name)

    def make(streams: exchange.Streams) -> exchange.Plan:
        empty = dict.fromkeys(streams.order, (0, 0))
        return streams.plan(code_of(signature), 0, empty, empty)

    return partial(_call, signature, lambda engine: engine.run(signature, make))


def all_reduce(data: torch.Tensor, how: Sum) -> Run:
    """``data``: contiguous, of any shape."""
    nbytes = data.nbytes
    signature = Signature("all_reduce", data.dtype, data.numel(), how.name)

    def make(streams: exchange.Streams) -> exchange.Plan:
        if nbytes * len(streams.order) > ONE_SHOT:
            return streams.sum_plan(code_of(signature), signature.elements, how.code, nbytes)
        whole = dict.fromkeys(streams.order, (0, nbytes))
        return streams.plan(code_of(signature), signature.elements, whole, whole, exchange.Fold(how.code, 0, 0, nbytes, True))

    def run(engine: Engine) -> None:
        if how.factor is not None:
            data.detach().mul_(how.factor)
        if how.code >= 0:
            engine.run(signature, make, data.data_ptr(), data.data_ptr())
        elif engine.size > 1:
            for block in data.detach().view(-1).split(_BLOCK // data.element_size()):
                _sum(engine, {rank: span(block) for rank in range(engine.size) if rank != engine.rank}, block, block, how)
        if how.average:
            how.finish(data.detach(), engine.size)

    return partial(_call, signature, run)


def reduce(data: Flat, how: Sum, root: int) -> Run:
    signature = Signature("reduce", data.dtype, data.numel(), how.name, root)

    def run(engine: Engine) -> None:
        if engine.rank != root:
            part = how.part(data)  # alive until it was sent
            engine.move({root: span(part)})
        else:
            if how.factor is not None:
                data.mul_(how.factor)
            if engine.size > 1:
                _sum(engine, {}, data, data, how)
            how.finish(data, engine.size)

    return partial(_call, signature, run)


def reduce_scatter(output: Flat, inputs: Sequence[Flat], how: Sum) -> Run:
    """Part ``r`` of ``inputs`` is summed at rank ``r``. Parts may differ in size."""

    signature = Signature("reduce_scatter", output.dtype, 0, how.name)

    def run(engine: Engine) -> None:
        parts = inputs if how.factor is None else [how.part(each) for each in inputs]
        me, result = engine.rank, span(output)
        if _overlap([span(part) for rank, part in enumerate(parts) if rank != me or span(part) != result], [result]):
            parts = [part.clone() for part in parts]  # the sums would be written over what has still to be read
        own = parts[me]
        if engine.size > 1:
            _sum(engine, {rank: span(part) for rank, part in enumerate(parts) if rank != me}, own, output, how)
        else:
            _copy(output, own)
        how.finish(output, engine.size)

    return partial(_call, signature, run)


def broadcast(data: Flat, root: int) -> Run:
    nbytes = data.nbytes
    signature = Signature("broadcast", data.dtype, data.numel(), "", root)

    def make(streams: exchange.Streams) -> exchange.Plan:
        mine = streams.rank == root
        outs, ins = dict.fromkeys(streams.order if mine else (), (0, nbytes)), {} if mine else {root: (0, nbytes)}
        return streams.plan(code_of(signature), signature.elements, outs, ins)

    return partial(_call, signature, lambda engine: engine.run(signature, make, data.data_ptr(), data.data_ptr()))


def all_to_all(name: str, outputs: Sequence[Flat], inputs: Sequence[Flat], root: int = -1) -> Run:
    """Send part ``r`` of ``inputs`` to rank ``r``, and put what comes from rank ``r`` into part ``r`` of ``outputs``: also for
    ``all_gather``, whose inputs are all one. All send to the ``root`` of a ``gather``, which alone has outputs; that of a
    ``scatter`` sends to all, and has alone inputs."""

    signature = Signature(name, (inputs or outputs)[0].dtype, 0, "", root)

    def run(engine: Engine) -> None:
        me, given = engine.rank, inputs
        others = [rank for rank in range(engine.size) if rank != me]
        senders = others if name != "scatter" else [rank for rank in others if rank == root]
        receivers = others if name != "gather" else [rank for rank in others if rank == root]
        ins = {rank: span(outputs[rank]) for rank in senders} if outputs else {}
        if ins and _overlap(map(span, given), ins.values()):  # what comes would be written over what has still to be sent
            given = [each.clone() for each in inputs]
        outs = {rank: span(given[rank]) for rank in receivers} if given else {}
        if outs or ins:
            engine.move(outs, ins)
        if given and outputs:
            _copy(outputs[me], given[me])

    return partial(_call, signature, run)


def even(name: str, output: torch.Tensor, input: torch.Tensor) -> Run:
    """``all_to_all`` or ``all_gather`` of two contiguous tensors, whose parts for the ranks have one size."""
    signature, nbytes = Signature(name, input.dtype), span(input)[1]

    def run(engine: Engine) -> None:
        size, rank = engine.size, engine.rank
        part, step = (nbytes // size,) * 2 if name == "all_to_all" else (nbytes, 0)

        def make(streams: exchange.Streams) -> exchange.Plan:
            outs = {other: (other * step, part) for other in streams.order}
            ins = {other: (other * part, part) for other in streams.order}
            return streams.plan(code_of(signature), 0, outs, ins)

        kept, target = input, output.data_ptr()
        place = target + rank * part
        in_place = name == "all_gather" and input.data_ptr() == place
        if not in_place and _meet(span(input), span(output)):  # what comes would be written over what has still to be sent
            kept = input.clone()
        source = kept.data_ptr()
        engine.run((signature, nbytes), make, source, target)
        if source + rank * step != place:
            copy = kernels.copy_past_caches if part >= exchange.COPY_PAST else kernels.copy
            copy(place, source + rank * step, part)

    return partial(_call, signature, run)


def scatter_sum(output: torch.Tensor, input: torch.Tensor, how: Sum) -> Run:
    """``reduce_scatter`` of two contiguous tensors, by an operation that kernels have."""
    signature, nbytes = Signature("reduce_scatter", output.dtype, 0, how.name), span(output)[1]

    def run(engine: Engine) -> None:
        def make(streams: exchange.Streams) -> exchange.Plan:
            outs = {other: (other * nbytes, nbytes) for other in streams.order}
            fold = exchange.Fold(how.code, engine.rank * nbytes, 0, nbytes, False)
            return streams.plan(code_of(signature), 0, outs, dict.fromkeys(streams.order, (0, nbytes)), fold)

        target, kept = output.data_ptr(), input
        if target != input.data_ptr() + engine.rank * nbytes and _meet(span(output), span(input)):
            kept = input.clone()  # the sums would be written over what has still to be read
        if engine.size > 1:
            engine.run((signature, nbytes), make, kept.data_ptr(), target)
        else:
            kernels.copy(target, kept.data_ptr(), nbytes)
        if how.average:
            how.finish(output.detach(), engine.size)

    return partial(_call, signature, run)


def all_reduce_sparse(tensor: torch.Tensor, operation: dist.ReduceOp) -> Callable[[Engine, float], None]:
    """Of sparse tensors (COO): all parts to all ranks, which add them up in the order of the ranks. ``tensor``
    gets the sum, coalesced. All ranks give tensors of one shape and one number of sparse dimensions."""
    if sum_of(operation, tensor.dtype).name != "sum":
        raise NotSupported("sparse tensors can only be summed", hint="all_reduce(tensor.to_dense(), op) takes any operation")
    part = tensor.detach().coalesce()

    def run(engine: Engine, limit: float) -> None:
        size = engine.size

        def gather(into: list[torch.Tensor], own: torch.Tensor) -> None:
            all_to_all("all_gather", into, [own] * size)(engine, limit)

        mine = torch.tensor([part._nnz(), part.sparse_dim(), *part.shape], device="cpu")
        heads = [torch.zeros_like(mine) for _ in range(size)]
        gather(heads, mine)
        for rank, head in enumerate(heads):
            if not torch.equal(head[1:], mine[1:]):
                me, other = engine.ranks[engine.rank], engine.ranks[rank]
                theirs = f"{tuple(head[2:].tolist())}, {int(head[1])} of them sparse"
                raise Mismatch(
                    f"rank {me} adds up a sparse tensor of {tuple(part.shape)}, {part.sparse_dim()} of them sparse, and rank "
                    f"{other} one of {theirs}"
                )
        counts = [head[0] for head in heads]
        inner = tuple(part.values().shape[1:])
        indices = [torch.empty(part.sparse_dim() * int(count), dtype=torch.int64, device="cpu") for count in counts]
        gather(indices, part.indices().contiguous().view(-1))
        values = [torch.empty((int(count), *inner), dtype=part.dtype, device="cpu") for count in counts]
        gather([each.view(-1) for each in values], part.values().contiguous().view(-1))
        where = torch.cat([each.view(part.sparse_dim(), -1) for each in indices], dim=1)
        tensor.copy_(torch.sparse_coo_tensor(where, torch.cat(values), part.shape, device="cpu").coalesce())

    return run
