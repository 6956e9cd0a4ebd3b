"""How a payload with gaps, or with elements that are read more than once, gets into a slot (``wire/strided``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...transport import Channel, Device, RdmaError, RemoteRegion, TransferTimeout
from ..plan.place import Edge
from ..wire.header import GATHERED, SEEN
from ..wire.strided import MOST, flat, landing, lay_out, span
from ..wire.tail import Tail
from .gaps import runs

if TYPE_CHECKING:
    from .prepared import Prepared
    from .staging import Stage

_ASKS = 4
"""How often a slot that is not mapped is READ for a move that has not come."""
UNKNOWN = "memory that the adapter does not know"


def unknown(payload: torch.Tensor, device: Device, channel: Channel) -> bool:
    """Whether the adapter would have to be told of this memory first."""
    if not channel.registered_only:
        return False
    nbytes = span(payload.shape, payload.stride()) * payload.element_size()
    return device.arena.find(payload.data_ptr(), nbytes) is None


class GapWrites:
    """Of one slot. Where it has no room for the gaps, a copy leaves them out, and the consumer may offer larger slots with its
    next credit: ``moved``."""

    __slots__ = ("_asks", "_channel", "_device", "_edge", "_seen", "_stage")

    def __init__(self, device: Device, channel: Channel, edge: Edge, stage: Stage) -> None:
        self._device, self._channel, self._edge, self._stage = device, channel, edge, stage
        self._asks = _ASKS
        self._seen = False
        """Whether what was written said that it lacked room (``header.SEEN``)."""

    def lay_out(self, at: Prepared, payload: torch.Tensor) -> int:
        """One copy into the mapped slot. Returns the flags for the header."""
        assert at.mapped is not None and at.tail is not None
        edge, whole, given = self._edge, flat(payload), landing(self._edge.shape, payload.stride())
        fits = whole is not None or span(edge.shape, given) * edge.dtype.itemsize <= at.capacity
        at.mapped.begin()
        try:
            count = (at.capacity if fits else edge.nbytes) // edge.dtype.itemsize
            room = torch.frombuffer(at.mapped.memory, dtype=edge.dtype, count=count)
            if whole is not None:
                room[: len(whole)].copy_(whole)
            elif fits:
                lay_out(payload, room, given)
            else:
                room.view(edge.shape).copy_(payload)
            at.tail.write_strides(given)
        finally:
            at.mapped.end()
        if fits:
            return 0
        self._seen = True
        return GATHERED | SEEN

    def source(self, payload: torch.Tensor, capacity: int) -> tuple[torch.Tensor, tuple[int, ...], int]:
        """For a slot that is not mapped: what to write instead of the payload (itself, where it can be written from where it
        lies), the strides with which that lands, and flags for the header."""
        edge, size, stage = self._edge, payload.element_size(), self._stage
        given = landing(edge.shape, payload.stride())
        count = span(edge.shape, given)
        if stage.always and (whole := flat(payload)) is not None:
            return stage.overlapping(payload, whole), given, 0
        if stage.always or count * size > capacity:
            self._seen = not stage.always and self._asks > 0 and count * size <= MOST * edge.nbytes
            flags = GATHERED | SEEN if self._seen else GATHERED
            return stage.gathered(payload, "no room for its gaps in the slot"), given, flags
        strange = unknown(payload, self._device, self._channel)
        if strange or runs(edge.shape, payload.stride(), given, size) is None:
            why = UNKNOWN if strange else "short runs between wide gaps"
            return stage.spread(payload, given, count, why), given, 0
        return payload, given, 0

    def moved(self, at: Prepared, timeout: float) -> list[RemoteRegion]:
        """Where all slots of the edge are, if the consumer has said so here, after a payload that lacked room. A slot that is
        not mapped is READ for that."""
        if not self._seen:
            return []
        edge, self._seen = self._edge, False
        if at.tail is not None:
            return at.tail.moved(edge.depth)
        self._asks -= 1
        try:
            memory = self._channel.empty(at.room.nbytes - at.capacity, dtype=torch.uint8)
            self._channel.memcpy(memory, at.room[at.capacity :]).wait(timeout)
        except TransferTimeout:
            raise
        except RdmaError:
            return []  # a connection that has ended is noticed elsewhere
        return Tail(memoryview(memory.numpy()), len(edge.shape)).moved(edge.depth)
