"""Slots in the memory of an accelerator, and the writes into them: the words of ``slot`` and ``outlet``, in order with streams.

Where the consumer computes on an accelerator, and both processes reach its memory (the ``cuda`` device, one host), header and
credits are as ever, and the payload lies there. Invariants:

1. A write waits, on a side stream, for what the sender's current stream had been given when it was sent; its notification comes
   when header and payload are there. So whatever the consumer enqueues afterwards, on any stream, may read it.
2. The credit is a notification behind what was enqueued, on the stream that was current when the slot was opened, until the
   credit was due: the death of the last tensor over the slot says that nothing more will be enqueued that reads it. Who uses
   it on another stream has to have the current one wait for that (``record_stream`` does nothing for memory that is not of
   torch's allocator).
3. Nobody waits: neither for a stream, nor for a copy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .. import transport
from .devices import find, on_streams
from .layout import strides
from .lent import lend
from .place import Edge
from .slot import Inlet, Slot

if TYPE_CHECKING:
    from ..transport import Channel, Device
    from ..transport.cuda import CudaDevice
    from .station import Station


def reaches(device: Device) -> bool:
    """Whether this process can write into accelerators' memory of others on its host."""
    memory = getattr(device, "memory", None)
    return memory is not None and memory.gpu is not None


def direct(channel: Channel) -> bool:
    """Whether accelerators' memory, of this process or its peer, takes part in copies by this channel."""
    # Compiled kernels stand behind it: it is imported by processes that have such a device, and by no others.
    loaded = sys.modules.get(f"{transport.__name__}.cuda_channel")
    return loaded is not None and isinstance(channel, loaded.CudaChannel)


class GpuSlot(Slot):
    """The header in the arena, the payload on the accelerator."""

    __slots__ = ("stream", "there")

    def __init__(self, device: CudaDevice, edge: Edge, freed: Callable[[Slot], None], gpu: torch.device) -> None:
        super().__init__(device, edge, freed, payload=False)
        self.there = device.empty(edge.nbytes, dtype=torch.uint8, device=gpu)
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

    def make_slot(self, station: Station) -> Slot:
        device: Any = self.channel.device
        return GpuSlot(device, self.edge, station.freed, find(self.edge.device))

    def offer(self) -> list[tuple[bytes, int]]:
        """As ever, but with a descriptor of the payload behind that of the header."""
        payloads = [self.channel.device.register(slot.there) for slot in self.slots if isinstance(slot, GpuSlot)]
        return [(head + there.export(), number) for (head, number), there in zip(super().offer(), payloads)]

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

    _numbers: dict[Slot, int]
