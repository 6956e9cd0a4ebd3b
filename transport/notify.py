"""The receiving side of notifications: to count them and to wait for them.

A channel has a record for each notification number (``words/signals``). The sender counts there where it has that memory mapped
(``shm``), else the thread here that reads the stream or polls the queue. Here stands how much of that count was consumed.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import RdmaError, TransferTimeout
from .interrupts import interruptible
from .memory.memory import Memory
from .timeouts import seconds
from .words import kernels, signals
from .words.signals import BELL_BYTES, RECORD_BYTES

ROW_BYTES = 16
MAX_ROWS = (1 << 17) - 1
"""Rows of a poller: 2 MiB of address space. A page of 4 KiB takes memory when the first of its 256 rows is used."""


class Count:
    """How far one notification number of one channel has been consumed. Shared by all expectations on it."""

    __slots__ = ("consumed", "record")

    def __init__(self, record: int) -> None:
        self.record = record
        self.consumed = 0


class Expectation:
    """``count`` notifications of one number. Each ``wait`` consumes that many. Make it once, wait as often as you like.

    Notifications are counted and order-free: those that came before the wait count too. One thread at a time.
    """

    __slots__ = ("_arrived", "_channel", "_count", "_record", "count", "imm")

    def __init__(self, channel: Any, imm: int, count: int, state: Count, arrived: Callable[[], None] | None = None) -> None:
        """``arrived`` is called when ``wait`` returns, so that GPUs see the data that came before."""
        self.imm, self.count = imm, count
        self._channel, self._count, self._record, self._arrived = channel, state, state.record, arrived

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        if self._channel.port:
            kernels.progress(self._channel.port)
        return kernels.load(self._record) >= self._count.consumed + self.count

    @interruptible()
    def wait(self, timeout: float | None = None) -> None:
        """Block until ``count`` notifications are here, and consume them. ``timeout`` in seconds; ``None`` waits as long as the
        peer lives.

        Raises ``PeerLost`` when the channel breaks first, ``TransferTimeout`` after ``timeout``. Nothing is consumed in both
        cases.
        """
        state = self._count
        target = state.consumed + self.count
        limit = kernels.SLICE_NS if timeout is None else min(kernels.SLICE_NS, int(seconds(timeout) * 1e9))
        if kernels.wait_count(self._record, target, kernels.SPIN, limit, self._channel.port) != kernels.OK:
            self._wait_on(target, timeout, time.monotonic() - kernels.SLICE_NS / 1e9)
        state.consumed = target
        if self._arrived is not None:
            self._arrived()

    def _wait_on(self, target: int, timeout: float | None, begin: float) -> None:
        """Go on with a wait that has begun then (``time.monotonic``), without consuming anything."""
        channel = self._channel
        if kernels.load(self._record) < target:
            channel.check()

        def late() -> str:
            return f"{target - kernels.load(self._record)} notification(s) {self.imm} did not come"

        peer, device = channel.peer, channel.device.name
        wait_done(
            self._record, target, timeout, channel.port, peer=peer, device=device, begin=begin, look=channel.check, late=late
        )


@interruptible()
def wait_done(
    word: int,
    target: int,
    timeout: float | None,
    port: int,
    *,
    peer: str,
    device: str,
    begin: float | None = None,
    look: Callable[[], None] = lambda: None,
    late: Callable[[], str] = lambda: "the copy was not done",
) -> None:
    """Block until a count has reached ``target``: of ``word``, a record's address. ``begin``: when the wait began
    (``time.monotonic``), if that was not now. ``look()``, after each part of the wait, may raise why it is in vain.
    ``TransferTimeout`` with the text of ``late()``."""
    deadline = None if timeout is None else (time.monotonic() if begin is None else begin) + seconds(timeout)
    while kernels.load(word) < target:
        left = kernels.SLICE_NS if deadline is None else int((deadline - time.monotonic()) * 1e9)
        if left <= 0:
            hint = "the peer may be slow or stuck; a timeout ends the wait, not the copy: channel.abort() does"
            raise TransferTimeout(f"{late()} within {timeout} s", peer=peer, device=device, hint=hint)
        if kernels.wait_count(word, target, kernels.SPIN, min(left, kernels.SLICE_NS), port) == kernels.OK:
            return
        if kernels.load(word) < target:  # what has come counts, whatever happened since
            look()


class Poller:
    """Lets one thread wait for many notifications of many channels, asleep on one bell (a futex word).

    Any thread adds, drops and kicks rows; ``wait`` belongs to one thread at a time. Close a poller before its device.
    """

    KICK = 0
    """The row that ``kick`` announces."""

    def __init__(self, memory: Memory, port: int, arrived: Callable[[], None] | None = None) -> None:
        """``memory``: that of the channels' devices. ``port``: address of the port that a waiting thread polls
        (``Device.port``). ``arrived`` is called before a notification is returned, so that GPUs see the data that came
        before."""
        self._memory, self.port, self._arrived = memory, port, arrived
        self.bell = memory.take_bell()
        self.bell_address = memory.bells + self.bell * BELL_BYTES
        # Private memory: the kick record, and the nil record that a dropped row watches for ever.
        self._private = np.zeros(4, np.int64)
        self._kick, self._nil = self._private.ctypes.data, self._private.ctypes.data + RECORD_BYTES
        kernels.add(self._kick + 8, self.bell << 32)
        # Never moved, because kernels hold its address while they wait. A mapping of its own takes memory only where it was
        # written to; private, because a forked child must not write into ours. Before the rows lies the row at which the next
        # look begins.
        mapped = mmap.mmap(-1, (MAX_ROWS + 1) * ROW_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_NOHUGEPAGE)  # else the first row may take 2 MiB
        table = np.frombuffer(mapped, np.int64).reshape(-1, 2)
        self.table = table[1:]
        self.address = self.table.ctypes.data
        self.table[self.KICK] = (self._kick, 0)
        self.rows = 1
        self._free: list[int] = []
        self._watched: dict[int, tuple[Any, Count]] = {}  # keeps what the table points into
        self._lock = threading.Lock()

    def add(self, channel: Any, imm: int) -> int:
        """Watch notification ``imm`` of ``channel``. Returns the row that ``wait`` will name. Nothing else may consume this
        notification. Raises ``RdmaError`` when ``MAX_ROWS`` rows are in use."""
        count = channel.count(imm)
        with self._lock:
            if not self._free and self.rows == MAX_ROWS:
                raise RdmaError(f"a poller watches at most {MAX_ROWS} notifications")
            row = self._free.pop() if self._free else self.rows
            self._watched[row] = (channel, count)
            self.table[row] = (count.record, count.consumed)
            self.rows = max(self.rows, row + 1)
            kernels.add(count.record + 8, self.bell << 32)
        signals.ring_bell(self.bell_address)
        return row

    def drop(self, row: int) -> None:
        """Stop watching that row. ``add`` may give its number out again. Not while another thread waits."""
        with self._lock:
            _, count = self._watched.pop(row)
            count.consumed = int(self.table[row, 1])
            kernels.add(count.record + 8, -(self.bell << 32))
            self.table[row] = (self._nil, 0)
            self._free.append(row)

    def skip(self, row: int) -> None:
        """Consume what has come for this row without returning it. Only the thread that waits may call this."""
        self.table[row, 1] = kernels.load(int(self.table[row, 0]))

    def unread(self, row: int) -> bool:
        """Whether notifications of this row have come that were not consumed. Any thread."""
        record, seen = self.table[row]
        if self.port:
            kernels.progress(self.port)
        return kernels.load(int(record)) > int(seen)

    def wait(self, timeout: float | None = None) -> tuple[int, int] | None:
        """The next row with news and how many notifications came, or ``None`` after ``timeout`` seconds. They are consumed."""
        deadline = None if timeout is None else time.monotonic() + seconds(timeout)
        while True:
            left = kernels.SLICE_NS if deadline is None else int((deadline - time.monotonic()) * 1e9)
            limit = max(0, min(kernels.SLICE_NS, left))
            found = kernels.wait_any(self.address, self.rows, self.bell_address, 0, 0, kernels.SPIN, limit, self.port)
            if found >= 0:
                return self._found(found)
            if deadline is not None and time.monotonic() >= deadline:
                return None

    def take(self) -> tuple[int, int] | None:
        """As ``wait``, for news that are here already: a microsecond, no system call. Only for the thread that waits."""
        found = kernels.take_any(self.address, self.rows, self.port)
        return self._found(found) if found >= 0 else None

    def _found(self, found: int) -> tuple[int, int]:
        if self._arrived is not None:
            self._arrived()
        return found >> 32, found & 0xFFFFFFFF

    def kick(self) -> None:
        """Make ``wait`` return row ``KICK``. Any thread, any time."""
        kernels.signal(self._kick, self._memory.bells)

    def close(self) -> None:
        self._memory.return_bell(self.bell)
