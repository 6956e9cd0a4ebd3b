"""Signs of life: how a process that no longer runs (stopped, frozen, cut off) is told from one that is merely busy.

Each device has a thread that beats in a kernel without the GIL, so only a process that does not run at all is silent:

* for peers of this host it advances a word that they have mapped;
* into each stream it sends an empty frame at least every quarter of the peer's ``peer_timeout``, or, when a frame is half
  sent, more of that frame (``pulse``);
* from connections that wait for Python to accept them it hangs up, every second: so those who connect for the first time see
  that somebody runs (``reach``).

The device's own thread looks for these signs and adds up a peer's *silence*: each look adds the time since the look before, but
never more than one interval. So a process that was stopped itself, or could not look for long, does not take its peers for
lost when it goes on: it takes as many looks in a row as make up ``peer_timeout``.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from functools import partial

import numpy as np

from ..errors import GIVEN_UP, PeerLost, RdmaError
from ..words import kernels
from ..words.atomics import FUTEX_WAIT, fetch_add, futex, load_acquire, now
from ..words.compiled import compiled
from ..words.symbols import CFunction, i32, i64
from .pulse import ROW_WORDS, Pulse, beat

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
        futex(stop, FUTEX_WAIT, 0, tick_ns)
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
    (GIVEN_UP, "the peer gave this worker up, which had not been seen running for long: it was stopped, frozen or cut off"),
    ("BROKEN", "the peer could not go on with this connection: its log says why"),
)
"""Status and text of what a peer says last, by the number that travels with it."""


def goodbye(number: int, peer: str, device: str) -> PeerLost:
    """The end of a channel whose peer has said so with this number."""
    status, why = _GOODBYES[number if number < len(_GOODBYES) else CLOSED]
    return PeerLost(why, peer=peer, device=device, status=status)
