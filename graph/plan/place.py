"""The placement: one line an edge, which says where its slots are. All workers agree on it before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import torch

from ..trace.sizes import FREE
from ..wire.metadata import metadata_bytes
from .analyze import TransferGraph, Value

ACTIVATION, GRADIENT, COMMAND, REPORT = "activation", "gradient", "command", "report"
CONTROL_DEPTH = 8
REPORT_BYTES = 32 << 10


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor that crosses from ``source`` to ``target`` in every step, into one of ``depth`` slots at the target.

    ``number`` is unique in the model. ``value`` names the tensor in the transfer graph. With a ``FREE`` dimension in
    ``shape`` the edge is dynamic: what lands is metadata, and the consumer reads the tensor (``edges/dynamic``). ``device``:
    where the target wants it, ``origin``: where the source has it (``devices.named``).
    """

    number: int
    kind: str
    value: str
    source: str
    target: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    depth: int
    device: str = ""
    origin: str = ""
    segment: int = -1
    """Of the gradient of a value that is carried: the segment at the target that it goes to."""

    @property
    def static(self) -> bool:
        """Whether the shape is known before the step."""
        return FREE not in self.shape

    @property
    def nbytes(self) -> int:
        """Payload bytes of one slot: of the tensor, or of its metadata if the edge is dynamic."""
        return prod(self.shape) * self.dtype.itemsize if self.static else metadata_bytes(len(self.shape))


@dataclass(slots=True)
class Placement:
    """All edges of one plan (one set of input shapes). ``str`` of it is a table."""

    number: int
    caller: str
    edges: list[Edge]
    graph: TransferGraph | None = None
    workers: list[str] = field(default_factory=list)
    """Everybody who takes part, the caller first."""
    staging: bool = False
    """Whether every payload is copied into a registered buffer before it is sent (the ablation of the paper)."""
    reaching: frozenset[str] = frozenset()
    """Workers that can write into accelerators' memory of others (``edges/gpu_slot``); what the others send lands in host
    memory."""


def place(graph: TransferGraph, number: int, depth: int, numbers: Iterator[int]) -> Placement:
    """Edges for every crossing value and for every gradient that comes back. ``numbers`` gives out edge numbers.

    What lands at the caller has one slot more: the caller's program usually still holds the result of the step before. There
    are two at least: a gradient may stay in one as some parameter's ``.grad`` until the next one comes.
    """
    edges: list[Edge] = []

    def add(kind: str, value: Value, source: str, target: str, origin: str, device: str, segment: int = -1) -> None:
        spec, slots = value.spec, max(depth, 2) + (target == graph.caller)
        about = (value.name, source, target, spec.shape, spec.dtype, slots, device, origin, segment)
        edges.append(Edge(next(numbers), kind, *about))

    def carry(value: Value) -> None:
        home = graph.segments[value.producer].worker
        for start, end in graph.hops(value):
            source, target = graph.segments[start].worker, graph.segments[end].worker
            if source != target:
                origin, device = (value.device if w == home else value.landing.get(w, "") for w in (source, target))
                add(GRADIENT, value, source, target, origin, device, end)

    crossing = graph.crossing()
    for value, worker in crossing:
        home = graph.segments[value.producer].worker
        add(ACTIVATION, value, home, worker, value.device, value.landing.get(worker, ""))
    for name in dict.fromkeys(value.name for value, _ in reversed(crossing)):
        if graph.values[name].carried:
            carry(graph.values[name])
    for value, worker in reversed(crossing):
        if not value.carried and graph.returns_gradient(value, worker):
            home = graph.segments[value.producer].worker
            add(GRADIENT, value, worker, home, value.landing.get(worker, ""), value.device)
    workers = list(dict.fromkeys([graph.caller, *(segment.worker for segment in graph.segments)]))
    return Placement(number, graph.caller, edges, graph, workers)


def control_edges(caller: str, worker_parameters: dict[str, int], numbers: Iterator[int]) -> Placement:
    """The two edges that the caller has with every worker for as long as the model lives: commands there (a payload of
    ``command_bytes``), reports back. ``worker_parameters`` counts the parameters that live at each."""
    edges = []
    for worker, parameters in worker_parameters.items():
        shape = (command_bytes(parameters),)
        edges.append(Edge(next(numbers), COMMAND, "commands", caller, worker, shape, torch.uint8, CONTROL_DEPTH))
        shape = (report_bytes(parameters),)
        edges.append(Edge(next(numbers), REPORT, "reports", worker, caller, shape, torch.uint8, CONTROL_DEPTH))
    return Placement(0, caller, edges, None, [caller, *worker_parameters])


def report_bytes(parameters: int) -> int:
    """Payload of a report: enough for one byte a parameter, and for an error."""
    return REPORT_BYTES + parameters


def command_bytes(parameters: int) -> int:
    """Payload of a command: enough for one byte a parameter and for the numbers of 128 parameter groups."""
    return 8192 + parameters
