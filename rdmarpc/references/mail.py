"""Control messages of references: numbered by the sender, taken once by the receiver, whatever happens in between.

A message is a frame of entries ``(kind, rref, fork)`` under one number. Numbers count from 0 for each pair of sender and
receiver. The receiver keeps a watermark (all below it were taken) and the numbers taken above it, so a message may be delayed,
overtaken and repeated, and its entries still take effect exactly once. The links below neither lose nor repeat frames; the
protocol does not rely on their order, and with this not on their care either. A worker that takes over the rank of another is
another sender and receiver.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable

from ..links.frames import NotTheirs

FORK, ACCEPT, REFUSE, CHILD, DELETE, PROBE, GONE = range(1, 8)
"""Kinds of entries; what they mean is said in ``references/context``."""

_NUMBER = struct.Struct("<Q")
_ENTRY = struct.Struct("<BQQ")
MAX_AHEAD = 1 << 16
"""How many messages of one sender are taken at most while an earlier one of it is missing."""
_BATCH = 1024  # the reader of the rings takes a whole message at once


class Taken:
    """The numbers of one sender's messages that were taken: all below ``watermark``, and those in ``above``."""

    __slots__ = ("above", "watermark")

    def __init__(self) -> None:
        self.watermark = 0
        self.above: set[int] = set()

    def take(self, number: int) -> bool:
        """Take a number; ``False`` if it was taken before. Raises ``NotTheirs`` for a sender that leaves out numbers."""
        if number == self.watermark and not self.above:  # as nearly always
            self.watermark += 1
            return True
        if number < self.watermark or number in self.above:
            return False
        if len(self.above) >= MAX_AHEAD:
            raise NotTheirs(f"message {self.watermark} about references never came, but {MAX_AHEAD} after it")
        self.above.add(number)
        while self.watermark in self.above:
            self.above.discard(self.watermark)
            self.watermark += 1
        return True


class Mail:
    """The control messages of one worker, out and in. Thread-safe; never blocks. ``transmit(worker, message)`` carries bytes to
    the ``open`` of another worker, with any delay."""

    def __init__(self, transmit: Callable[[int, bytes], None]) -> None:
        self.transmit = transmit
        self._out: dict[int, deque[bytes]] = {}
        self._numbers: dict[int, itertools.count[int]] = {}
        self._taken: dict[int, Taken] = {}
        self._lost: set[int] = set()
        self._lock = threading.Lock()

    def put(self, worker: int, kind: int, rref: int, fork: int) -> None:
        """Add an entry for ``worker``, which the next ``flush`` sends."""
        if worker not in self._lost:
            self._out.setdefault(worker, deque()).append(_ENTRY.pack(kind, rref, fork))

    def flush(self) -> None:
        """Send all that was put."""
        for worker, entries in list(self._out.items()):
            while entries:
                batch: list[bytes] = []
                try:
                    for _ in range(min(len(entries), _BATCH)):
                        batch.append(entries.popleft())
                except IndexError:
                    pass  # another thread may flush, too
                if batch:
                    with self._lock:
                        if worker in self._lost:
                            break
                        number = next(self._numbers.setdefault(worker, itertools.count()))
                    self.transmit(worker, _NUMBER.pack(number) + b"".join(batch))

    def open(self, sender: int, message: bytes) -> Iterable[tuple[int, int, int]]:
        """The entries of a message from ``sender``; none if it was taken before. ``struct.error`` for bytes that are none."""
        (number,) = _NUMBER.unpack_from(message)
        entries = list(_ENTRY.iter_unpack(memoryview(message)[_NUMBER.size :]))
        for kind, _, _ in entries:
            if not FORK <= kind <= GONE:
                raise struct.error(f"there is no kind {kind} of entry")
        with self._lock:
            if sender in self._lost:
                return ()
            taken = self._taken.get(sender)
            if taken is None:
                taken = self._taken[sender] = Taken()
            if not taken.take(number):
                return ()
        return entries

    def lost(self, worker: int) -> None:
        """Send nothing to ``worker`` any more, and take nothing from it."""
        with self._lock:
            self._lost.add(worker)
            self._out.pop(worker, None)
            self._numbers.pop(worker, None)
            self._taken.pop(worker, None)
