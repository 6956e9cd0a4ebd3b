"""The control connection to one peer: frames in a ring of the receiver's registered memory, written one-sidedly.

A frame is a header of fixed layout, then opaque bytes, padded to 64. The sender composes it in a local mirror of the ring and
writes it through (``transport.Window``) with notification ``RING``; the number of notifications is the number of frames.
A frame never wraps: ``WRAP`` fills the rest of a round.

Flow control: every frame carries how many ring bytes its sender has consumed from the other direction, ever (``credit``);
the sender may be at most one ring ahead of it, less a reserve that only ``CREDIT`` and ``WRAP`` frames may use. A receiver that
has consumed a quarter of the ring without sending anything sends a ``CREDIT``.

Invariants: (1) bytes ``[written, written + n)`` are free at the peer before they are written: ``written + n - credit <=
size``; (2) frames are read in the order written, by one thread at a time (the holder of the polling role); (3) a frame's
bytes are copied out before its ring space is credited.
"""

from __future__ import annotations

import struct
import threading
from typing import NamedTuple

from .grants import Grants
from .transport import Channel, Device, RdmaError, RemoteRegion, Window
from .transport.arena import Pool

RING = 0
RING_BYTES = 1 << 20
_RESERVE = 8192
_EXPLAINED_S = 0.5
MAX_BODY = RING_BYTES // 8
_ALIGN = 64

# Frame kinds.
REQUEST, RESPONSE, ERROR, RELEASE, FORGO, REFERENCES, ENDED, GOODBYE, CREDIT, WRAP = range(1, 11)

# The one flag that matters here: a message of our own, not of a user.
CONTROL = 32

_HEADER = struct.Struct("<IBBHQQIIII")


class Frame(NamedTuple):
    """What came: ``body`` is the concatenation of function, payload, table and data, of the lengths given."""

    kind: int
    flags: int
    tensors: int
    call: int
    function: int
    payload: int
    table: int
    body: bytes


_new_frame = tuple.__new__


class Link:
    """Any thread sends; one at a time reads. Lives as long as its channel."""

    def __init__(self, device: Device, channel: Channel | None, worker: int, pool: Pool) -> None:
        self.worker = worker
        """The number of the peer (see ``members.Record``)."""
        self.name, self.rank = "", 0
        self.row = 0
        """Of the poller, once entered."""
        self.settled = False
        """Its end has been dealt with."""
        self.lost: RdmaError | None = None
        """Why, by the peer's name, once that is known (``explained``)."""
        self.explained = threading.Event()
        self.goodbye = "", ""
        """What ends the peer's process, as it said itself: the type and the text of an exception (``exits.reason``)."""
        self.channel: Channel = channel  # type: ignore[assignment]  # set before use where the hello must come first
        self.pool = pool
        """Memory of ours that the peer alone may touch: that of the channel. Its frames are no secret to it, so ours are
        composed there too."""
        self._in_tensor = self.pool.run(RING_BYTES)
        self._out_tensor = self.pool.run(RING_BYTES)
        self._in = memoryview(self._in_tensor.numpy()).cast("B")
        self._out = memoryview(self._out_tensor.numpy()).cast("B")
        self.inbox = device.export(self._in_tensor)
        self.peer_inbox = b""
        self._window: Window | None = None
        self._lock = threading.Lock()
        self._written = 0
        self._credit = 0
        self._read = 0
        self._told = 0
        self.sent = 0
        self.requests = 0
        """Requests of users sent, and (``answers``) those of the peer answered, ever: what a graceful shutdown compares."""
        self.answers = 0
        self.reads = 0
        """Messages of which something large had to be READ here: no landing place had been granted, or it did not fit."""
        self.grants = Grants()
        self.places: dict[bytes, list[RemoteRegion]] = {}
        """Landing places at the peer, as parsed by ``tensors.load_places``."""

    def count_read(self) -> None:
        with self._lock:
            self.reads += 1

    def open(self) -> Window:
        """Resolve the peer's ring. Not from a device's thread."""
        self._window = self.channel.window(RemoteRegion.load(self.peer_inbox), self._out_tensor, notify=RING)
        return self._window

    def why(self, error: RdmaError) -> RdmaError:
        """The reason why sending failed with ``error``: what the end of the connection turns out to be, in a moment."""
        self.explained.wait(_EXPLAINED_S)
        return self.lost or error

    def try_send(
        self,
        kind: int,
        call: int,
        flags: int = 0,
        tensors: int = 0,
        function: bytes = b"",
        payload: bytes = b"",
        table: bytes = b"",
        data: bytes = b"",
    ) -> bool:
        """Send one frame if there is room; ``False`` if the peer must consume first. The body is at most ``MAX_BODY``."""
        sizes = len(function), len(payload), len(table), len(data)
        used = _HEADER.size + sum(sizes)
        length = (used + _ALIGN - 1) // _ALIGN * _ALIGN
        window = self._window or self.open()
        with self._lock:
            at = self._written % RING_BYTES
            room = RING_BYTES - at
            needed = length if length <= room else room + length
            if self._written + needed - self._credit > (RING_BYTES if kind == CREDIT else RING_BYTES - _RESERVE):
                return False
            told = self._read
            if length > room:
                _HEADER.pack_into(self._out, at, room, WRAP, 0, 0, 0, told, 0, 0, 0, 0)
                window.put(at, _HEADER.size)
                self._written += room
                at = 0
            _HEADER.pack_into(self._out, at, length, kind, flags, tensors, call, told, *sizes)
            self._out[at + _HEADER.size : at + used] = b"".join((function, payload, table, data))
            window.put(at, length)
            self._written += length
            self._told = told
            self.sent += 1
            if not flags & CONTROL:
                if kind == REQUEST:
                    self.requests += 1
                elif kind <= ERROR:
                    self.answers += 1
        return True

    def read(self) -> Frame | None:
        """The next frame that a notification announced; ``None`` for one that only concerned the ring. Raises ``RdmaError``
        for bytes that are no frame: nothing after them can be trusted."""
        at = self._read % RING_BYTES
        length, kind, flags, tensors, call, credit, function, payload, table, data = _HEADER.unpack_from(self._in, at)
        used = _HEADER.size + function + payload + table + data
        if not used <= length <= RING_BYTES - at or length % _ALIGN or not REQUEST <= kind <= WRAP:
            raise RdmaError(f"what came is no frame (kind {kind}, {used} of {length} bytes)", peer=self.name)
        self._credit = credit
        if kind == WRAP or kind == CREDIT:
            self._read += length
            return None
        start = at + _HEADER.size
        body = bytes(self._in[start : at + used])
        self._read += length
        # Not by name: a call of its own, which costs as much as the rest of this line.
        return _new_frame(Frame, (kind, flags, tensors, call, function, payload, table, body))

    @property
    def owes_credit(self) -> bool:
        """Whether the peer should be told how far we have read, for want of anything else to tell it."""
        return self._read - self._told > RING_BYTES // 4
