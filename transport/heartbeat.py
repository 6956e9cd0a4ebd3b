"""Signs of life: how a process that no longer runs (stopped, frozen, cut off) is told from one that is merely busy.

Each device has a thread that beats in a kernel without the GIL, so only a process that does not run at all is silent:

* for peers of this host it advances a word that they have mapped;
* into each stream it sends an empty frame every so often (a quarter of the peer's ``peer_timeout``, at most).

Who looks (the device's own thread) adds up a peer's *silence*: each look adds the time since the look before, but never more
than one interval. So whoever was stopped itself, or could not look for long, blames nobody when it comes back: it takes as many
looks in a row as make up ``peer_timeout``.

A *pulse* is the row of a stream in the sending thread's table, of five words:

    +0  lock    FREE (between frames, nobody sends), TAKEN (a frame is half sent, or not adopted yet), BEATING, CLOSED
    +8  fd      the socket
    +16 owed    bytes of a beat that the socket did not take yet; they go before anything else
    +24 every   nanoseconds between beats
    +32 due     when the next one is due (written by the beating thread)

Invariants: (1) whoever sends on the stream has changed ``lock`` from FREE by ``compare_exchange``, so a beat never lands inside
a frame; (2) ``owed`` is read and written by the holder only; (3) the descriptor is closed after ``lock`` became CLOSED, so no
beat goes to another socket of the same number.
"""

from __future__ import annotations

import threading
import time

import numpy as np
from numba import njit, types
from numba.types import int64 as i64

from . import kernels
from .atomics import FUTEX_WAIT, compare_exchange, fetch_add, futex, load_acquire, now, store_release
from .errors import RdmaError

TICK_NS = 250_000_000
MIN_TIMEOUT_S = 1.0
MAX_PULSES = 4096
_PULSE_WORDS = 5
FREE, TAKEN, BEATING, CLOSED = range(4)
_FLAGS = 0x40 | 0x4000  # MSG_DONTWAIT | MSG_NOSIGNAL

_send = types.ExternalFunction("send", types.intp(types.int32, types.intp, types.intp, types.int32))


@njit(i64(i64, i64, i64, i64, i64, i64, i64), nogil=True, cache=True)
def beat(word: int, stop: int, table: int, rows: int, frame: int, nbytes: int, tick_ns: int) -> int:
    """Beat until ``stop`` is not 0. ``rows``: address of the number of pulses in ``table``; ``frame``: what a beat is."""
    while load_acquire(stop) == 0:
        fetch_add(word, 1)
        time_now = now()
        for row in range(load_acquire(rows)):
            at = table + 40 * row
            if load_acquire(at + 32) > time_now or compare_exchange(at, FREE, BEATING) == 0:
                continue
            owed = load_acquire(at + 16)
            if owed == 0:
                owed = nbytes
            sent = _send(types.int32(load_acquire(at + 8)), frame + nbytes - owed, owed, types.int32(_FLAGS))
            # Nothing went out: there is no room, so the peer has unread bytes of us; or it is gone, which others notice.
            store_release(at + 16, owed - sent if sent > 0 else (owed if owed < nbytes else 0))
            store_release(at + 32, time_now + load_acquire(at + 24))
            store_release(at, FREE)
        futex(stop, FUTEX_WAIT, 0, tick_ns)
    return 0


class Pulse:
    """The beats in one stream. ``take`` and ``free`` by whoever sends, under its own lock."""

    def __init__(self, heart: Heart, row: int, frame: bytes) -> None:
        self._heart, self._row, self._frame = heart, row, frame
        self._at = heart.table.ctypes.data + 8 * _PULSE_WORDS * row

    def take(self) -> bytes:
        """The stream is ours; returned is what has to be sent first."""
        self._change(FREE, TAKEN)
        owed = kernels.load(self._at + 16)
        if not owed:
            return b""
        kernels.store(self._at + 16, 0)
        return self._frame[-owed:]

    def free(self) -> None:
        """All that was begun is sent."""
        kernels.swap_if(self._at, TAKEN, FREE)

    def close(self) -> None:
        """No beat any more; before the socket is closed. ``take`` still tells what is owed."""
        if not self._change(FREE, CLOSED):
            kernels.swap_if(self._at, TAKEN, CLOSED)

    def end(self) -> None:
        """After ``close``: give the row back."""
        self._heart.drop(self._row)

    def _change(self, old: int, new: int) -> bool:
        while not kernels.swap_if(self._at, old, new):
            if kernels.load(self._at) not in (BEATING, old):  # ``old``: a beat ended between the two looks
                return False
            time.sleep(0)
        return True


class Heart:
    """The beating thread of a device. ``word``: address of the word that peers of this host watch, alive until ``stop``.
    ``frame``: what goes into a stream as a beat. ``tick_ns``: how often it looks what is due."""

    def __init__(self, word: int = 0, frame: bytes = b"", tick_ns: int = TICK_NS) -> None:
        self._tick_ns = tick_ns
        self._frame = np.frombuffer(bytearray(frame or b"\0"), np.uint8)
        self._words = np.zeros(3, np.int64)  # stop, rows, a word that nobody watches
        self._stop, self._rows, spare = (self._words.ctypes.data + 8 * at for at in range(3))
        self._word = word or spare
        self.table = np.zeros((MAX_PULSES if frame else 1, _PULSE_WORDS), np.int64)
        self._unused: list[int] = []
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="rdmarpc-heart", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        table, frame = self.table.ctypes.data, self._frame.ctypes.data
        beat(self._word, self._stop, table, self._rows, frame, len(self._frame), self._tick_ns)

    def pulse(self, fd: int, every: float) -> Pulse:
        """A pulse for a stream, TAKEN at first. ``every``: seconds."""
        with self._lock:
            rows = kernels.load(self._rows)
            if not self._unused and rows == len(self.table):
                raise RdmaError(f"a device has at most {MAX_PULSES} streams")
            row = self._unused.pop() if self._unused else rows
            self.table[row] = (TAKEN, fd, 0, int(every * 1e9), 0)
            kernels.store(self._rows, max(rows, row + 1))
        return Pulse(self, row, self._frame.tobytes())

    def drop(self, row: int) -> None:
        with self._lock:
            self._unused.append(row)

    def stop(self) -> None:
        kernels.store(self._stop, 1)
        kernels.wake(self._stop)
        self._thread.join(2.0)


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


GIVEN_UP = "the peer gave this worker up, which had not been seen running for a while: it was stopped, frozen or cut off"
