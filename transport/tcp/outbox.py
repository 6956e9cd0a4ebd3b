"""The frames of the ``tcp`` device, and those that are still to be sent on one stream.

A frame is a header of fixed layout, little-endian, then ``nbytes`` of payload for WRITE, DATA, REFUSED.

One *post* is the run of frames with one sequence number; the last one carries ``LAST``. The receiver serves posts strictly in
order and answers each one that wants it, so an answer to post ``n`` also answers everything before it:

    sender -> receiver   WRITE    region, key, offset: lay the payload there
                         READ     region, key, offset: answer with DATA (``index`` says which copy of the post this is)
                         CHECK    region, key, offset: may I write there?
                         NOTIFY   nothing but the notification
                         BYE      the channel has ended (``index``: why, ``peers/heartbeat``)
                         BEAT     nothing: a sign of life, outside of all posts (``peers/heartbeat``)
    receiver -> sender   ACK      all posts up to ``seq`` are done
                         DATA     payload of copy ``index`` of post ``seq``; with LAST the post is done
                         REFUSED  post ``seq`` failed (payload: why, UTF-8); nothing was notified

``imm`` is the notification plus one, or 0. It is counted when the frame that carries it is complete. A post with ``LATER`` is
answered by an ACK in front of whatever the receiver sends next; the sender asks (a NOTIFY of no number) if it needs to know
before.

Posting threads send directly from where the tensors lie. What the socket does not take at once is left to the I/O thread, so
two ends that send huge data to each other both progress. Frames stay whole: a sign of life may go out between two frames,
never inside one.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from ..peers.heartbeat import MAX_BUFFERS, SMALL_BYTES, Pulse
from ..peers.service import IN, OUT
from ..words import kernels

WRITE, READ, CHECK, NOTIFY, BYE, ACK, DATA, REFUSED, BEAT = range(1, 10)
LAST, SILENT, LATER = 1, 2, 4  # SILENT: no ACK wanted, a later one will cover it; LATER: an ACK wanted, not by itself

HEADER = struct.Struct("<BBHIQQQQQ")
"""op, flags, index, imm, seq, region, key, offset, nbytes"""
MAX_COPIES = 1 << 16
TURN_BYTES = 4 << 20
"""The bytes that one channel sends or receives before it is another channel's turn."""
MAX_REASON = 1024

Buffers = list[bytes | memoryview]

_PyBUF_WRITE = 0x200
_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.restype = ctypes.py_object
_from_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]


def memory_at(address: int, nbytes: int) -> memoryview:
    """A view of ``nbytes`` of this process's memory. The caller keeps the memory alive for as long as the view."""
    return _from_memory(address, nbytes, _PyBUF_WRITE) if nbytes else memoryview(b"")


