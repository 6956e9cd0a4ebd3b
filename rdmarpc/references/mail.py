"""Control messages of references: entries ``(kind, rref, fork)``, many in a frame.

The links below neither lose nor repeat frames. They may deliver them in another order than they were sent in: the protocol does
not rely on it. A worker that takes over the rank of another is another sender and receiver.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable

FORK, ACCEPT, REFUSE, CHILD, DELETE, PROBE, GONE = range(1, 8)
"""Kinds of entries; what they mean is said in ``references/context``."""

_ENTRY = struct.Struct("<BQQ")
_BATCH = 1024  # the reader of the rings takes a whole message at once


class Mail:
    """The control messages of one worker, out and in. Thread-safe; never blocks. ``transmit(worker, message)`` carries bytes to
    the ``open`` of another worker, with any delay."""

    def __init__(self, transmit: Callable[[int, bytes], None]) -> None:
        self.transmit = transmit
        self._out: dict[int, deque[bytes]] = {}
        self._lost: set[int] = set()

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
                    self.transmit(worker, b"".join(batch))

    def open(self, sender: int, message: bytes) -> Iterable[tuple[int, int, int]]:
        """The entries of a message from ``sender``; none if it was lost. ``struct.error`` for bytes that are none."""
        entries = list(_ENTRY.iter_unpack(message))
        for kind, _, _ in entries:
            if not FORK <= kind <= GONE:
                raise struct.error(f"there is no kind {kind} of entry")
        return () if sender in self._lost else entries

    def lost(self, worker: int) -> None:
        """Send nothing to ``worker`` any more, and take nothing from it."""
        self._lost.add(worker)
        self._out.pop(worker, deque()).clear()
