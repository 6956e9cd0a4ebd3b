"""The control connection to one peer: frames in a ring of the receiver's registered memory, written one-sidedly.

A frame is a header of fixed layout, then opaque bytes, padded to 64. The sender composes it in a local mirror of the ring and
writes it through (``transport.Window``) with notification ``RING``; the number of notifications is the number of frames.
A frame never wraps: ``WRAP`` fills the rest of a round.

Flow control: every frame carries how many ring bytes its sender has consumed from the other direction, ever (``credit``);
the sender may be at most one ring ahead of it, less a reserve that only ``CREDIT`` and ``WRAP`` frames may use. A receiver that
has consumed a quarter of the ring without sending anything sends a ``CREDIT``.

A frame that finds the ring full is queued. The thread that reads the peer's next frames then sends the queue on, in order: so
no thread ever waits for room in a peer's ring, and only ``CREDIT`` overtakes the queue. The memory of the queue is bounded:

* Requests of our own: once they take ``QUEUE_BYTES`` a caller waits (for its own deadline at most, see ``Caller.request``).
  Control messages are not held back; there are as many of them as objects that they are about.
* Answers: beyond ``QUEUE_BYTES`` of them, or a quarter of the arena's limit lent to the peer with them, the link is
  ``crowded``: requests of this peer, and of no other, are then not begun but ``held``. The queue grows only by the answers of
  functions that run already. A peer that reads nothing sees no credit either, so it can send one ring of requests more; one
  that reads slowly may have as many held as it has calls outstanding, and keeps a record of each itself.
* Held requests wait for the peer's reader of rings, or for data of theirs that it sends (``messages``), and for nothing else:
  no function, and no ring of another peer. So two workers that flood each other both go on.

Invariants: (1) bytes ``[written, written + n)`` are free at the peer before they are written: ``written + n - credit <=
size``; (2) frames are read in the order written, by one thread at a time (the holder of the polling role); (3) a frame's
bytes are copied out before its ring space is credited; (4) the queue is empty, or the last one who changed it or the credit
found no room for its head.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from ..message.tensors import Places
from ..transport import RINGS, Channel, Device, PeerLost, Pool, RdmaError, RemoteRegion, Window, broken_by, fresh
from .frames import CONTROL, CREDIT, ERROR, GRADIENTS, NO_PARTS, REQUEST, WRAP, Frame, Parts
from .grants import Grants

RING = 0
RING_BYTES = 1 << 20
_RESERVE = 8192
_EXPLAINED_S = 0.5
CREDIT_DUE = RING_BYTES // 4
MAX_BODY = RING_BYTES // 8
QUEUE_BYTES = 4 << 20
_ENTRY_BYTES = 512
"""The bytes, about, that a queued frame takes besides its content."""
_ALIGN = 64

_HEADER = struct.Struct("<IBBHQQIIII")
_HEADER_BYTES = _HEADER.size


_new_frame = tuple.__new__
_AT_ONCE = 2  # READs of held requests: one is under way while the request of the other begins


Distrust = Callable[["Link", RdmaError], None]
"""Ends the link of a peer that sent something that it had no right to, or whose ring cannot be reached. Does not wait."""


Dropped = Callable[[], None] | None
"""Called if a frame is never sent, because the peer is lost."""


class Queued(NamedTuple):
    """A frame that found no room."""

    frame: tuple[int, int, int, int, Parts]
    nbytes: int
    dropped: Dropped


class Held:
    """The requests (``messages.Fetch``) of one peer that are not begun yet, in order. Thread-safe, never blocks."""

    __slots__ = ("_entries", "_lock", "_under_way", "_unread", "any", "ever", "reading")

    def __init__(self) -> None:
        self._entries: deque[Any] = deque()
        self._unread: deque[Any] = deque()
        self._under_way = 0
        self.reading = 0
        """How many READs are on their way, and so have the memory that they need."""
        self._lock = threading.Lock()
        self.any = False
        """Whether there are some: those that come go behind them."""
        self.ever = 0
        """How many there were."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Any) -> None:
        with self._lock:
            self._entries.append(request)
            if not request.ready:
                self._unread.append(request)
            self.any = True
            self.ever += 1

    def next_to_read(self) -> Any:
        """The next request with data to READ, if its READs may start now; else ``None``. The caller then has to call
        ``over``."""
        with self._lock:
            if not self._unread or self._under_way >= _AT_ONCE:
                return None
            self._under_way += 1
            return self._unread.popleft()

    def over(self) -> None:
        """Note that the READs of a request have ended: its data is here, or never will be."""
        with self._lock:
            self._under_way -= 1

    def reads(self, more: int) -> None:
        """Count a READ that has begun (1), or ended (-1)."""
        with self._lock:
            self.reading += more

    def take(self) -> Any:
        """Take out the first request, if it is ready; else ``None``."""
        with self._lock:
            if not self._entries or not self._entries[0].ready:
                return None
            found = self._entries.popleft()
            self.any = bool(self._entries)
            return found

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._unread.clear()
            self.any = False


