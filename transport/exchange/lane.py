"""A lane: the connection between two members of an exchange, with a stream of pieces each way (``kernels``).

A direction has few slots at first. It gets all of them with the first message that has more pieces than it has slots: before
that message is taken, its receiver allocates the slots, and tells the sender where they are; every piece behind that message
goes there. Both ends know the message, and the sender cannot have sent it before some of it was taken. So both change over at
the same piece, and no piece has to say where it is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import numpy as np
import torch

from ..channel import DONE, Channel, Mapped, Work
from ..device import Device
from ..errors import RdmaError, TransferTimeout
from ..memory.arena import size_class
from ..memory.mapping import discard
from ..region import RemoteRegion
from ..shm.transfer import ShmTransfer
from ..words import kernels as words
from .kernels import HEADER

NOTICE_BYTES = 1024
_OFFER_BYTES = 256
_ARRIVED, _CREDITED, _NOTICED, _GROWN, _GONE = range(5)
NUMBERS = 5
"""Notification numbers that a lane takes at either end."""
_LOOK_S, _FENCE_S, _TOLD_S = 0.0002, 1.0, 1.0


class Lane:
    """One end of a lane. ``offer`` tells the peer where it may write; ``open`` takes the peer's offer. The slots, and the
    notice, lie in memory that only the peer of this channel may write. Not thread-safe but for ``notice`` and ``tell``."""

    def __init__(self, device: Device, channel: Channel, piece: int, depths: tuple[int, int], bell: int, first: int) -> None:
        """``piece``: bytes of payload in a slot; ``depths``: slots of a direction at first, and after a large message;
        ``bell``: number of the bell that news ring; ``first``: of ``NUMBERS`` notification numbers that nobody else uses."""
        self.channel, self.piece, (self.few, self.most) = channel, piece, depths
        self.out_depth = self.in_depth = self.few
        self._device, self._bell, self.first = device, bell, first
        self.stride = HEADER + piece
        self._end = self.stride * self.few
        self._base = self._allocate(self._end + NOTICE_BYTES + _OFFER_BYTES)
        """The first slots, then the peer's notice, and where the peer's further slots are."""
        self._base[self._end :] = 0
        self.slots = self._base
        self._further: torch.Tensor | None = None
        self._offered: Work = DONE
        """The copy that tells the peer where its further slots are."""
        records = [channel.record(first + number) for number in range(NUMBERS)]
        self.arrived, self.credited, self._noticed, self._grown, self._gone = records
        """Addresses of our records: pieces that came, pieces of ours that were taken, notices that came; that the peer has more
        slots; that it writes nothing any more."""
        for record in records:
            words.store(record, 0)
            words.add(record + 8, bell << 32)
        self.closed = self._opened = False
        self._views: list[Mapped] = []
        """The peer's first slots, and its further ones."""

    def _allocate(self, nbytes: int) -> torch.Tensor:
        made = self.channel.empty((nbytes,), dtype=torch.uint8)
        self._device.arena.refill(made)  # it may be memory of a lane that has ended
        return made

    def offer(self) -> str:
        return f"{self.channel.device.export(self._base).hex()} {self.first} {self.piece} {self.few} {self.most}"

    def open(self, offer: str) -> None:
        """Take the peer's offer. Raises ``ValueError`` if it does not fit ours, ``RemoteAccessError``, ``PeerLost``."""
        place, first, *sizes = offer.split()
        if tuple(map(int, sizes)) != (self.piece, self.few, self.most):
            theirs = f"{sizes[1]} to {sizes[2]} of {sizes[0]} bytes at {self.channel.peer}"
            raise ValueError(f"slots differ: {self.few} to {self.most} of {self.piece} bytes here, {theirs}")
        self._there, self._theirs = RemoteRegion.load(bytes.fromhex(place)), int(first)
        self.their_arrived = self._theirs + _ARRIVED
        self.notify = self.channel.prepare([], notify=self._theirs + _ARRIVED)
        self.credit = self.channel.prepare([], notify=self._theirs + _CREDITED)
        self._farewell = self.channel.prepare([], notify=self._theirs + _GONE)
        self._texts = self._device.empty((NOTICE_BYTES,), dtype=torch.uint8)
        self._write_to(self._there)
        self._opened = True

    def _write_to(self, remote: RemoteRegion) -> None:
        self.remote = remote
        self._mapped: Mapped | None = self.channel.map(remote) if isinstance(self.notify, ShmTransfer) else None
        if self._mapped is not None:
            self._views.append(self._mapped)

    @property
    def mapped(self) -> int:
        """Address of the peer's slots in this process, 0 if they are not mapped here."""
        return 0 if self._mapped is None else int(np.frombuffer(self._mapped.memory, np.uint8).ctypes.data)

    # -- more slots

    def grow_in(self) -> None:
        """Allocate the slots for what comes behind the next message, and tell the peer. Raises ``ArenaFull``, ``PeerLost``."""
        self._further = self._allocate(self.stride * self.most)
        offer = self.channel.device.export(self._further).hex()
        # Nobody waits for that: a peer that is held up takes it with what comes before it.
        self._offered = self._put(offer, self._end + NOTICE_BYTES, _OFFER_BYTES, _GROWN)

    def change_in(self) -> None:
        """That message was taken."""
        assert self._further is not None
        self.slots, self.in_depth, self._further = self._further, self.most, None

    def change_out(self, limit: float, check: Callable[[], None]) -> None:
        """A message was sent behind which the peer has more slots: wait for their place, ``limit`` seconds at most. Raises
        ``TransferTimeout``, and what ``check`` raises."""
        deadline = time.monotonic() + limit
        while words.load(self._grown) == 0:
            words.progress(self.channel.port)
            check()
            if time.monotonic() > deadline:
                raise TransferTimeout(f"{self.channel.peer} did not say where its slots are within {limit:g} s")
            time.sleep(_LOOK_S)
        text = bytes(self._base[self._end + NOTICE_BYTES :].tolist()).rstrip(b"\0").decode()
        self._write_to(RemoteRegion.load(bytes.fromhex(text)))
        self.out_depth = self.most

    # -- notices

    def tell(self, text: str) -> None:
        """Leave a notice at the peer, the last that counts. Raises ``PeerLost``, ``TransferTimeout`` if it is held up."""
        self._offered.wait(_TOLD_S)
        self._put(text, self._end, NOTICE_BYTES, _NOTICED).wait(_TOLD_S)

    def _put(self, text: str, at: int, nbytes: int, number: int) -> Work:
        data = text.encode()[: nbytes - 1].ljust(nbytes, b"\0")
        self._texts[:nbytes] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        place = self._there[at : at + nbytes]
        return self.channel.memcpy(place, self._texts[:nbytes], notify=self._theirs + number)

    def notice(self) -> str:
        """The peer's notice, empty if there is none."""
        if words.load(self._noticed) == 0:
            return ""
        text = self._base[self._end : self._end + NOTICE_BYTES]
        return bytes(text.tolist()).rstrip(b"\0").decode(errors="replace")

    # -- the end

    def close(self) -> None:
        """Ring the bell no more, and tell the peer that this end writes nothing any more. Our memory and numbers are still the
        peer's until it says so, too (``released``)."""
        if self.closed:
            return
        self.closed = True
        for number in range(NUMBERS):
            words.add(self.channel.record(self.first + number) + 8, -(self._bell << 32))
        if self._opened and self.channel.error is None:
            with contextlib.suppress(RdmaError):
                self.channel.fence(_FENCE_S)
                if self.released:
                    self._discard()
                self._farewell.post()

    def _discard(self) -> None:
        """Give the pages of both ends back, if they are memory of this host: nobody writes them now."""
        if self._mapped is None:
            return
        for tensor in (self._base, self.slots):
            discard(tensor.data_ptr(), size_class(tensor.nbytes))
        for mapped in self._views:
            view = np.frombuffer(mapped.memory, np.uint8)
            discard(int(view.ctypes.data), size_class(view.nbytes))

    @property
    def released(self) -> bool:
        """Whether nobody writes our memory and numbers any more."""
        return words.load(self._gone) > 0 or self.channel.error is not None
