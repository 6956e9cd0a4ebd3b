"""The tasks of one worker in one plan, as lookup tables: computed once, read in every step."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..edges.outlet import Outlet
from ..edges.station import Fittings
from ..plan.analyze import TransferGraph
from ..plan.place import ACTIVATION, GRADIENT
from ..plan.program import Segment
from .production import MIN_BYTES, Production

Source = tuple[int, int]
"""Who contributes to the gradient of a value: (last segment that uses it, gradient edge or 0 for a segment here). Sums are
made in descending order: the way autograd meets the users of a tensor, last one first."""


@dataclass(slots=True)
class Input:
    """A tensor that a segment takes. ``users``: segments of this worker that do; ``watched``: must not be written in place, it
    is used elsewhere too; ``differentiable``: a gradient goes back for it."""

    name: str
    users: int
    watched: bool
    differentiable: bool


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
    missing: int = 0
    gradients_missing: int = 0


@dataclass(slots=True)
class Route:
    """One value at one worker."""

    users: list[Duty]
    """Segments of this worker that take it as an input."""
    sends: list[Outlet]
    """Where it goes when it is produced here."""
    producer: Duty | None
    """The segment of this worker that makes it."""
    back: Outlet | None
    """Where its gradient goes when it was produced elsewhere."""
    sources: tuple[Source, ...]
    """Contributions to its gradient that this worker adds up, in order; empty: it needs none."""


class Flow:
    """See the module. ``duties`` are this worker's segments by level; ``backwards`` counts those that gradients come to.
    ``edges`` gives the source that each gradient edge stands for. ``sink``: the gradients of some segment here go no
    further. ``gpus``: the accelerators on which tensors lie here, by name; their backward runs on threads of the engine's."""

    def __init__(self, fittings: Fittings, worker: str) -> None:
        graph = fittings.placement.graph
        assert graph is not None
        self.fittings, self.worker, self.graph = fittings, worker, graph
        self.unread = [o for o in fittings.outlets.values() if o.edge.kind == GRADIENT]
        """Where gradients of this worker lie until they are read."""
        mine = [segment for segment in graph.segments if segment.worker == worker]
        self.duties = [Duty(at, segment, segment.level) for at, segment in enumerate(mine)]
        of = {duty.segment.number: duty for duty in self.duties}
        self.routes: dict[str, Route] = {}
        self.edges: dict[int, Source] = {}
        self._productions: dict[tuple[int, int, bool], Production | None] = {}
        for name, value in graph.values.items():
            users = [of[number] for number in value.consumers if number in of]
            producer = of.get(value.producer)
            if not users and producer is None:
                continue
            back = fittings.outlets_of(GRADIENT, name)
            local = [(user.segment.number, 0) for user in users if user.segment.backward and value.spec.requires_grad]
            sources = [*local, *(self._remote_sources(name, value.consumers) if producer is not None else [])]
            route = self.routes[name] = Route(
                users,
                fittings.outlets_of(ACTIVATION, name),
                producer,
                back[0] if back else None,
                tuple(sorted(sources, reverse=True)),
            )
            self.edges.update((source[1], source) for source in sources if source[1])
            if producer is not None:
                producer.outputs[name] = route
                producer.gradients_missing += bool(sources)
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
        made = {v.device for v in graph.values.values() if graph.segments[v.producer].worker == worker}
        landing = {v.landing.get(worker, "") for v in graph.values.values()}
        self.gpus = tuple(sorted((made | landing) - {""}))

    def _look_up_inputs(self, duty: Duty) -> None:
        duty.missing = len(duty.segment.inputs)
        for name in duty.segment.inputs:
            value, route = self.graph.values[name], self.routes[name]
            if not value.trigger:
                # What is made here and read here once more lies here only: what its maker still needs of it, autograd checks.
                shared = len(route.users) > 1 or (route.producer is not None and bool(route.sends))
                duty.inputs.append(Input(name, len(route.users), shared, value.spec.requires_grad))

    def _remote_sources(self, name: str, consumers: list[int]) -> list[Source]:
        sources = []
        for number, inlet in self.fittings.inlets.items():
            if (inlet.edge.kind, inlet.edge.value) == (GRADIENT, name):
                users = [at for at in consumers if self.graph.segments[at].worker == inlet.edge.source]
                sources.append((max(users), number))
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
