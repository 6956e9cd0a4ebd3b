"""One slot at the consumer, as the sender sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from ...transport import RemoteRegion
from ..trace.devices import find
from ..wire.header import HEADER_BYTES, SHARED, STRIDED, Header
from . import observer
from .gap_writes import UNKNOWN, GapWrites, unknown
from .lease import Lease
from .prepared import Prepared
from .staging import Stage

if TYPE_CHECKING:
    from ...transport import Channel, Device, Transfer, Work
    from ..plan.place import Edge
    from .gaps import Copies

_STAGED_MOST = 64 << 20
"""Bytes up to which memory is copied rather than registered for one write (as ``verbs`` does)."""


class Sender(Protocol):
    """The part of an ``Outlet`` that its slots use."""

    edge: Edge
    device: Device
    channel: Channel
    timeout: float
    staging: bool
    direct: bool

    def count_staged(self, why: str, /) -> None: ...
    def vacated(self, target: Target, /) -> None: ...


class Target:
    """Belongs to the thread of its outlet.

    A source is let go as soon as it has been written: it may lie in a slot itself, whose credit somebody waits for. ``free``
    takes two things: the consumer's credit, and that no tensor here lies in the slot any more (``reserve``).
    """

    __slots__ = (
        "_at",
        "_bound",
        "_credit",
        "_gaps",
        "_head",
        "_header",
        "_lease",
        "_number",
        "_stage",
        "_work",
        "next",
        "outlet",
        "source",
    )

    def __init__(self, outlet: Sender, head: RemoteRegion, room: RemoteRegion, number: int) -> None:
        """``room``: what is behind the header, or the payload elsewhere."""
        self.outlet = outlet
        device, edge = outlet.device, outlet.edge
        self._header = device.empty(HEADER_BYTES, dtype=torch.uint8)
        self._head = memoryview(self._header.numpy())
        self._number = number
        self._stage = Stage(device, edge, outlet.staging, outlet.count_staged)
        self._gaps = GapWrites(device, outlet.channel, edge, self._stage)
        self._lease = Lease(device, edge.nbytes)
        self._bound: Transfer | Copies | None = None
        """The transfer that has a source."""
        self._work: Work | None = None
        self.source: torch.Tensor | None = None
        """What is being written."""
        self._credit = True
        self.next: tuple[RemoteRegion, RemoteRegion] | None = None
        """Where the slot is from the next write on, if it has moved: head and room."""
        self._at = self._prepared(head, room)
        if edge.nbytes and edge.origin and outlet.direct:
            self._at.from_gpu(find(edge.origin))

    def _prepared(self, head: RemoteRegion, room: RemoteRegion) -> Prepared:
        outlet = self.outlet
        pair = (head, self._header)
        return Prepared(outlet.channel, outlet.device, outlet.edge, pair, room, self._number, outlet.staging)

    def move(self) -> None:
        """The slot is free: use it where it is now."""
        assert self.next is not None
        where, self.next = self.next, None
        self._at = self._prepared(*where)

    def moved(self) -> list[RemoteRegion]:
        """As ``GapWrites.moved``."""
        return self._gaps.moved(self._at, self.outlet.timeout)

    @property
    def free(self) -> bool:
        return self._credit and not self._lease.taken

    @property
    def leased(self) -> bool:
        """As ``Lease.taken``."""
        return self._lease.taken

    @property
    def occupied(self) -> bool:
        """As ``Lease.occupied``."""
        return self._lease.occupied

    @property
    def producible(self) -> bool:
        """Whether payloads can be produced in place."""
        return self._at.mapped is not None or self._at.registers

    def write(self, header: Header, payload: torch.Tensor | None, timeout: float) -> None:
        if self._work is not None:
            self._work.wait(timeout)
        self._credit = False
        if payload is None or payload.numel() == 0:
            header.write(self._head)
            self._work = self._at.bare.post()
        elif header.flags & STRIDED:
            self._write_gaps(header, payload)
        else:
            header.write(self._head)
            self._write_dense(header, payload)

    def _write_dense(self, header: Header, payload: torch.Tensor) -> None:
        outlet, full, here = self.outlet, self._at.full, payload.is_cpu
        if self._stage.always or not (here or outlet.direct):
            payload = self._stage.copy(payload, "it lies on an accelerator")
        elif here and payload.nbytes <= _STAGED_MOST and unknown(payload, outlet.device, outlet.channel):
            payload = self._stage.copy(payload, UNKNOWN)
        elif not here:
            full = self._at.from_gpu(payload.device)
        full.rebind(1, payload)
        self._bound, self.source = full, payload
        seen = observer.current if outlet.direct else None
        self._work = full.post() if seen is None else self._observed(seen, full, header, here)
        self.release()

    def _observed(self, seen: observer.Observer, full: Transfer, header: Header, here: bool) -> Work:
        """Post the write; a copy of an accelerator's, if it is one, is observed. ``here``: the payload lies on the CPU."""
        edge = self.outlet.edge
        gpu = edge.device if here else edge.origin
        if not gpu:
            return full.post()
        with seen.copy(edge, gpu, header.sequence) as copy:
            copy.work = full.post()
        return copy.work

    def _write_gaps(self, header: Header, payload: torch.Tensor) -> None:
        if self._at.mapped is not None:
            flags = self._gaps.lay_out(self._at, payload)
            header._replace(flags=header.flags | flags).write(self._head)
            self._work = self._at.bare.post()
            return
        payload, given, flags = self._gaps.source(payload, self._at.capacity)
        header._replace(flags=header.flags | flags).write(self._head)
        copies = self._at.with_gaps(payload, given)
        self._bound, self.source = copies, payload
        self._work = copies.post(payload)
        self.release()

    def release(self) -> None:
        """Let go of the source, if the write is over."""
        if self._work is not None and self._work.done():
            self._over()

    def _over(self) -> None:
        if self._bound is not None:
            self._bound.unbind(1)
        self._bound = self._work = self.source = None

    def credited(self) -> bool:
        """The consumer lets us use it again. ``False`` if it had never been used."""
        if self._credit:
            return False
        self._credit = True
        if self._work is not None:
            # The consumer has had it, so the write is over; on tcp its answer may come later than the credit, and nobody would
            # look again.
            self._over()
        return True

    # -- production in place

    def reserve(
        self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], died: Callable[[Target], None]
    ) -> torch.Tensor:
        """The slot's payload as a tensor, as ``Lease.take``."""
        return self._lease.take(self._at.mapped, dtype, shape, strides, lambda: died(self))

    def holds(self, payload: torch.Tensor) -> bool:
        """Whether the payload was written here already."""
        return self._lease.holds(payload)

    def announce(self, header: Header) -> None:
        """The payload is in place: say so, or write it from there."""
        self.cancel()
        self._credit = False
        if self._at.mapped is not None:
            header._replace(flags=header.flags | SHARED).write(self._head)
            self._work = self._at.bare.post()
            return
        if self._work is not None:
            self._work.wait(self.outlet.timeout)
        header.write(self._head)
        self._bound, self.source = self._at.full, self._lease.place
        self._bound.rebind(1, self.source)
        self._work = self._bound.post()

    def cancel(self) -> None:
        """Nothing is written here any more."""
        self._lease.stop_writing()

    def vacate(self) -> None:
        """The last tensor over the slot has died."""
        self._lease.end()
