"""The tasks of one worker in one plan, as lookup tables: computed once, read in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils import _pytree as pytree

from ..edges.station import Fittings
from ..outlets.outlet import Outlet
from ..plan.analyze import TransferGraph, Value
from ..plan.place import ACTIVATION, GRADIENT
from ..plan.program import Ref, Segment
from ..schedules.rounds import rounds
from ..trace.values import Built
from .production import MIN_BYTES, Production

Source = tuple[int, int]
"""Who contributes to the gradient of a value: (place in ``Value.order``, gradient edge or 0 for a segment here). Sums are made
in that order: the way autograd meets the users of a tensor, last one first. Of a value that is carried: (segment that the sum
goes to, gradient edge), or (segment here that it comes from, 0)."""


@dataclass(slots=True)
class Input:
    """A tensor that a segment takes. ``users``: segments of this worker that do; ``watched``: must not be written in place, it
    is used elsewhere too; ``differentiable``: a gradient goes back for it; ``kept_only``: none does, and there would be one if
    what the segment keeps of it were used later."""

    name: str
    users: int
    watched: bool
    differentiable: bool
    source: Source = (0, 0)
    """What this segment's contribution to its gradient is called."""
    kept_only: bool = False


@dataclass(slots=True, eq=False)
class Duty:
    """One segment at its worker, number ``at`` of those there. ``backward``: gradients come to it. ``missing``: inputs
    (triggers too) before its forward can run, ``gradients_missing``: gradients of its outputs before its backward can."""

    at: int
    segment: Segment
    level: int
    backward: bool = False
    inputs: list[Input] = field(default_factory=list)
    outputs: dict[str, Route] = field(default_factory=dict)
    without_gradient: set[str] = field(default_factory=set)
    """Outputs that had none when they were captured."""
    missing: int = 0
    gradients_missing: int = 0
    shared: list[tuple[str, bool]] = field(default_factory=list)
    """Parameters that other segments here read too, by path, and whether this one's backward is the last of theirs."""
    then: list[Duty] = field(default_factory=list)
    """Segments whose backward waits for this one's."""
    common: frozenset[str] = frozenset()
    """Its inputs and outputs that the caller has too, if something here may keep their memory."""
    written: frozenset[str] = frozenset()
    """Its outputs that others write into, likewise."""


def may_keep(segment: Segment, keeps: Callable[[str], bool]) -> bool:
    """Whether something that a segment runs or reads may keep the memory of a tensor (see ``Flow.find_common``)."""
    return any(i.kind == "attribute" or (i.kind == "module" and keeps(i.target)) for i in segment.instructions)


@dataclass(slots=True)
class Route:
    """One value at one worker."""

    users: list[Duty]
    """Segments of this worker that take it as an input."""
    sends: Sequence[Outlet]
    """Where it goes when it is produced here."""
    producer: Duty | None
    """The segment of this worker that makes it."""
    back: Outlet | None
    """Where its gradient goes when it was produced elsewhere."""
    sources: tuple[Source, ...]
    """Contributions to its gradient that this worker adds up, in order; empty: it needs none."""
    hops: dict[int, Hop] = field(default_factory=dict)
    """Where it is carried: the next one, by segment of this worker."""


@dataclass(slots=True)
class Hop:
    """``to``: the segment that is next, or makes it; ``outlet``: of its worker, unless it is here."""

    to: int
    outlet: Outlet | None


