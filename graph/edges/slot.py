"""The landing places of one edge at its consumer, used in place.

Where they may lie on an accelerator, see ``gpu_slot``.

Life of a slot: *free* (its credit is at the sender) -> *landed* (the sender wrote header and payload, its notification
came) -> *open* (the payload is a tensor over a storage of its own) -> the last tensor over that storage dies -> *free*, a
credit goes back. A slot is therefore never overwritten while anybody, here or in an autograd graph, can still read it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

import torch

from ...transport import RdmaError
from ...transport.memory.arena import SLOTS
from ..plan.place import Edge
from ..trace.devices import find
from ..wire.header import HEADER_BYTES, NONE, SHARED, Header
from ..wire.layout import strides
from . import staging

if TYPE_CHECKING:
    from ...transport import Channel, Device, Transfer
    from .berth import Berth


class Slot:
    """Header and payload in the arena. ``freed`` is called when the payload is readable by nobody any more: from any thread,
    also from finalizers. Where the edge ends on an accelerator, what landed is copied there, and the slot is free then."""

    __slots__ = ("_freed", "_lease", "busy", "device", "edge", "gpu", "head", "memory", "payload")

    def __init__(
        self, device: Device, channel: Channel, edge: Edge, freed: Callable[[Slot], None], payload: bool = True
    ) -> None:
        """``channel``: to the sender, who alone may write it. ``payload=False``: it lies elsewhere."""
        self.memory = channel.empty(HEADER_BYTES + (edge.nbytes if payload else 0), dtype=torch.uint8)
        device.arena.note(self.memory, SLOTS)
        array = self.memory.numpy()
        self.head = memoryview(array[:HEADER_BYTES])
        self.payload = array[HEADER_BYTES:]
        self.edge, self.busy, self.device = edge, False, device
        self.gpu = find(edge.device) if edge.device and payload else None
        self._freed = freed
        self._lease: weakref.ref[memoryview] | None = None

    @property
    def memories(self) -> list[torch.Tensor]:
        """All that the sender writes into."""
        return [self.memory]

    def open(self, order: int) -> torch.Tensor:
        """The payload, without a copy; its storage is new and its death frees the slot."""
        edge = self.edge
        count = prod(edge.shape)
        if count == 0:
            self.close()
            return torch.empty(edge.shape, dtype=edge.dtype)
        view = memoryview(self.payload)
        self._lease = weakref.ref(view, lambda _: self.close())
        # In place, no view: an operation may write into this tensor in place, which autograd refuses for some views.
        return torch.frombuffer(view, dtype=edge.dtype, count=count).as_strided_(edge.shape, strides(edge.shape, order))

    def close(self) -> None:
        self._lease = None
        self._freed(self)


class Inlet:
    """The consumer's half of an edge: slots, the notification number of each, and the credits to send back.

    Belongs to the thread of its station, except for the death of tensors.
    """

    def __init__(self, station: Berth, edge: Edge, arrived: Callable[[Inlet, Slot, Header], None]) -> None:
        self.edge, self.arrived = edge, arrived
        self.channel: Channel = station.channel(edge.source)
        self.slots = [self.make_slot(station) for _ in range(edge.depth)]
        self.numbers = [station.ports.take(self.channel, self._landed_in(slot)) for slot in self.slots]
        self._regions = [station.device.register(slot.memory) for slot in self.slots]
        self._credits: dict[Slot, Transfer] = {}

    def make_slot(self, station: Berth) -> Slot:
        return Slot(station.device, self.channel, self.edge, station.freed)

    def offer(self) -> list[tuple[bytes, int]]:
        """For the sender: descriptor and notification number of every slot."""
        return [(region.export(), number) for region, number in zip(self._regions, self.numbers)]

    def connect(self, credits: list[int]) -> None:
        """The sender's notification number of every slot's credit."""
        for slot, number in zip(self.slots, credits):
            self._credits[slot] = self.channel.prepare([], notify=number)

    def credit(self, slot: Slot) -> None:
        """Let the sender use the slot again."""
        slot.busy = False
        if slot in self._credits:
            self._credits[slot].post()

    def spare(self) -> bool:
        """Whether the sender could write right now."""
        return not all(slot.busy for slot in self.slots)

    def close(self) -> None:
        """No credit is sent afterwards. Open tensors keep their memory."""
        self._credits.clear()

    def remove(self) -> None:
        """The sender writes no more: what was registered for it is not any more."""

    def _landed_in(self, slot: Slot) -> Callable[[int], None]:
        def landed(count: int) -> None:
            header = Header.read(slot.head)
            if count != 1 or slot.busy or header.edge != self.edge.number:
                raise RdmaError(
                    f"a write that nobody allowed into edge {self.edge.number} ({self.edge.value}): {count} at once, "
                    f"header of edge {header.edge}, slot {'in use' if slot.busy else 'free'}",
                    peer=self.edge.source,
                )
            slot.busy = True
            self.arrived(self, slot, header)

        return landed


def take(slot: Slot, header: Header) -> torch.Tensor | None:
    """The payload of a landed slot where its edge ends, or ``None`` (and the slot is free again) where there is none. Raises
    ``ArenaFull`` where there is no memory for it, and what ``DynamicSlot.open`` raises."""
    if header.flags & NONE:
        slot.close()
        return None
    landed = slot.open(header.order)
    return landed if slot.gpu is None else staging.to_gpu(landed, slot.gpu, slot.device)


def shared(slot: Slot, header: Header) -> bool:
    """Whether the sender still reads what ``take`` gave (``header.SHARED``)."""
    return bool(header.flags & SHARED) and slot.gpu is None
