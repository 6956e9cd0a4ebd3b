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

import numpy as np
import torch

from ...transport import ArenaFull, RdmaError
from ...transport.memory.arena import SLOTS
from ..outlets import staging
from ..plan.place import Edge
from ..trace.devices import find
from ..wire import strided
from ..wire.header import GATHERED, HEADER_BYTES, NONE, SEEN, SHARED, STRIDED, Header
from ..wire.layout import strides
from ..wire.tail import Tail, tail_at, tail_bytes

if TYPE_CHECKING:
    from ...transport import Channel, Device, Transfer
    from ..outlets.berth import Berth


class Slot:
    """Header and payload in the arena. ``freed`` is called when the payload is readable by nobody any more: from any thread,
    also from finalizers. Where the edge ends on an accelerator, what landed is copied there, and the slot is free then."""

    __slots__ = (
        "_channel",
        "_freed",
        "_lease",
        "_room",
        "busy",
        "capacity",
        "count_staged",
        "device",
        "edge",
        "gpu",
        "head",
        "memory",
        "next",
        "payload",
        "tail",
        "wanted",
    )

    def __init__(
        self, device: Device, channel: Channel, edge: Edge, freed: Callable[[Slot], None], payload: bool = True
    ) -> None:
        """``channel``: to the sender, who alone may write it. ``payload=False``: it lies elsewhere."""
        self.edge, self.busy, self.device = edge, False, device
        self.gpu = find(edge.device) if edge.device and payload else None
        self._channel, self._freed = channel, freed
        self.count_staged: Callable[[Edge, int, str], None] = lambda edge, nbytes, why: device.count_staged(nbytes)
        self._lease: weakref.ref[memoryview] | None = None
        self.next: torch.Tensor | None = None
        """Larger memory that was offered to the sender, until the first write into it."""
        self.wanted = 0
        """Bytes that a payload with gaps lacked room for."""
        self._use(self._allocate(edge.nbytes) if payload else channel.empty(HEADER_BYTES, dtype=torch.uint8))
        device.arena.note(self.memory, SLOTS)

    def _allocate(self, capacity: int) -> torch.Tensor:
        edge = self.edge
        if not (edge.static and edge.nbytes):
            return self._channel.empty(HEADER_BYTES + capacity, dtype=torch.uint8)
        behind = tail_at(capacity)
        memory = self._channel.empty(HEADER_BYTES + behind + tail_bytes(len(edge.shape), edge.depth), dtype=torch.uint8)
        memory[:HEADER_BYTES] = 0
        Tail(memoryview(memory.numpy())[HEADER_BYTES + behind :], len(edge.shape)).clear()
        return memory

    def _use(self, memory: torch.Tensor) -> None:
        edge, array = self.edge, memory.numpy()
        self.memory, self.next = memory, None
        self.head = memoryview(array[:HEADER_BYTES])
        self.payload = array[HEADER_BYTES : HEADER_BYTES + edge.nbytes]
        room = memory.numel() - HEADER_BYTES
        self.capacity = room
        """Bytes of payload that it has room for, gaps included."""
        self._room, self.tail = array[HEADER_BYTES:], None
        if edge.static and edge.nbytes and room:
            self.capacity = room - tail_bytes(len(edge.shape), edge.depth)
            self._room = array[HEADER_BYTES : HEADER_BYTES + self.capacity]
            self.tail = Tail(memoryview(array)[HEADER_BYTES + self.capacity :], len(edge.shape))

    def grow(self, capacity: int) -> torch.Tensor:
        """Memory with room for gaps, to be used from the sender's first write into it. Raises ``ArenaFull``."""
        self.next = self._allocate(capacity)
        self.device.arena.note(self.next, SLOTS)
        return self.next

    def landed(self) -> Header:
        """What the sender has written, where it has written it."""
        if self.next is not None and Header.read(memoryview(self.next.numpy())[:HEADER_BYTES]).edge:
            self._use(self.next)
        return Header.read(self.head)

    tail: Tail | None

    @property
    def memories(self) -> list[torch.Tensor]:
        """All that the sender writes into."""
        return [self.memory] if self.next is None else [self.memory, self.next]

    def open(self, order: int) -> torch.Tensor:
        """The payload, without a copy; its storage is new and its death frees the slot."""
        edge = self.edge
        count = prod(edge.shape)
        if count == 0:
            self.close()
            return torch.empty(edge.shape, dtype=edge.dtype, device="cpu")
        return self._lend(self.payload, count).as_strided_(edge.shape, strides(edge.shape, order))

    def open_strided(self, flags: int) -> torch.Tensor:
        """As ``open``, with the strides that stand behind the payload. What was ``GATHERED`` gets its gaps by a copy,
        which frees the slot. ``flags``: of the header."""
        edge, size = self.edge, self.edge.dtype.itemsize
        assert self.tail is not None
        given = self.tail.strides()
        if not flags & GATHERED:
            count = strided.checked(edge.shape, given, self.capacity // size)
            return self._lend(self._room, count).as_strided_(edge.shape, given)
        count = strided.checked(edge.shape, given, 1 << 40)
        self.count_staged(edge, edge.nbytes, "its gaps were left out on the way")
        room = torch.empty(count, dtype=edge.dtype, device="cpu")
        strided.lay_out(torch.frombuffer(self.payload, dtype=edge.dtype).view(edge.shape), room, given)
        self.wanted = count * size if flags & SEEN else 0
        self.close()
        return torch.empty(0, dtype=edge.dtype, device="cpu").set_(room.untyped_storage(), 0, edge.shape, given)

    def _lend(self, memory: np.ndarray, count: int) -> torch.Tensor:
        view = memoryview(memory)
        self._lease = weakref.ref(view, lambda _: self.close())
        # In place, no view: an operation may write into this tensor in place, which autograd refuses for some views.
        return torch.frombuffer(view, dtype=self.edge.dtype, count=count)

    def close(self) -> None:
        self._lease = None
        self._freed(self)


class Inlet:
    """The consumer's half of an edge: slots, the notification number of each, and the credits to send back.

    Belongs to the thread of its station, except for the death of tensors.
    """

    def __init__(self, station: Berth, edge: Edge, arrived: Callable[[Inlet, Slot, Header], None]) -> None:
        self.edge, self.arrived, self._station = edge, arrived, station
        self.channel: Channel = station.channel(edge.source)
        self.slots = [self.make_slot(station) for _ in range(edge.depth)]
        for slot in self.slots:
            slot.count_staged = station.count_staged
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
        if slot.wanted > slot.capacity:
            self._grow(slot)
        if slot in self._credits:
            self._credits[slot].post()

    def _grow(self, slot: Slot) -> None:
        """Offer larger slots, by way of one whose credit goes back."""
        wanted, slot.wanted = slot.wanted, 0
        if slot.tail is None or wanted > strided.MOST * self.edge.nbytes:
            return
        if any(other.next is not None for other in self.slots):
            return  # on its way
        try:
            regions = [self._station.device.register(other.grow(wanted)) for other in self.slots]
        except ArenaFull:
            for other in self.slots:
                other.next = None
            return
        self._regions = regions
        slot.tail.move([region.export() for region in regions])

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
            header = slot.landed()
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
    landed = slot.open_strided(header.flags) if header.flags & STRIDED else slot.open(header.order)
    if slot.gpu is None:
        return landed
    slot.count_staged(slot.edge, slot.edge.nbytes, "it goes on to an accelerator")
    return staging.to_gpu(landed, slot.gpu, slot.device)


def shared(slot: Slot, header: Header) -> bool:
    """Whether the sender still reads what ``take`` gave (``header.SHARED``)."""
    return bool(header.flags & SHARED) and slot.gpu is None
