"""One worker's end of all edges of one model: a poller, the halves of the edges, the credits that are due."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ...transport import GIVEN_UP, PeerLost, Poller, RdmaError, TransferTimeout
from ..outlets.outlet import Outlet
from ..outlets.ports import Ports
from ..outlets.target import Target
from ..plan.place import Edge, Placement
from ..wire.header import Header
from . import gpu_slot
from .dynamic import DynamicInlet, DynamicOutlet
from .slot import Inlet, Slot

if TYPE_CHECKING:
    from ...transport import Channel, Device

Leased = dict[int, list[int]]
"""Slots by edge number and position."""
_kept: list[torch.Tensor] = []
"""Slots of closed models that must not be used again."""
Arrived = Callable[["Inlet", "Slot", Header], None]
_GRACE_S, _REASON_S, _LOOK_S = 0.5, 0.05, 0.002
SLICE = 0.25
"""Seconds between two looks at whether the peers still live (their loss is usually announced before)."""


@dataclass
class Offer:
    """What one worker tells the others about a plan: per edge number the slots of its inlets (descriptor, notification
    number), and the credit numbers of its outlets. Plain data."""

    slots: dict[int, list[tuple[bytes, int]]] = field(default_factory=dict)
    credits: dict[int, list[int]] = field(default_factory=dict)

    def add(self, other: Offer) -> None:
        self.slots.update(other.slots)
        self.credits.update(other.credits)


class Fittings:
    """The inlets and outlets of one plan at one worker, by edge number."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.inlets: dict[int, Inlet] = {}
        self.outlets: dict[int, Outlet] = {}
        self._inlets_of: dict[tuple[str, str], list[Inlet]] = {}
        self._outlets_of: dict[tuple[str, str], list[Outlet]] = {}

    def add_inlet(self, inlet: Inlet) -> None:
        edge = inlet.edge
        self.inlets[edge.number] = inlet
        self._inlets_of.setdefault((edge.kind, edge.value), []).append(inlet)

    def add_outlet(self, outlet: Outlet) -> None:
        edge = outlet.edge
        self.outlets[edge.number] = outlet
        self._outlets_of.setdefault((edge.kind, edge.value), []).append(outlet)

    def leased(self) -> Leased:
        """Which slots at our peers have tensors of ours in them."""
        return {number: leased for number, outlet in self.outlets.items() if (leased := outlet.leased())}

    def inlets_of(self, kind: str, value: str) -> Sequence[Inlet]:
        return self._inlets_of.get((kind, value), ())

    def outlets_of(self, kind: str, value: str) -> Sequence[Outlet]:
        return self._outlets_of.get((kind, value), ())


