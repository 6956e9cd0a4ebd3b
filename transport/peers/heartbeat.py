"""Signs of life: how a process that no longer runs (stopped, frozen, cut off) is told from one that is merely busy.

Each device has a thread that beats in a kernel without the GIL, so only a process that does not run at all is silent:

* for peers of this host it advances a word that they have mapped;
* into each stream it sends an empty frame at least every quarter of the peer's ``peer_timeout``, or, when a frame is half
  sent, more of that frame;
* from connections that wait for Python to accept them it hangs up, every second: so those who connect for the first time see
  that somebody runs (``reach``).

The device's own thread looks for these signs and adds up a peer's *silence*: each look adds the time since the look before, but
never more than one interval. So a process that was stopped itself, or could not look for long, does not take its peers for
lost when it goes on: it takes as many looks in a row as make up ``peer_timeout``.

A stream is sent on so that these signs get through whatever Python does. Its *pulse* is its row in the table of the device's
heart, of sixteen words, and an array of buffers (``iovec``) beside it. A poster and the heart both send in a kernel without the
GIL, and leave the row in a consistent state. So a thread that needs the GIL back after sending does not keep the heart from
beating. If the socket took half of a frame, the heart pushes the rest, as any bytes are a sign of life.

    +0   lock    FREE (between frames, nothing is left), LEFT (buffers may be left, nobody sends), BUSY (somebody sends), SHUT
    +8   fd      the socket
    +16  owed    bytes of a beat that the socket did not take yet; they go before anything else
    +24  every   nanoseconds between beats
    +32  due     when the next one is due (written by the heart)
    +40  pushed  bytes of the buffers that went out and that the sender was not told of yet
    +48  whole   1: where the buffers end a frame ends
    +56  base    address of the buffers
    +64  a ``struct msghdr``: name, namelen, iov (the first buffer that is not all sent), iovlen, control, controllen, flags

Invariants: (1) all words but ``lock`` are touched only by the thread that changed it from FREE or LEFT to BUSY, or that is the
one sender of a SHUT row; (2) a beat goes out when ``lock`` was FREE, or LEFT with no buffer left and ``whole``: never inside
a frame; (3) buffers are alive until they were reported as sent, or withdrawn; (4) the descriptor is closed after ``lock``
became SHUT, so nothing goes to another socket of the same number. The senders of a stream exclude each other by a lock of its
channel.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ..errors import PeerLost, RdmaError
from ..words import kernels
from ..words.atomics import compare_exchange, errno, fetch_add, futex_wait, load_acquire, now, sched_yield, store_release
from ..words.compiled import compiled
from ..words.symbols import CFunction, i32, i64, inline

ROW_WORDS = 16
MAX_BUFFERS = 512
"""How many buffers one ``Pulse.send`` takes; below IOV_MAX."""
SMALL_BYTES = 4096
"""How many bytes one ``Pulse.send_small`` takes."""
FREE, LEFT, BUSY, SHUT = range(4)
_FLAGS = 0x40 | 0x4000  # MSG_DONTWAIT | MSG_NOSIGNAL
_EINTR, _EAGAIN = 4, 11
_KEEP, _DROP = 0, 1

_send = CFunction("send", i64(i32, i64, i64, i32))
_sendmsg = CFunction("sendmsg", i64(i32, i64, i32))


@inline
def _send_owed(row: int, frame: int, nbytes: int) -> bool:
    """Send what is left of a beat. Whether all of it is out."""
    owed = load_acquire(row + 16)
    sent = _send(i32(load_acquire(row + 8)), frame + nbytes - owed, owed, i32(_FLAGS))
    if sent > 0:
        owed -= sent
        store_release(row + 16, owed)
    return owed == 0


@inline
def _send_some(row: int) -> int:
    """One system call for the buffers. Returns bytes, 0 if there is no room, or a negative errno."""
    sent = _sendmsg(i32(load_acquire(row + 8)), row + 64, i32(_FLAGS))
    if sent < 0:
        code = errno()
        return 0 if code == _EAGAIN or code == _EINTR else -code
    left, at, count = sent, load_acquire(row + 80), load_acquire(row + 88)
    while count and left >= load_acquire(at + 8):
        left -= load_acquire(at + 8)
        at += 16
        count -= 1
    if left:
        store_release(at, load_acquire(at) + left)
        store_release(at + 8, load_acquire(at + 8) - left)
    store_release(row + 80, at)
    store_release(row + 88, count)
    return sent


@compiled(i64(i64, i64, i64, i64))
def beat(row: int, time_now: int, frame: int, nbytes: int) -> int:
    """Serve a row that is due, on the heart's thread: push the rest of a frame, or send the ``nbytes`` of a beat at
    ``frame``."""
    rest = FREE
    if compare_exchange(row, FREE, BUSY) == 0:
        rest = LEFT
        if compare_exchange(row, LEFT, BUSY) == 0:
            return 0
    if load_acquire(row + 16):
        _send_owed(row, frame, nbytes)
    elif rest == LEFT and load_acquire(row + 88):
        sent = _send_some(row)
        if sent > 0:
            store_release(row + 40, load_acquire(row + 40) + sent)
    elif rest == FREE or load_acquire(row + 48):
        store_release(row + 16, nbytes)
        _send_owed(row, frame, nbytes)
        if load_acquire(row + 16) == nbytes:
            store_release(row + 16, 0)  # no room, so the peer has unread bytes of us; or it is gone, which others notice
    store_release(row + 32, time_now + load_acquire(row + 24))
    store_release(row, rest)
    return 1


@compiled(i64(i64, i64, i64, i64, i64, i64, i64))
def push(row: int, count: int, whole: int, room: int, drop: int, frame: int, nbytes: int) -> int:
    """Send up to about ``room`` bytes of the buffers: ``count`` new ones, 0: those that are left. ``drop``: forget them then.
    Returns how many bytes went out since the last return, or a negative errno if the stream is broken."""
    closed = False
    while compare_exchange(row, FREE, BUSY) == 0 and compare_exchange(row, LEFT, BUSY) == 0:
        if load_acquire(row) == SHUT:
            closed = True
            break
        sched_yield()  # the heart makes one system call that does not block
    if count:
        store_release(row + 80, load_acquire(row + 56))
        store_release(row + 88, count)
        store_release(row + 48, whole)
    total = load_acquire(row + 40)
    store_release(row + 40, 0)
    broken = 0
    if load_acquire(row + 16) == 0 or (room > 0 and _send_owed(row, frame, nbytes)):
        while room > 0 and load_acquire(row + 88):
            sent = _send_some(row)
            if sent <= 0:
                broken = sent
                break
            total += sent
            room -= sent
    if broken or (drop and load_acquire(row + 88)):
        store_release(row + 48, 0)
        store_release(row + 88, 0)
    done = load_acquire(row + 88) == 0 and load_acquire(row + 48) and load_acquire(row + 16) == 0
    if not closed:
        store_release(row, FREE if done else LEFT)
    return broken if broken else total


class Pulse:
    """The sending side of one stream, which beats from the moment it is made. Its methods are called under the lock that the
    senders of the stream share.

    ``row``: a row of the heart's table, which belongs to it until ``end``. ``frame``: address and size of the frame of a beat.
    """

    def __init__(self, row: np.ndarray, fd: int, every: float, frame: tuple[int, int], drop: Callable[[], None]) -> None:
        self._buffers = np.zeros((MAX_BUFFERS, 2), np.int64)
        small = np.zeros(SMALL_BYTES, np.uint8)
        self._small, self._small_at = memoryview(small), small.ctypes.data
        self._frame = frame
        self.end = drop
        """Gives the row back. Call it once, after ``close``."""
        self.at = row.ctypes.data
        """The address of the row."""
        row[1:] = 0
        row[1], row[3], row[6], row[7] = fd, int(every * 1e9), 1, self._buffers.ctypes.data
        kernels.store(self.at, FREE)

    def send(self, views: Sequence[bytes | memoryview], whole: bool, room: int) -> int:
        """Send about ``room`` bytes of these buffers, none of them empty, at most ``MAX_BUFFERS``; when those of the
        ``send`` before are out, or withdrawn. ``whole``: a frame ends where they end. Returns as ``resume``."""
        flat = []
        for view in views:
            flat += [np.frombuffer(view, np.uint8).__array_interface__["data"][0], len(view)]
        struct.pack_into(f"<{len(flat)}q", self._buffers, 0, *flat)
        return self._told(push(self.at, len(views), int(whole), room, _KEEP, *self._frame))

    def send_small(self, frames: bytes) -> int:
        """Send these whole frames, at most ``SMALL_BYTES``; when as ``send``. A copy goes out: that costs less than handing
        over the buffers. Returns how many bytes went out; the rest is withdrawn. ``OSError`` when the stream is broken."""
        nbytes = len(frames)
        self._small[:nbytes] = frames
        struct.pack_into("<2q", self._buffers, 0, self._small_at, nbytes)
        sent = self._told(push(self.at, 1, 1, nbytes, _KEEP, *self._frame))
        return sent if sent == nbytes else sent + self.withdraw()

    def resume(self, room: int) -> int:
        """Send more of what is left. Returns the bytes that went out since the last return, by whomever. ``OSError``
        when the stream is broken; then nothing is left."""
        return self._told(push(self.at, 0, 0, room, _KEEP, *self._frame))

    @staticmethod
    def _told(result: int) -> int:
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result

    def withdraw(self) -> int:
        """Take back the unsent buffers: they are neither sent nor read any more. Returns the bytes that went out before. If
        buffers were left, nothing goes out until the next ``send``."""
        return push(self.at, 0, 0, 0, _DROP, *self._frame)

    def close(self) -> None:
        """Stop the beats and drop the unsent buffers, before the socket is closed. ``send`` still works."""
        while not (kernels.swap_if(self.at, FREE, SHUT) or kernels.swap_if(self.at, LEFT, SHUT)):
            if kernels.load(self.at) == SHUT:
                return
            time.sleep(0)


TICK_NS = 250_000_000
MIN_TIMEOUT_S = 1.0
_LEAST_S, _MOST_S = 0.25, 2.5
MAX_PULSES = 4096
_POLLIN = 1
_LATE, _BACKLOG = 4, 128  # ticks in a row in which a connection waits to be accepted; how many may

_poll = CFunction("poll", i32(i64, i64, i32))
_accept = CFunction("accept", i32(i32, i64, i64))
_close = CFunction("close", i32(i32))


@compiled(i64(i64, i64, i64, i64, i64, i64, i64, i64))
def run(word: int, stop: int, table: int, rows: int, frame: int, nbytes: int, tick_ns: int, listener: int) -> int:
    """Beat until ``stop`` is not 0. ``rows``: address of the number of pulses in ``table``; ``frame``: what a beat is;
    ``listener``: address of a ``struct pollfd``."""
    late = 0
    while load_acquire(stop) == 0:
        late = late + 1 if _poll(listener, 1, i32(0)) > 0 else 0
        for _ in range(_BACKLOG if late >= _LATE else 0):
            came = _accept(i32(load_acquire(listener)), 0, 0)
            if came < 0:
                break
            _close(came)
        fetch_add(word, 1)
        time_now = now()
        for number in range(load_acquire(rows)):
            row = table + 8 * ROW_WORDS * number
            if load_acquire(row + 32) <= time_now:
                beat(row, time_now, frame, nbytes)
        futex_wait(stop, 0, tick_ns)
    return 0


def often(patience: float) -> float:
    """The seconds between beats for a peer with this ``peer_timeout``."""
    return min(max(patience / 4, _LEAST_S), _MOST_S)


class Heart:
    """The beating thread of a device. ``word``: address of the word that peers of this host watch, alive until ``stop``.
    ``frame``: what goes into a stream as a beat. ``tick_ns``: how often it looks what is due. ``listener``: the number of one
    that is open until ``stop``."""

    def __init__(self, word: int = 0, frame: bytes = b"", tick_ns: int = TICK_NS, listener: int = -1) -> None:
        self._tick_ns = tick_ns
        self._frame = np.frombuffer(bytearray(frame or b"\0"), np.uint8)
        if listener >= 0:
            os.set_blocking(listener, False)  # Python may be faster
        poll = int.from_bytes(struct.pack("<ihh", listener, _POLLIN, 0), "little")
        self._words = np.array([0, 0, 0, poll], np.uint64)  # stop, rows, a word that nobody watches, the listener
        self._stop, self._rows, spare, self._listener = (self._words.ctypes.data + 8 * at for at in range(4))
        self._word = word or spare
        self._table = np.zeros((MAX_PULSES if frame else 1, ROW_WORDS), np.int64)
        self._unused: list[int] = []
        self._lock = threading.Lock()
        # Where kernels have to be compiled first, its own is there before peers are let in, and look for beats: else its thread
        # would wait for its turn behind all others that are compiled, for longer than peers do.
        run.__self__.load()
        self._thread = threading.Thread(target=self._run, name="rdmarpc-heart", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        table, frame = self._table.ctypes.data, self._frame.ctypes.data
        run(self._word, self._stop, table, self._rows, frame, len(self._frame), self._tick_ns, self._listener)

    def pulse(self, fd: int, every: float) -> Pulse:
        """A pulse for a stream. ``every``: seconds."""
        with self._lock:
            rows = kernels.load(self._rows)
            if not self._unused and rows == len(self._table):
                raise RdmaError(f"a device has at most {MAX_PULSES} streams")
            row = self._unused.pop() if self._unused else rows
            frame = self._frame.ctypes.data, len(self._frame)
            pulse = Pulse(self._table[row], fd, every, frame, partial(self._drop, row))
            kernels.store(self._rows, max(rows, row + 1))
        return pulse

    def _drop(self, row: int) -> None:
        with self._lock:
            self._unused.append(row)

    def stop(self) -> None:
        kernels.store(self._stop, 1)
        kernels.wake(self._stop)
        self._thread.join(2.0)


class Beats:
    """The heart of a peer of this host: ``word`` is the address of the word that it advances. For the one thread that looks."""

    def __init__(self, word: int) -> None:
        self._word, self._seen, self._silence = word, -1, 0.0

    def look(self, seconds: float) -> float:
        """How long (s) it has stood still, as far as looks tell; this one counts for ``seconds``."""
        beats = kernels.load(self._word)
        self._silence = self._silence + seconds if beats == self._seen else 0.0
        self._seen = beats
        return self._silence


class Looks:
    """How long a device's peers have been silent. For the one thread of the device that looks."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.interval = min(1.0, timeout / 4) if timeout else None
        """Seconds between looks; ``None``: never."""
        self._last = time.monotonic()

    def due(self) -> float:
        """The seconds that this look counts for; 0: it is too early, or nobody looks here."""
        if self.interval is None:
            return 0.0
        now_s = time.monotonic()
        passed = now_s - self._last
        if passed < 0.9 * self.interval:
            return 0.0
        self._last = now_s
        return min(passed, self.interval)

    def too_long(self, silence: float) -> bool:
        return silence >= self.timeout

    def text(self) -> str:
        return f"it has not been seen running for {self.timeout:g} s: stopped, frozen or cut off?"


CLOSED, SILENT, BROKEN = range(3)
_GOODBYES = (
    ("CLOSED", "the peer closed the channel"),
    ("GIVEN_UP", "the peer gave this worker up, which had not been seen running for long: it was stopped, frozen or cut off"),
    ("BROKEN", "the peer could not go on with this connection: its log says why"),
)
"""Status and text of what a peer says last, by the number that travels with it."""


def goodbye(number: int, peer: str, device: str) -> PeerLost:
    """The end of a channel whose peer has said so with this number."""
    status, why = _GOODBYES[number if number < len(_GOODBYES) else CLOSED]
    return PeerLost(why, peer=peer, device=device, status=status)
