"""What one worker has to do in one plan, looked up by value: worked out once, read in every step."""

from __future__ import annotations

from dataclasses import dataclass

from .dynamic import DynamicOutlet
from .outlet import Outlet
from .place import ACTIVATION, GRADIENT
from .production import MIN_BYTES, Production
from .program import Segment
from .station import Fittings

Source = tuple[int, int]
"""Who contributes to the gradient of a value: (last segment that uses it, gradient edge or 0 for a segment here). Sums are
made in descending order: the way autograd meets the users of a tensor, last one first."""


@dataclass(slots=True)
class Route:
    """One value at one worker."""

    users: list[Segment]
    """Segments of this worker that take it as an input."""
    sends: list[Outlet]
    """Where it goes when it is produced here."""
    producer: Segment | None
    """The segment of this worker that makes it."""
    back: Outlet | None
    """Where its gradient goes when it was produced elsewhere."""
    sources: tuple[Source, ...]
    """Contributions to its gradient that this worker adds up, in order; empty: it needs none."""


class Flow:
    """See the module. ``segments`` are those of this worker, by number; ``backwards`` counts those that gradients come to."""

    def __init__(self, fittings: Fittings, worker: str) -> None:
        graph = fittings.placement.graph
        assert graph is not None
        self.fittings, self.worker, self.graph = fittings, worker, graph
        self.unread = [o for o in fittings.outlets.values() if o.edge.kind == GRADIENT and isinstance(o, DynamicOutlet)]
        """Where gradients of this worker lie until they are read."""
        self.segments = {segment.number: segment for segment in graph.segments if segment.worker == worker}
        self.backwards = sum(segment.backward for segment in self.segments.values())
        self.routes: dict[str, Route] = {}
        self._productions: dict[tuple[int, int, bool], Production | None] = {}
        for name, value in graph.values.items():
            users = [self.segments[number] for number in value.consumers if number in self.segments]
            producer = self.segments.get(value.producer)
            if not users and producer is None:
                continue
            back = fittings.outlets_of(GRADIENT, name)
            local = [(user.number, 0) for user in users if user.backward and value.spec.requires_grad]
            sources = [*local, *(self._remote_sources(name, value.consumers) if producer is not None else [])]
            self.routes[name] = Route(
                users,
                fittings.outlets_of(ACTIVATION, name),
                producer,
                back[0] if back else None,
                tuple(sorted(sources, reverse=True)),
            )

    def _remote_sources(self, name: str, consumers: list[int]) -> list[Source]:
        sources = []
        for number, inlet in self.fittings.inlets.items():
            if (inlet.edge.kind, inlet.edge.value) == (GRADIENT, name):
                users = [at for at in consumers if self.graph.segments[at].worker == inlet.edge.source]
                sources.append((max(users), number))
        return sources

    def production(self, segment: Segment, mode: int, grad: bool) -> Production | None:
        """How this segment makes what it sends under these flags; ``None``: there is nothing worth making in place."""
        key = (segment.number, mode, grad)
        if key not in self._productions:
            outlets = {}
            for name in segment.outputs:
                sends = [outlet for outlet in self.routes[name].sends if outlet.mapped]
                value = self.graph.values[name]
                if sends and sends[0].edge.nbytes >= MIN_BYTES and not value.written and not value.returned:
                    outlets[name] = sends[0]
            self._productions[key] = Production(outlets, modules=True) if outlets else None
        return self._productions[key]

    def notes(self) -> dict[str, str]:
        """Value -> where it is made, or why it is copied (see ``Production``)."""
        return {name: note for made in self._productions.values() if made for name, note in made.notes.items()}

    def close(self) -> None:
        """Leave the modules as they were."""
        for production in self._productions.values():
            if production is not None:
                production.close()

    def source_of(self, name: str, edge: int) -> Source:
        """The contribution that a gradient edge brings."""
        return next(source for source in self.routes[name].sources if source[1] == edge)
