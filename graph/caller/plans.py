"""The plans of a wrapped model at its caller: set up at every worker when they are new, retired when there are too many."""

from __future__ import annotations

import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ...transport import NotSupported
from ..edges.station import Arrived, Fittings, Offer, Station
from ..plan.analyze import TransferGraph
from ..plan.place import Edge, Placement, control_edges, place
from .stage import Plan


class Ask(Protocol):
    """Calls a method of the ``Host`` at several workers at once and gives their answers; set-up only."""

    def __call__(self, method: str, args: Mapping[str, tuple[Any, ...]], /) -> dict[str, Any]: ...


class Plans:
    """``arrived`` gives what is called when something lands on an edge; ``depth``: forwards that may wait for their backward;
    ``limit``: how many plans are kept; ``staging``, ``reaching``: see ``Placement``. Under the caller's lock."""

    def __init__(
        self,
        station: Station,
        ask: Ask,
        arrived: Callable[[Edge], Arrived],
        *,
        depth: int,
        limit: int,
        staging: bool,
        reaching: frozenset[str],
    ) -> None:
        self.made = 0
        self._station, self._ask, self._arrived = station, ask, arrived
        self._depth, self._limit, self._staging, self._reaching = depth, limit, staging, reaching
        self._kept: OrderedDict[Any, Plan] = OrderedDict()
        self._numbers, self._edge_numbers = itertools.count(1), itertools.count(1)

    def control(self, name: str, parameters: Mapping[str, int]) -> Fittings:
        """The edges of commands and reports, set up at every worker."""
        return self._establish(control_edges(name, dict(parameters), self._edge_numbers))

    def known(self, signature: Any) -> Plan | None:
        """The plan for this signature, if there is one."""
        plan = self._kept.get(signature)
        if plan is not None:
            self._kept.move_to_end(signature)
        return plan

    def make(self, signature: Any, build: Callable[[], TransferGraph], commands: int) -> Plan:
        """A new one, set up at every worker. ``commands``: how many were sent before."""
        self._make_room(commands)
        graph = build()
        try:
            fittings = self._place(graph)
        except NotSupported as error:
            if error.device != "cuda" or not self._reaching:
                raise
            # Whether one process can map another's GPU memory shows when it is tried.
            warnings.warn(f"what lands on accelerators goes by way of host memory: {error.message}", stacklevel=2)
            self._reaching = frozenset()
            fittings = self._place(graph)
        plan = self._kept[signature] = Plan(fittings, self._station.name)
        self.made += 1
        return plan

    def check_kept(self, count: int) -> None:
        """Raise ``NotSupported`` if so many plans cannot be kept at once."""
        if self._limit < count:
            raise NotSupported(f"this needs {count} plans at once, plans={self._limit} are kept", hint="wrap(..., plans=)")

    def keep(self, plans: int) -> None:
        """Keep at least so many plans from now on."""
        self._limit = max(self._limit, plans)

    def placements(self) -> list[Placement]:
        """Of the plans that are kept, the last used last."""
        return [plan.placement for plan in self._kept.values()]

    def notes(self) -> dict[str, str]:
        """As ``Host.notes``, of what this process makes."""
        return {name: note for plan in self._kept.values() for name, note in plan.flow.notes().items()}

    def _there(self, placement: Placement) -> list[str]:
        return [worker for worker in placement.workers if worker != self._station.name]

    def _place(self, graph: TransferGraph) -> Fittings:
        placement = place(graph, next(self._numbers), self._depth, self._edge_numbers)
        placement.staging, placement.reaching = self._staging, self._reaching
        return self._establish(placement)

    def _establish(self, placement: Placement) -> Fittings:
        """Slots everywhere, then everybody learns everybody's addresses; or nothing at all."""
        fittings, offers = self._station.fit(placement, self._arrived)
        there = self._there(placement)
        try:
            offered: dict[str, Offer] = self._ask("offer", dict.fromkeys(there, (placement,)))
            for offer in offered.values():
                offers.add(offer)
            self._ask("connect", dict.fromkeys(there, (placement.number, offers)))
            self._station.connect(fittings, offers)
        except BaseException:
            self._station.remove(fittings, {})
            self._ask("remove", dict.fromkeys(there, (placement.number, {})))
            raise
        return fittings

    def _make_room(self, commands: int) -> None:
        idle = [signature for signature, plan in self._kept.items() if not plan.pending]
        while len(self._kept) >= self._limit and idle:
            plan = self._kept.pop(idle.pop(0))
            there = self._there(plan.placement)
            leased = self._station.retire(plan.fittings)
            for answer in self._ask("retire", dict.fromkeys(there, (plan.placement.number, commands))).values():
                leased.update(answer)
            self._ask("remove", dict.fromkeys(there, (plan.placement.number, leased)))
            self._station.remove(plan.fittings, leased)