class Flow:
    """See the module. ``duties`` are this worker's segments by level; ``backwards`` counts those that gradients come to.
    ``edges`` gives the source that each gradient edge stands for. ``sink``: the gradients of some segment here go no
    further. ``rounds``: how stages go round the workers. ``gpus``: the accelerators on which tensors lie here, by name; their
    backward runs on threads of the engine's."""

    def __init__(self, fittings: Fittings, worker: str) -> None:
        graph = fittings.placement.graph
        assert graph is not None
        self.fittings, self.worker, self.graph = fittings, worker, graph
        self.unread = [o for o in fittings.outlets.values() if o.edge.kind == GRADIENT]
        """Where gradients of this worker lie until they are read."""
        mine = [segment for segment in graph.segments if segment.worker == worker]
        self.duties = [Duty(at, segment, segment.level) for at, segment in enumerate(mine)]
        of = {duty.segment.number: duty for duty in self.duties}
        self.names = _leaf_names(graph.output)
        """Of the leaves of the result; empty where it is no value."""
        self.numbers = {name: number for number, name in enumerate(graph.inputs)} if graph.part else {}
        """Of the inputs, where one part is called."""
        self.routes: dict[str, Route] = {}
        self.edges: dict[int, Source] = {}
        self._productions: dict[tuple[int, int, bool], Production | None] = {}
        for name, value in graph.values.items():
            users = [of[number] for number in value.consumers if number in of]
            producer = of.get(value.producer)
            if not users and producer is None:
                continue
            back = fittings.outlets_of(GRADIENT, name)
            local = [(value.order.index(user.segment.number), 0) for user in users if user.segment.number in value.order]
            sources = [*local, *(self._remote_sources(name, value.order) if producer is not None else [])]
            if value.carried:
                sources = []
            route = self.routes[name] = Route(
                users,
                fittings.outlets_of(ACTIVATION, name),
                producer,
                back[0] if back else None,
                tuple(sorted(sources)),
            )
            self.edges.update((source[1], source) for source in sources if source[1])
            if producer is not None:
                producer.outputs[name] = route
                if not value.spec.requires_grad:
                    producer.without_gradient.add(name)
                producer.gradients_missing += bool(sources)
            if value.carried:
                self._carry(value, route, of)
        self._share(of)
        for duty in self.duties:
            self._look_up_inputs(duty)
            # The caller's last segment has the loss: its backward needs no gradient from elsewhere.
            last = worker == graph.caller and duty is self.duties[-1]
            duty.backward = duty.segment.backward and (duty.gradients_missing > 0 or last)
        self.triggers = [
            route for name, route in self.routes.items() if graph.values[name].trigger and route.producer is not None
        ]
        self.missing = [duty.missing for duty in self.duties]
        self.gradients_missing = [duty.gradients_missing for duty in self.duties]
        self.backwards = sum(duty.backward for duty in self.duties)
        self.sink = worker in sinks(graph)
        self.rounds = rounds(graph)
        made = {v.device for v in graph.values.values() if graph.segments[v.producer].worker == worker}
        landing = {v.landing.get(worker, "") for v in graph.values.values()}
        self.gpus = tuple(sorted((made | landing) - {""}))

    def find_common(self, keeps: Callable[[str], bool]) -> None:
        """Look up what each segment has in ``common`` with the caller. ``keeps``: whether a module, by path, has code that may
        keep a tensor."""
        for duty in self.duties:
            segment = duty.segment
            if may_keep(segment, keeps):
                duty.common = frozenset(name for name in (*segment.inputs, *segment.outputs) if self._at_caller(name))
                duty.written = frozenset(n for n, route in duty.outputs.items() if route.sends and self.graph.values[n].written)

    def _at_caller(self, name: str) -> bool:
        value = self.graph.values[name]
        return any(self.graph.segments[at].worker == self.graph.caller for at in (value.producer, *value.consumers))

    def _look_up_inputs(self, duty: Duty) -> None:
        duty.missing = len(duty.segment.inputs)
        for name in duty.segment.inputs:
            value, route = self.graph.values[name], self.routes[name]
            if not value.trigger:
                # What is made here and read here once more lies here only: what its maker still needs of it, autograd checks.
                shared = len(route.users) > 1 or (route.producer is not None and bool(route.sends))
                # The capture saw nobody write into it: a part that does so now would write into its worker's copy alone.
                elsewhere = len(value.consumers) > 1 or value.returned or name in self.graph.inputs
                shared = shared or (route.producer is None and elsewhere and not value.written)
                number = duty.segment.number
                gives = number in value.order
                source = (number if value.carried else value.order.index(number), 0) if gives else (0, 0)
                kept_only = value.spec.requires_grad and not gives
                duty.inputs.append(Input(name, len(route.users), shared, gives, source, kept_only))

    def _share(self, of: dict[int, Duty]) -> None:
        """Parameters that several segments here read: their backwards follow each other."""
        for shared in self.graph.shared:
            if shared.worker != self.worker:
                continue
            duties = [of[number] for number in shared.order]
            for at, duty in enumerate(duties):
                duty.shared.append((shared.path, at + 1 == len(duties)))
                if at and duty not in duties[at - 1].then:
                    duties[at - 1].then.append(duty)
                    duty.gradients_missing += 1

    def _carry(self, value: Value, route: Route, of: dict[int, Duty]) -> None:
        """A value whose gradient goes from segment to segment."""
        outlets = {outlet.edge.segment: outlet for outlet in self.fittings.outlets_of(GRADIENT, value.name)}
        for start, end in self.graph.hops(value):
            if start in of:
                route.hops[start] = Hop(end, None if end in of else outlets[end])
            if end in of:
                of[end].gradients_missing += 1
        for inlet in self.fittings.inlets_of(GRADIENT, value.name):
            self.edges[inlet.edge.number] = (inlet.edge.segment, inlet.edge.number)

    def _remote_sources(self, name: str, order: list[int]) -> list[Source]:
        sources = []
        for inlet in self.fittings.inlets_of(GRADIENT, name):
            users = [place for place, at in enumerate(order) if self.graph.segments[at].worker == inlet.edge.source]
            sources.append((min(users), inlet.edge.number))
        return sources

    def production(self, duty: Duty, mode: int, grad: bool) -> Production | None:
        """How this segment makes what it sends under these flags; ``None``: there is nothing worth making in place."""
        key = (duty.at, mode, grad)
        if key not in self._productions:
            outlets = {}
            for name, route in duty.outputs.items():
                sends = [outlet for outlet in route.sends if outlet.producible and name not in self.graph.inputs]
                value = self.graph.values[name]
                if sends and sends[0].edge.nbytes >= MIN_BYTES and not (value.written or value.returned or value.device):
                    outlets[name] = sends[0]
            self._productions[key] = Production(outlets) if outlets else None
        return self._productions[key]

    def notes(self) -> dict[str, str]:
        """Value -> where it is made, or why it is copied (see ``Production``)."""
        found = {name: note for made in self._productions.values() if made for name, note in made.notes.items()}
        for name, route in self.routes.items():
            device = self.graph.values[name].device
            if route.producer is not None and device and any(outlet.edge.nbytes >= MIN_BYTES for outlet in route.sends):
                found[name] = f"copied: it is made on {device}"
        return found


def _leaf_names(output: Any) -> list[str]:
    """In the order of ``trace.values.leaves_of``."""
    names: list[str] = []
    for leaf in pytree.tree_leaves(output, is_leaf=lambda item: isinstance(item, (Ref, Built))):
        names += _leaf_names(leaf.items) if isinstance(leaf, Built) else [leaf.name if isinstance(leaf, Ref) else ""]
    return names


def levels(graph: TransferGraph) -> int:
    """How deep the pipeline is: the number of levels, those of the caller's first and last segments included."""
    return max(segment.level for segment in graph.segments) + 1


def sinks(graph: TransferGraph) -> set[str]:
    """Workers with a segment where a backward ends: it has gone through all segments when it is through these and the
    caller's."""
    found = set()
    for segment in graph.segments:
        values = [graph.values[name] for name in segment.inputs]
        if segment.backward and segment.worker != graph.caller and not any(v.spec.requires_grad for v in values):
            found.add(segment.worker)
    return found
