"""A dynamic edge: rank and dtype are fixed, the shape is free. Only its metadata is written; the consumer allocates and READs.

After Xue et al., "Fast Distributed Deep Learning over RDMA" (EuroSys'19), dynamic allocation. Invariants:

1. What is written into a slot has one size for all shapes: header and ``Metadata``, in one copy.
2. From the write until its credit the sender keeps the source: alive by this file, unchanged by the rule of ``Outlet.send``.
   A slot has one source at most, so ``depth`` bounds how many are kept. A gradient that autograd also made some parameter's
   ``grad``, which the next backward accumulates into, is parted from it (``keep_apart``).
3. The consumer READs at most once a write, into memory of its own that nobody else has, and only while it holds the slot:
   so before the credit, and never for a forward that was dropped.
4. The credit goes back when the READ is over, not when the tensor dies: whoever keeps that keeps no slot. So the credit is
   the release of the source, in the same words as on a static edge (``slot``, ``outlet``).
5. A source that the consumer cannot READ where it lies is copied into the arena first, which is counted
   (``bytes_staged``, and by the name of the edge): what lies on an accelerator; on ``tcp`` whatever is not in the arena, on
   ``shm`` only what has gaps.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

import torch

from ...transport import NotSupported, RdmaError, RemoteRegion, TransferTimeout
from ..outlets.outlet import Outlet
from ..plan.place import Edge
from ..trace.sizes import FREE
from ..wire.header import HEADER_BYTES, Header
from ..wire.layout import dense, strides
from ..wire.metadata import Metadata
from .slot import Inlet, Slot

if TYPE_CHECKING:
    from ...transport import Channel, Device, Work
    from ..outlets.berth import Berth


class DynamicSlot(Slot):
    """Header and metadata. ``open`` is the READ; the slot is free again when that is over."""

    __slots__ = ("_station",)

    def __init__(self, station: Berth, channel: Channel, edge: Edge, freed: Callable[[Slot], None]) -> None:
        super().__init__(station.device, channel, edge, freed)
        self._station = station

    def open(self, order: int) -> torch.Tensor:
        """The payload in fresh arena memory, the caller's to keep. Raises ``ArenaFull``, ``PeerLost``, ``TransferTimeout``."""
        station, edge = self._station, self.edge
        try:
            source, shape = Metadata.read(memoryview(self.payload), len(edge.shape))
            count = prod(shape)
            if min(shape) < 0 or count * edge.dtype.itemsize != source.nbytes:
                raise RdmaError(f"{shape} {edge.dtype} is said to have {source.nbytes} bytes")
            flat = station.device.empty(count, dtype=edge.dtype)
            if count:
                station.channel(edge.source).memcpy(flat, source).wait(station.timeout)
                station.counts["dynamic_reads"] += 1
        except RdmaError as error:
            if not isinstance(error, TransferTimeout):
                self.close()  # after a timeout the READ goes on, and needs the source
            why = f"{edge.kind} {edge.value} (dynamic edge {edge.number}): {error.message}"
            raise type(error)(
                why, peer=edge.source, device=station.device.name, status=error.status, hint=error.hint
            ) from error
        self.close()
        station.settle()  # now: the source is waited for
        # ``set_``, not ``view``: an operation may write into this tensor in place, which autograd refuses for some views.
        tensor = torch.empty(0, dtype=edge.dtype, device="cpu")
        return tensor.set_(flat.untyped_storage(), 0, shape, strides(shape, order))


class DynamicInlet(Inlet):
    """The consumer's half."""

    def make_slot(self, station: Berth) -> Slot:
        return DynamicSlot(station, self.channel, self.edge, station.freed)


class DynamicTarget:
    """One slot at the consumer, as the sender sees it; keeps the source until the credit is back. Nothing is produced in it."""

    __slots__ = ("_channel", "_device", "_head", "_metadata", "_transfer", "_work", "free", "source")
    leased = occupied = producible = False
    next = None

    def __init__(self, device: Device, channel: Channel, edge: Edge, remote: RemoteRegion, number: int) -> None:
        words = device.empty(HEADER_BYTES + edge.nbytes, dtype=torch.uint8)
        memory = memoryview(words.numpy())
        self._head, self._metadata = memory[:HEADER_BYTES], memory[HEADER_BYTES:]
        self._transfer = channel.prepare([(remote, words)], notify=number)
        self._device, self._channel = device, channel
        self.source: torch.Tensor | None = None
        self._work: Work | None = None
        self.free = True

    def write(self, header: Header, payload: torch.Tensor | None, timeout: float) -> None:
        if self._work is not None:
            self._work.wait(timeout)
        header.write(self._head)
        if payload is not None:
            found = dense(payload)
            assert found is not None
            Metadata(self._device.lend(found[0], self._channel), tuple(payload.shape)).write(self._metadata)
            self.source = payload
        self.free = False
        self._work = self._transfer.post()

    def release(self) -> None:
        """The source is kept until the credit."""

    def credited(self) -> bool:
        """The consumer has read it. ``False`` if nothing was written."""
        if self.free:
            return False
        self.source, self.free = None, True
        return True


class DynamicOutlet(Outlet):
    """The sender's half."""

    def connect(self, slots: list[tuple[bytes, int]]) -> None:
        for blob, number in slots:
            remote = RemoteRegion.load(blob)
            self._targets.append(DynamicTarget(self.device, self.channel, self.edge, remote, number))

    def _prepare(self, payload: torch.Tensor) -> tuple[torch.Tensor, int]:
        edge, device = self.edge, self.device
        fits = len(payload.shape) == len(edge.shape) and payload.dtype == edge.dtype
        if not fits or any(known not in (FREE, size) for known, size in zip(edge.shape, payload.shape)):
            known = ", ".join("?" if size == FREE else str(size) for size in edge.shape)
            raise NotSupported(
                f"{edge.kind} {edge.value} is {tuple(payload.shape)} {payload.dtype}, but ({known}) {edge.dtype} was captured",
                hint="rank and dtype of what crosses between workers must not depend on data",
            )
        found = dense(payload)
        if found is not None and not self.staging and payload.is_cpu and device.can_lend(found[0], self.channel):
            return payload, found[1]
        nbytes = payload.numel() * edge.dtype.itemsize
        self._station.count_staged(edge, nbytes, "a source that the consumer cannot READ where it lies")
        view, order = found if found is not None else (payload.resolve_conj().resolve_neg(), 0)
        copy = self.channel.empty(view.shape, dtype=edge.dtype).copy_(view)
        return copy.as_strided(payload.shape, strides(tuple(payload.shape), order)), order
