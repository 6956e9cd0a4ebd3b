"""A lane: the connection between two members of an exchange, with a stream of pieces each way (``kernels``)."""

from __future__ import annotations

import numpy as np
import torch

from ..channel import Channel, Mapped
from ..device import Device
from ..region import RemoteRegion
from ..shm.transfer import ShmTransfer
from ..words import kernels as words
from .layout import HEADER

NOTICE_BYTES = 1024
_ARRIVED, _CREDITED, _NOTICED = range(3)
_NUMBERS = 3


class Lane:
    """One end of a lane. ``offer`` tells the peer where it may write; ``open`` takes the peer's offer. The slots, and the
    notice, lie in memory that only the peer of this channel may write. Not thread-safe but for ``notice`` and ``tell``."""

    def __init__(self, device: Device, channel: Channel, piece: int, depth: int, bell: int) -> None:
        """``piece``: bytes of payload in a slot; ``depth``: slots a direction; ``bell``: number of the bell that news ring."""
        self.channel, self.piece, self.depth = channel, piece, depth
        self._device, self._bell = device, bell
        self.stride = HEADER + piece
        self.slots = channel.empty((self.stride * depth + NOTICE_BYTES,), dtype=torch.uint8)
        self.slots[-NOTICE_BYTES:] = 0
        self._first = channel.take_numbers(_NUMBERS)
        self.arrived, self.credited, self._noticed = (channel.record(self._first + number) for number in range(_NUMBERS))
        """Addresses of our records: pieces that came, pieces of ours that were taken, notices that came."""
        for record in (self.arrived, self.credited, self._noticed):
            words.add(record + 8, bell << 32)
        self.closed = False

    def offer(self) -> str:
        return f"{self.channel.device.export(self.slots).hex()} {self._first} {self.piece} {self.depth}"

    def open(self, offer: str) -> None:
        """Take the peer's offer. Raises ``ValueError`` if it does not fit ours, ``RemoteAccessError``, ``PeerLost``."""
        place, first, piece, depth = offer.split()
        if (int(piece), int(depth)) != (self.piece, self.depth):
            raise ValueError(
                f"slots differ: {self.depth} of {self.piece} bytes here, {depth} of {piece} at {self.channel.peer}"
            )
        remote = RemoteRegion.load(bytes.fromhex(place))
        numbers = int(first)
        self.remote, self._theirs = remote, numbers
        self.their_arrived = numbers + _ARRIVED
        self.notify = self.channel.prepare([], notify=numbers + _ARRIVED)
        self.credit = self.channel.prepare([], notify=numbers + _CREDITED)
        self._mapped: Mapped | None = None
        if isinstance(self.notify, ShmTransfer):
            self._mapped = self.channel.map(remote)
        self._texts = self._device.empty((NOTICE_BYTES,), dtype=torch.uint8)

    @property
    def mapped(self) -> int:
        """Address of the peer's slots in this process, 0 if they are not mapped here."""
        return 0 if self._mapped is None else int(np.frombuffer(self._mapped.memory, np.uint8).ctypes.data)

    def tell(self, text: str) -> None:
        """Leave a notice at the peer, the last that counts. Raises ``PeerLost``."""
        data = text.encode()[: NOTICE_BYTES - 1].ljust(NOTICE_BYTES, b"\0")
        self._texts[:] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        at = self.stride * self.depth
        place = self.remote[at : at + NOTICE_BYTES]
        self.channel.memcpy(place, self._texts, notify=self._theirs + _NOTICED).wait(1.0)

    def notice(self) -> str:
        """The peer's notice, empty if there is none."""
        if words.load(self._noticed) == 0:
            return ""
        return bytes(self.slots[-NOTICE_BYTES:].tolist()).rstrip(b"\0").decode(errors="replace")

    def close(self) -> None:
        """Ring the bell no more. The memory goes back with this object."""
        if not self.closed:
            self.closed = True
            for record in (self.arrived, self.credited, self._noticed):
                words.add(record + 8, -(self._bell << 32))
