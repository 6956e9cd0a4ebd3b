"""What crosses in the plan of a captured model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import prod

from ..plan.analyze import TransferGraph, Value
from ..plan.place import GRADIENT, Edge, Placement
from ..plan.program import names_in
from ..wire.header import HEADER_BYTES
from .describe import Transfers
from .records import Crossing, SegmentRecord, Use, WorkerRecord


def described(
    placement: Placement, parameter_bytes: Mapping[str, int] | None = None, staged: Mapping[int, tuple[int, str]] | None = None
) -> Transfers:
    """``parameter_bytes``: of the model, by worker; ``staged``: bytes so far and why, by number of the edge. Without a
    graph (control edges, parameters that are served) the operations stay unnamed."""
    known = {} if parameter_bytes is None else parameter_bytes
    copied = {} if staged is None else staged
    crossings = tuple(
        dataclasses.replace(_crossing(placement.graph, edge), staged=nbytes, why=why)
        for edge in placement.edges
        for nbytes, why in [copied.get(edge.number, (0, ""))]
    )
    segments: list[SegmentRecord] = []
    parts: dict[str, dict[str, None]] = {}
    for segment in placement.graph.segments if placement.graph is not None else ():
        operations = tuple(map(str, segment.instructions))
        segments.append(SegmentRecord(segment.number, segment.worker, segment.level, operations, segment.backward))
        modules = [str(step) for step in segment.instructions if step.kind == "module"]
        parts.setdefault(segment.worker, {}).update(dict.fromkeys(modules))
    workers = tuple(
        WorkerRecord(
            name,
            known.get(name, 0),
            sum(c.nbytes or 0 for c in crossings if c.target == name),
            sum(c.nbytes or 0 for c in crossings if c.source == name),
            sum(c.slot_bytes for c in crossings if c.target == name),
            tuple(parts.get(name, ())),
        )
        for name in dict.fromkeys([*placement.workers, *known])
    )
    depth = min((edge.depth for edge in placement.edges), default=0)
    reordered = tuple(placement.graph.reordered) if placement.graph is not None else ()
    return Transfers(placement.number, placement.caller, depth, crossings, workers, tuple(segments), reordered)


def _crossing(graph: TransferGraph | None, edge: Edge) -> Crossing:
    shape = tuple(n if n >= 0 else None for n in edge.shape)
    known = [n for n in shape if n is not None]
    plain = Crossing(
        number=edge.number,
        name=edge.value,
        kind=edge.kind,
        source=edge.source,
        target=edge.target,
        shape=shape,
        dtype=str(edge.dtype).removeprefix("torch."),
        nbytes=prod(known) * edge.dtype.itemsize if len(known) == len(shape) else None,
        depth=edge.depth,
        slot_bytes=edge.depth * (HEADER_BYTES + edge.nbytes),
        static=edge.static,
        device=edge.device,
    )
    value = None if graph is None else graph.values.get(edge.value)
    if graph is None or value is None:
        return plain
    producer = _producer(graph, value)
    if edge.kind == GRADIENT:
        users = [use.operation for use in _uses(graph, value, edge.source) if graph.segments[use.segment].backward]
        maker = "backward of " + ", ".join("the loss" if user == "output" else user for user in dict.fromkeys(users))
        use = Use(value.producer, f"backward of {producer}")
        return dataclasses.replace(plain, producer=maker, allocator=maker, first=use, last=use)
    uses = _uses(graph, value, edge.target)
    return dataclasses.replace(
        plain,
        needs_gradient=graph.returns_gradient(value, edge.target),
        trigger=value.trigger,
        producer=producer,
        allocator=f"slot of {value.slot_of}" if value.slot_of else str(value.site or ""),
        first=uses[0] if uses else None,
        last=uses[-1] if uses else None,
    )


def _producer(graph: TransferGraph, value: Value) -> str:
    if value.trigger:
        return "start"
    for step in graph.segments[value.producer].instructions:
        if value.name in step.results:
            return str(step)
    return value.name


def _uses(graph: TransferGraph, value: Value, worker: str) -> list[Use]:
    """The operations of a worker that read a value, in order; for a trigger, the operations that it starts."""
    found = []
    for number in value.consumers:
        segment = graph.segments[number]
        if segment.worker != worker:
            continue
        steps = [step for step in segment.instructions if value.trigger or value.name in names_in((step.args, step.kwargs))]
        found += [Use(number, str(step)) for step in (steps[:1] if value.trigger else steps)]
    if worker == graph.caller and value.name in names_in(graph.output):
        found.append(Use(max(n for n in value.consumers if graph.segments[n].worker == worker), "output"))
    return found