class Station:
    """``poll`` and everything that sends belong to one thread at a time; set-up and tensors' deaths to any."""

    def __init__(self, name: str, device: Device, channels: Callable[[str], Channel], timeout: float) -> None:
        self.name, self.device, self.timeout = name, device, timeout
        self._channels = channels
        self.peers: dict[str, Channel] = {}
        self.poller: Poller = device.poller()
        self.ports = Ports(self.poller)
        self._freed: deque[Slot | Target] = deque()
        self._inlet_of: dict[Slot, Inlet] = {}
        self._fitted: list[Fittings] = []
        self._kept: list[torch.Tensor] = []
        self._polling = 0
        self.expected: set[str] = set()
        """Workers that are to become peers: their loss is one already."""
        self._lost: dict[str, RdmaError] = {}
        self._lost_since = 0.0
        """When a loss was first seen (``time.monotonic``); 0: none is known."""
        self.staged: set[tuple[str, str]] = set()
        """From whom to which accelerator things go through host memory although that need not be so: it was logged."""
        self.closed = False
        self.copied: Counter[int] = Counter()
        """Bytes that each edge staged, by its number."""
        self.why: dict[int, str] = {}
        """Why it did so last."""
        self.counts: Counter[str] = Counter()
        """``dynamic_reads``, and the bytes that edges staged, by the name of what crosses: ``bytes_staged[NAME]``."""

    def channel(self, worker: str) -> Channel:
        if worker not in self.peers:
            self.peers[worker] = self._channels(worker)
        return self.peers[worker]

    def count_staged(self, edge: Edge, nbytes: int, why: str) -> None:
        """Payload of an edge was copied besides the transfer itself."""
        self.device.count_staged(nbytes)
        self.counts[f"bytes_staged[{edge.value}]"] += nbytes
        self.copied[edge.number] += nbytes
        self.why[edge.number] = why

    def staged_by_edge(self) -> dict[int, tuple[int, str]]:
        """Bytes that were staged here, and why, by the number of the edge."""
        return {number: (nbytes, self.why[number]) for number, nbytes in self.copied.items()}

    # -- set-up

    def fit(self, placement: Placement, arrived: Callable[[Edge], Arrived]) -> tuple[Fittings, Offer]:
        """Make this worker's halves of all edges of a plan. Nothing may be sent before ``connect``."""
        fittings, offer = Fittings(placement), Offer()
        with self.naming():
            for edge in placement.edges:
                if edge.target == self.name:
                    heard = arrived(edge)
                    inlet = gpu_slot.inlet(self, edge, placement, heard) if edge.static else DynamicInlet(self, edge, heard)
                    for slot in inlet.slots:
                        self._inlet_of[slot] = inlet
                    fittings.add_inlet(inlet)
                    offer.slots[edge.number] = inlet.offer()
                elif edge.source == self.name:
                    outlet = (Outlet if edge.static else DynamicOutlet)(self, edge, placement.staging)
                    fittings.add_outlet(outlet)
                    offer.credits[edge.number] = outlet.numbers
        self._fitted.append(fittings)
        return fittings, offer

    def connect(self, fittings: Fittings, offers: Offer) -> None:
        """``offers`` has those of all workers."""
        with self.naming():
            for number, inlet in fittings.inlets.items():
                inlet.connect(offers.credits[number])
            for number, outlet in fittings.outlets.items():
                outlet.connect(offers.slots[number])

    def retire(self, fittings: Fittings) -> Leased:
        """First half of the end of a plan: nothing is sent any more, and all that was sent has arrived. Else a credit that is
        still under way when the number has been given to the next plan would count for that. Returns which slots at our peers
        still have tensors of ours in them."""
        for inlet in fittings.inlets.values():
            inlet.close()
        with self.naming():
            for channel in {*(i.channel for i in fittings.inlets.values()), *(o.channel for o in fittings.outlets.values())}:
                channel.fence(self.timeout)
        return fittings.leased()

    def remove(self, fittings: Fittings, leased: Leased) -> None:
        """Second half, after every worker has retired it: its numbers are used again, and the memory of its slots but for those
        where tensors of our peers lie (``leased``, of all workers): nobody would tell us of their end."""
        self._fitted.remove(fittings)
        for inlet in fittings.inlets.values():
            inlet.remove()
            self._kept.extend(memory for at in leased.get(inlet.edge.number, ()) for memory in inlet.slots[at].memories)
            for slot, number in zip(inlet.slots, inlet.numbers):
                self._inlet_of.pop(slot, None)
                self.ports.give_back(inlet.channel, number)
        for outlet in fittings.outlets.values():
            for number in outlet.numbers:
                self.ports.give_back(self.channel(outlet.edge.target), number)

    # -- the steady state

    def freed(self, place: Slot | Target) -> None:
        """No tensor here lies in a slot any more, one of ours or one of a peer's. Any thread, any moment: only remembers it."""
        self._freed.append(place)
        if self._polling and self._polling != threading.get_ident() and not self.closed:
            self.poller.kick()

    def settle(self) -> None:
        """Return the credits that are due, and use the slots that became free."""
        while self._freed:
            slot = self._freed.popleft()
            if isinstance(slot, Target):
                slot.outlet.vacated(slot)
                continue
            inlet = self._inlet_of.get(slot)
            if inlet is not None:
                inlet.credit(slot)

    def poll(self, timeout: float) -> bool:
        """Handle everything that has come, or what comes first within ``timeout`` seconds (at most ``SLICE``). Raises
        ``PeerLost`` when a peer is."""
        # Announced before the look at what is due: a tensor that dies afterwards kicks the poller.
        self._polling = threading.get_ident()
        self.settle()
        news = self.poller.wait(min(timeout, SLICE))
        self._polling = 0
        if news is None:
            self.check()
            return False
        self._handle(news)
        self.look()
        return True

    def look(self) -> None:
        """Return the credits that are due, and handle everything that has come. A microsecond or two."""
        self.settle()
        while (news := self.poller.take()) is not None:
            self._handle(news)

    def _handle(self, news: tuple[int, int]) -> None:
        row, count = news
        if row == Poller.KICK:
            self.check()
        else:
            self.ports.handle(row, count)

    def check(self) -> None:
        """Raise ``PeerLost``, with the worker's name, if the connection to any peer broke."""
        first = self._first_lost()
        if first is None:
            return
        worker, error = first
        why = error.message.removeprefix(f"worker {worker} is lost: ").replace(f"worker {worker} cannot", "it cannot", 1)
        if error.status == GIVEN_UP:
            why = why.replace("this worker", self.name)
        text, device = f"worker {worker!r} is lost: {why}", self.device.name
        raise PeerLost(text, peer=worker, device=device, status=error.status, hint=error.hint)

    def blame(self, error: BaseException) -> None:
        """Where a use of the edges failed with ``error``: raise the loss that came first, if it is that of another worker. The
        error of a post names its own peer, which may have left because another one died."""
        if not isinstance(error, PeerLost):
            return
        # Channels know their peer by its address.
        named = next((worker for worker, channel in list(self.peers.items()) if channel.peer == error.peer), error.peer)
        if all(worker != named for worker, _ in self._lost_peers()):
            self.lost(named, error)  # a post finds the end of a connection before the device's thread has heard of it
        try:
            self.check()
        except PeerLost as lost:
            if lost.peer != error.peer:
                raise lost from error

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """In the block, a ``PeerLost`` names the worker that was lost first (``blame``), not the address of a connection."""
        try:
            yield
        except PeerLost as error:
            self.blame(error)
            raise

    def _first_lost(self) -> tuple[str, RdmaError] | None:
        """A worker that leaves because another one died may be heard first, and the reason of either a moment later."""
        while lost := self._lost_peers():
            self._lost_since = self._lost_since or time.monotonic()  # once for each loss, however often it is looked at
            worker, error = min(lost, key=lambda item: item[1].status == "CLOSED")
            waited = time.monotonic() - self._lost_since
            known = error.status != "CLOSED" and (worker in self._lost or waited > _REASON_S)
            if known or waited > _GRACE_S:
                return worker, error
            time.sleep(_LOOK_S)
        self._lost_since = 0.0
        return None

    def _lost_peers(self) -> list[tuple[str, RdmaError]]:
        broken = {worker: channel.error for worker, channel in list(self.peers.items()) if channel.error is not None}
        return list({**broken, **self._lost}.items()) if broken or self._lost else []

    def lost(self, worker: str, error: RdmaError) -> None:
        """Somebody noticed that a worker is gone. Any thread."""
        if (worker in self.peers or worker in self.expected) and not self.closed:
            self._lost[worker] = error
            self.poller.kick()

    def forget(self, worker: str) -> None:
        """A peer that has done its part: its loss is none any more."""
        self.expected.discard(worker)
        self.peers.pop(worker, None)
        self._lost.pop(worker, None)

    def quiet(self) -> None:
        """Return when nothing that was sent is under way any more: what accelerators copy may be, long after it was posted.
        ``TransferTimeout``."""
        for channel in self.peers.values():
            if channel.gpus and channel.error is None:
                try:
                    channel.fence(self.timeout)
                except TransferTimeout:
                    raise
                except RdmaError:
                    pass  # the connection has ended, and what was under way on it

    def leased(self) -> Leased:
        """Which slots at our peers have tensors of ours in them, in all plans."""
        return {number: slots for fittings in self._fitted for number, slots in fittings.leased().items()}

    def leave(self, leased: Leased | None) -> None:
        """The model is closed everywhere. See ``Host.close``."""
        _kept.extend(self._kept)
        for fittings in self._fitted:
            for number, inlet in fittings.inlets.items():
                inlet.remove()
                slots = range(len(inlet.slots)) if leased is None else leased.get(number, ())
                _kept.extend(memory for at in slots for memory in inlet.slots[at].memories)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.poller.close()