class Link:
    """The rings between this worker and one peer. Any thread sends, and never waits for the peer in doing so; one thread at a
    time reads. A link lives as long as its channel."""

    def __init__(self, device: Device, channel: Channel | None, worker: int, pool: Pool) -> None:
        self.worker = worker
        """The number of the peer (see ``members.Record``)."""
        self.name, self.rank = "", 0
        self.row = 0
        """The row of the poller at which it is read, once it is entered (``Links.enter``)."""
        self.settled = False
        """Whether its end has been dealt with."""
        self.lost: RdmaError | None = None
        """The error that ended it, with the peer's name. ``explained`` is set once the final reason is known."""
        self.explained = threading.Event()
        self.goodbye = "", ""
        """The exception that ends the peer's process, as the peer said itself: its type and its text (``losses.own_end``)."""
        self.channel: Channel = channel  # type: ignore[assignment]  # set before use where the hello must come first
        self.pool = pool
        """The channel's pool: memory of ours that only this peer may touch. Frames for the peer are composed there too, as they
        are no secret to it."""
        # Not counted by the arena's limit: a worker whose arena is full can still be reached, and can leave the group.
        rings = device.arena.note(self.pool.set_apart(2 * RING_BYTES), RINGS)
        self._in_tensor, self._out_tensor = rings[:RING_BYTES], rings[RING_BYTES:]
        self._in = memoryview(self._in_tensor.numpy()).cast("B")
        self._out = memoryview(self._out_tensor.numpy()).cast("B")
        self.inbox = device.export(self._in_tensor)
        self.peer_inbox = b""
        self.refuse: Distrust = lambda link, error: None
        """Called, on a thread of its own, if the peer's ring cannot be reached."""
        self._window: Window | None = None
        self._opening = False
        self._lock = threading.RLock()
        self._queue: deque[Queued] = deque()
        self.behind = False
        """Whether frames are queued."""
        self.waiting = 0
        """Bytes of the queued requests, and (``answering``) of all other queued frames."""
        self.answering = 0
        self.queued = 0
        """The number of frames queued so far, and (``dropped``) of those that were not sent because the peer was lost."""
        self.dropped = 0
        self.held = Held()
        """Requests of the peer that are not begun yet: while ``crowded``, and while data of theirs is still to come."""
        self.crowded = False
        self.lent = 0
        """Bytes of results that lie here for the peer to READ."""
        self._lent_limit = device.arena.limit // 4
        self._written = 0
        self._credit = 0
        self.taken = 0
        """The bytes of the peer's frames that we have read, and (``told``) as the peer knows it."""
        self.told = 0
        self.sent = 0
        self.requests = 0
        """The number of users' requests sent so far, and (``answers``) of the peer's answered. A graceful shutdown compares
        them."""
        self.answers = 0
        self.reads = 0
        """The number of messages with large tensors that had to be READ, as no landing place was granted, or none fitted."""
        self.grants = Grants()
        self.places = Places()
        """Landing places at the peer."""

    def count_read(self) -> None:
        with self._lock:
            self.reads += 1

    # -- sending

    def _open(self) -> None:
        """Resolve the peer's ring, which may take an answer of the peer, and send what waits for it."""
        try:
            window = self.channel.window(RemoteRegion.load(self.peer_inbox), self._out_tensor, notify=RING)
        except BaseException as error:
            self.refuse(self, broken_by(error, "finding its ring", peer=self.name, device=self.channel.device.name))
            return
        with self._lock:
            self._window = window
            self._write_on()
        if self.taken - self.told > CREDIT_DUE:
            self.give_credit()

    @property
    def looked_up(self) -> bool:
        """Whether the peer's ring is being found, and frames wait for that."""
        with self._lock:  # what waits is sent before the lock is let go
            return self.behind and self._window is None and self.channel.error is None

    def _open_soon(self) -> None:
        with self._lock:
            if self._opening:
                return
            self._opening = True
        threading.Thread(target=self._open, name=f"rdmarpc-open-{self.name}", daemon=True).start()

    def why(self, error: RdmaError) -> RdmaError:
        """The reason why sending failed with ``error``: what the end of the connection turns out to be, in a moment."""
        self.explained.wait(_EXPLAINED_S)
        return self.lost or error

    def try_send(self, kind: int, call: int, flags: int = 0, tensors: int = 0, parts: Parts = NO_PARTS) -> bool:
        """Send one frame if it can go at once; ``False`` if it has to be queued (``post``). The body is at most ``MAX_BODY``.
        ``PeerLost`` when the connection has ended."""
        function, payload, table, data = parts
        of_function, of_payload, of_table, of_data = len(function), len(payload), len(table), len(data)
        used = _HEADER_BYTES + of_function + of_payload + of_table + of_data
        length = used + _ALIGN - 1 & -_ALIGN
        window = self._window
        if window is None:
            return False
        try:
            with self._lock:
                if self.behind and kind != CREDIT:
                    return False
                at = self._written % RING_BYTES
                room = RING_BYTES - at
                needed = length if length <= room else room + length
                if self._written + needed - self._credit > (RING_BYTES if kind == CREDIT else RING_BYTES - _RESERVE):
                    return False
                told = self.taken
                if length > room:
                    _HEADER.pack_into(self._out, at, room, WRAP, 0, 0, 0, told, 0, 0, 0, 0)
                    if window.put_now(at, _HEADER.size):
                        return False
                    self._written += room
                    at = 0
                header = _HEADER.pack(length, kind, flags, tensors, call, told, of_function, of_payload, of_table, of_data)
                end = at + used - of_data
                self._out[at:end] = b"".join((header, function, payload, table))
                self._out[end : at + used] = data
                if window.put_now(at, length):
                    return False
                self._written += length
                self.told = told
                self.sent += 1
                if not flags & CONTROL:
                    if kind == REQUEST:
                        self.requests += 1
                    elif kind <= ERROR:
                        self.answers += 1
        except RdmaError as error:
            raise self._lost(error) from None
        return True

    def post(
        self, kind: int, call: int, flags: int, tensors: int = 0, parts: Parts = NO_PARTS, dropped: Dropped = None
    ) -> None:
        """Send one frame, now or when the peer has consumed what is before it. Never waits. ``PeerLost`` when the connection
        has ended; ``dropped()`` is called if it ends before the frame was written."""
        frame = kind, call, flags, tensors, parts
        with self._lock:
            if self.try_send(*frame):
                return
            if (error := self.channel.error) is not None:
                raise self._lost(error)
            nbytes = _ENTRY_BYTES + sum(map(len, parts))
            self._queue.append(Queued(frame, nbytes, dropped))
            self._count(kind, nbytes)
            self.queued += 1
            # The reader of credit looks at the queue after it has set the credit, and we the other way round: one of us sees.
            self._write_on()
        if self._window is None:
            self._open_soon()

    def flush(self) -> None:
        """The peer may have made room: write on what is queued."""
        with self._lock:
            self._write_on()

    def _write_on(self) -> None:
        """Send queued frames for as long as the ring has room. Call it with the lock held."""
        queue = self._queue
        self.behind = False
        try:
            while queue and self.try_send(*queue[0].frame):
                sent = queue.popleft()
                self._count(sent.frame[0], -sent.nbytes)
        except PeerLost:
            pass  # the handling of the loss drops the rest
        self.behind = bool(queue)
        self.judge()

    def _count(self, kind: int, nbytes: int) -> None:
        if kind == REQUEST or kind == GRADIENTS:
            self.waiting += nbytes
        else:
            self.answering += nbytes

    def judge(self) -> None:
        """Set ``crowded``, and end it at half of what begins it."""
        with self._lock:
            share = 2 if self.crowded else 1
            self.crowded = self.answering > QUEUE_BYTES // share or self.lent > self._lent_limit // share

    def lend(self, nbytes: int) -> None:
        """Count ``nbytes`` more, or less, of results that lie here for the peer to READ."""
        with self._lock:
            self.lent += nbytes
            self.judge()

    def drop(self) -> None:
        """The connection has ended: forget what was not sent, and what was not begun."""
        with self._lock:
            left, self._queue = self._queue, deque()
            self.behind = self.crowded = False
            self.waiting = self.answering = 0
            self.dropped += len(left)
            self.held.clear()
        for entry in left:
            if entry.dropped is not None:
                entry.dropped()

    def give_credit(self) -> None:
        """Tell the peer how far we have read (once that is ``CREDIT_DUE``), for want of anything else to tell it."""
        if self._window is None:
            self._open_soon()
            return
        with suppress(PeerLost):
            self.try_send(CREDIT, 0)

    def _lost(self, error: RdmaError) -> PeerLost:
        if isinstance(error, PeerLost):
            return fresh(error)
        return PeerLost(f"worker {self.name} is lost: {error.message}", peer=self.name, status=error.status)

    # -- reading

    def read(self) -> Frame | None:
        """The next frame that a notification announced; ``None`` for one that only concerned the ring. Raises ``RdmaError``
        for bytes that are no frame: nothing after them can be trusted."""
        at = self.taken % RING_BYTES
        length, kind, flags, tensors, call, credit, function, payload, table, data = _HEADER.unpack_from(self._in, at)
        used = _HEADER_BYTES + function + payload + table + data
        if not used <= length <= RING_BYTES - at or length % _ALIGN or not REQUEST <= kind <= GRADIENTS:
            raise RdmaError(f"what came is no frame (kind {kind}, {used} of {length} bytes)", peer=self.name)
        self._credit = credit
        if kind == WRAP or kind == CREDIT:
            self.taken += length
            return None
        start, end = at + _HEADER_BYTES, at + used - data
        body, content = bytes(self._in[start:end]), bytearray(self._in[end : at + used])
        self.taken += length
        # Not by name: a call of its own, which costs as much as the rest of this line.
        return _new_frame(Frame, (kind, flags, tensors, call, function, payload, table, body, content))


class Room:
    """Done when a link can queue another request, or has ended."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @property
    def done(self) -> bool:
        return self._link.waiting <= QUEUE_BYTES or self._link.channel.error is not None
