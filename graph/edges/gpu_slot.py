"""Slots in the memory of an accelerator, and the writes into them: the words of ``slot`` and ``outlet``, in order with streams.

Where the consumer computes on an accelerator, and its memory can be written into from outside, header and credits are as ever,
and the payload lies there: within a host where both processes reach it (the ``cuda`` device), between hosts where the adapter
does (``verbs``; if it does not, the slot is in host memory, and the reason is logged once). Invariants:

1. A write waits, on a side stream, for what the sender's current stream had been given when it was sent; its notification comes
   when header and payload are there. So whatever the consumer enqueues afterwards, on any stream, may read it. (Where an
   accelerator does not see by itself what an adapter wrote, the poller has it do so before it names the notification.)
2. The credit is a notification behind what was enqueued, on the stream that was current when the slot was opened, until the
   credit was due: the death of the last tensor over the slot says that nothing more will be enqueued that reads it. Who uses
   it on another stream has to have the current one wait for that (``record_stream`` does nothing for memory that is not of
   torch's allocator).
3. Nobody waits: neither for a stream, nor for a copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...transport import RdmaError, Region, RegistrationError
from ...transport.gpu.driver import on_streams
from ..plan.place import Edge
from ..trace.devices import find
from ..wire.layout import strides
from .lent import lend
from .slot import Inlet, Slot

if TYPE_CHECKING:
    from ...transport import Channel, Device
    from ..outlets.berth import Berth
    from ..plan.place import Placement
    from ..wire.header import Header


_log = logging.getLogger("rdmarpc")


def reaches(device: Device) -> bool:
    """Whether this process can write into accelerators' memory of others on its host."""
    memory = getattr(device, "memory", None)
    return memory is not None and memory.gpu is not None


def inlet(station: Berth, edge: Edge, placement: Placement, arrived: Callable[[Inlet, Slot, Header], None]) -> Inlet:
    """The consumer's half of an edge of known shape: on the accelerator where it ends, if it ends on one, and if the sender can
    write into it there."""
    channel = station.channel(edge.source)
    if edge.device and channel.gpus and (edge.source in placement.reaching or not channel.maps_gpus):
        try:
            return GpuInlet(station, edge, arrived)
        except RegistrationError as error:
            if (edge.source, edge.device) not in station.staged:
                station.staged.add((edge.source, edge.device))
                where = f"what comes from {edge.source} to {edge.device} goes through host memory"
                _log.warning("%s: %s", where, error.message)
    return Inlet(station, edge, arrived)


class GpuSlot(Slot):
    """The header in the arena, the payload on the accelerator."""

    __slots__ = ("region", "stream", "there")

    def __init__(self, channel: Channel, edge: Edge, freed: Callable[[Slot], None], gpu: torch.device) -> None:
        """``RegistrationError`` where peers cannot reach memory of this accelerator."""
        device: Any = channel.device
        super().__init__(device, channel, edge, freed, payload=False)
        self.there = device.empty(edge.nbytes, dtype=torch.uint8, device=gpu)
        self.region: Region = device.register(self.there)
        self.stream: torch.Stream | None = None

    @property
    def memories(self) -> list[torch.Tensor]:
        return [self.memory, self.there]

    def open(self, order: int) -> torch.Tensor:
        edge = self.edge
        self.stream = torch.accelerator.current_stream(self.there.device)
        self.there.record_stream(self.stream)  # another thread's has made it
        if edge.nbytes == 0:
            self.close()
            return torch.empty(edge.shape, dtype=edge.dtype, device=self.there.device)
        return lend(self.there, edge.dtype, edge.shape, strides(edge.shape, order), self.close)


class GpuInlet(Inlet):
    """The consumer's half."""

    def __init__(self, station: Berth, edge: Edge, arrived: Callable[[Inlet, Slot, Header], None]) -> None:
        """``RegistrationError``: see ``GpuSlot``."""
        self._made: list[GpuSlot] = []
        try:
            super().__init__(station, edge, arrived)
        except RegistrationError:
            self.remove()
            raise

    def make_slot(self, station: Berth) -> Slot:
        self._made.append(GpuSlot(self.channel, self.edge, station.freed, find(self.edge.device)))
        return self._made[-1]

    def offer(self) -> list[tuple[bytes, int]]:
        """As ever, but with a descriptor of the payload behind that of the header."""
        payloads = [slot.region.export() for slot in self._made]
        return [(head + there, number) for (head, number), there in zip(super().offer(), payloads)]

    def connect(self, credits: list[int]) -> None:
        self._numbers = dict(zip(self.slots, credits))

    def credit(self, slot: Slot) -> None:
        slot.busy = False
        number = self._numbers.get(slot)
        if number is None:
            return
        assert isinstance(slot, GpuSlot)
        stream, slot.stream = slot.stream, None
        if stream is None:  # nobody has read it
            self.channel.notify(number)
            return
        with on_streams((stream,)):
            self.channel.notify_after(number, slot.there.device)

    def close(self) -> None:
        self._numbers.clear()

    def remove(self) -> None:
        for slot in self._made:
            try:
                slot.region.close()
            except RdmaError as error:
                _log.warning("a slot on %s could not be withdrawn: %s", slot.there.device, error.message)

    _numbers: dict[Slot, int]