class Outbox:
    """The unsent frames of one channel. Callers hold ``lock``, except for ``flush`` and ``read_elsewhere``, which take it."""

    def __init__(self, sock: socket.socket, watch: Callable[[socket.socket, int], None]) -> None:
        """``watch(sock, events)`` tells the I/O thread whether to read what comes (``IN``), and whether to call ``flush`` when
        the socket has room (``OUT``)."""
        self.lock = threading.RLock()
        self._owed = np.zeros(1, np.int64)
        self.owed = self._owed.ctypes.data
        """The address of a word that only grows: the last post of the peer's that the next frame that goes out answers, too."""
        self._acked = 0  # what this word was when it was last sent
        self._sock, self._watch = sock, watch
        self._pulse: Pulse | None = None
        self._queue: deque[tuple[memoryview, int]] = deque()  # with the region number it reads from, or 0
        self._given = 0  # how many buffers at its front the pulse is sending
        self._closed = False
        self.read_by_waiter = False
        """Whether a thread that waits reads the stream, and the I/O thread does not."""

    @property
    def started(self) -> bool:
        return self._pulse is not None

    @property
    def empty(self) -> bool:
        return not self._queue

    def sends_at_once(self, nbytes: int) -> bool:
        """Whether ``send`` would copy frames of so many bytes to the socket, or aside."""
        return not self._queue and self._pulse is not None and nbytes <= SMALL_BYTES - HEADER.size

    def start(self, pulse: Pulse) -> None:
        """Let the I/O thread serve this stream from now on, and send the frames that were posted before."""
        self._pulse = pulse
        self.flush()

    def flush(self) -> None:
        """Send some of what is left over (I/O thread, when the socket has room)."""
        with self.lock:
            self._flush()
            self._await_room()

    def send(self, parts: Buffers, *, region: int = 0, keep: bool = True) -> None:
        """Send, or leave to the I/O thread. ``keep``: the parts stay unchanged until they are answered; otherwise what does
        not go out now is copied. ``region``: where the parts come from, if a peer asked for them."""
        if kernels.load(self.owed) > self._acked:
            parts = [self._answer(), *parts]
        idle = not self._queue and self._pulse is not None
        if idle and sum(map(len, parts)) <= SMALL_BYTES:
            self._send_small(b"".join(parts))
            return
        self._queue.extend((memoryview(part), region) for part in parts if len(part))
        if idle:
            self._flush()
        if not self._queue:
            return
        if not keep:
            # Its owner may overwrite it now: go on with a copy.
            if self._given == len(self._queue):
                self._withdraw()
            if self._queue:
                view, region = self._queue.pop()
                self._queue.append((memoryview(bytes(view)), region))
            if idle:
                self._flush()
        if idle:
            self._await_room()

    def answer(self) -> None:
        """Send the answer that is owed, if there is one."""
        if kernels.load(self.owed) > self._acked:
            self.send([])

    def _answer(self) -> bytes:
        self._acked = kernels.load(self.owed)
        return HEADER.pack(ACK, LAST, 0, 0, self._acked, 0, 0, 0, 0)

    def _send_small(self, frames: bytes) -> None:
        """Send a copy of small frames: nothing is left of others."""
        assert self._pulse is not None
        try:
            sent = self._pulse.send_small(frames)
        except OSError:
            return  # as in ``_flush``
        if sent < len(frames):
            self._queue.append((memoryview(frames)[sent:], 0))
            self._flush()  # so that the heart can push the rest
            self._await_room()

    def _flush(self) -> None:
        """Send as much as the socket takes, and as one channel may send in its turn."""
        assert self._pulse is not None
        room = TURN_BYTES
        try:
            while self._queue and room > 0:
                if self._given:
                    sent = self._pulse.resume(room)
                else:
                    batch = [view for view, _ in itertools.islice(self._queue, MAX_BUFFERS)]
                    self._given = len(batch)
                    sent = self._pulse.send(batch, len(batch) == len(self._queue), room)
                room -= sent
                self._sent(sent)
                if self._given:
                    return
        except OSError:
            # The I/O thread sees the broken connection too, takes what came before, and ends the channel.
            self._queue.clear()
            self._given = 0

    def _sent(self, nbytes: int) -> None:
        while nbytes:
            view, region = self._queue.popleft()
            if len(view) > nbytes:
                self._queue.appendleft((view[nbytes:], region))
                return
            nbytes -= len(view)
            self._given -= 1

    def _withdraw(self) -> None:
        """Take the buffers back from the pulse: no other thread sends from the queue until the next ``_flush``."""
        if self._given and self._pulse is not None:
            self._sent(self._pulse.withdraw())
            self._given = 0

    def _await_room(self) -> None:
        if not self._closed:
            with contextlib.suppress(OSError):  # the I/O thread has let go of it: the peer has hung up
                self._watch(self._sock, (0 if self.read_by_waiter else IN) | (OUT if self._queue else 0))

    def read_elsewhere(self, elsewhere: bool) -> None:
        """Whether another thread reads the stream now, and the I/O thread does not."""
        with self.lock:
            if self.read_by_waiter != elsewhere:
                self.read_by_waiter = elsewhere
                if self._pulse is not None:
                    self._await_room()

    def revoke(self, region: int) -> None:
        """Copy the unsent bytes of a region of ours. The region is not read any more when this returns."""
        self._withdraw()
        for at, (view, source) in enumerate(self._queue):
            if source == region:
                self._queue[at] = (memoryview(bytes(view)), 0)
        if self._pulse is not None:
            self._flush()

    def end(self) -> bool:
        """Drop the unsent frames and stop the heartbeat. Returns whether no frame is half sent, so that a last one can be."""
        if self._pulse is not None:
            self._pulse.close()
            self._withdraw()
        whole = not self._queue
        self._queue.clear()
        return whole

    def close(self) -> None:
        """Stop using the socket. Call it before the socket is closed (I/O thread)."""
        if self._pulse is not None:
            self._pulse.close()
            self._pulse.end()
        self._closed = True
