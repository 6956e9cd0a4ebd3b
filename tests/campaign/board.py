"""What the supervisor sees of workers while they run, even of those that hold the GIL or are stopped: words in a mapped file.

One writer a word. Times are ``time.monotonic_ns``, which all processes of a host share.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from pathlib import Path

STARTING, JOINING, WORKING, LEAVING, DONE = range(5)
SLOTS = 32
_WORDS = 2048
_WORKER_AT, _WORKER_WORDS, _SLOT_AT, _SLOT_WORDS = 64, 256, 16, 4
_WORD = struct.Struct("<q")
STOP, LAST_STEP = 1, 2
PHASE, SINCE, PID = 0, 1, 2


class Board:
    def __init__(self, path: Path, *, make: bool = False) -> None:
        if make:
            path.write_bytes(bytes(8 * _WORDS))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8 * _WORDS)
        self._mine = threading.local()
        self._taken = 0
        self._lock = threading.Lock()

    def get(self, at: int) -> int:
        return _WORD.unpack_from(self._map, 8 * at)[0]

    def put(self, at: int, value: int) -> None:
        _WORD.pack_into(self._map, 8 * at, value)

    # -- faults: when each was to begin, began, and is over

    def fault(self, index: int) -> int:
        return 8 + 4 * index

    # -- workers

    def worker(self, rank: int, word: int) -> int:
        return self.get(_WORKER_AT + _WORKER_WORDS * rank + word)

    def tell(self, rank: int, phase: int, pid: int) -> None:
        at = _WORKER_AT + _WORKER_WORDS * rank
        self.put(at + SINCE, time.monotonic_ns())
        self.put(at + PID, pid)
        self.put(at + PHASE, phase)

    @property
    def stopping(self) -> bool:
        return self.get(STOP) != 0

    # -- operations under way, one slot a thread

    def begin(self, rank: int, touched: int, kind: int) -> None:
        at = self._slot(rank)
        self.put(at + 1, touched)
        self.put(at + 2, kind)
        self.put(at, time.monotonic_ns())

    def end(self, rank: int) -> None:
        at = self._slot(rank)
        self.put(at, 0)
        self.put(at + 3, self.get(at + 3) + 1)

    def _slot(self, rank: int) -> int:
        found = getattr(self._mine, "at", None)
        if found is None:
            with self._lock:
                number, self._taken = self._taken, self._taken + 1
            assert number < SLOTS, "more threads than slots"
            found = self._mine.at = _WORKER_AT + _WORKER_WORDS * rank + _SLOT_AT + _SLOT_WORDS * number
        return found

    def under_way(self, rank: int) -> list[tuple[int, int, int]]:
        """Of each operation: when it began, the ranks it touches (bits), its kind."""
        found = []
        for slot in range(SLOTS):
            at = _WORKER_AT + _WORKER_WORDS * rank + _SLOT_AT + _SLOT_WORDS * slot
            if began := self.get(at):
                found.append((began, self.get(at + 1), self.get(at + 2)))
        return found

    def count(self, rank: int) -> int:
        """Operations that have ended."""
        start = _WORKER_AT + _WORKER_WORDS * rank + _SLOT_AT + 3
        return sum(self.get(start + _SLOT_WORDS * slot) for slot in range(SLOTS))
