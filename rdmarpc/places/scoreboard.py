"""Messages of a stream that run as soon as what they need is there, not in the order in which they were posted.

Between the two AHEAD of a caller (``batches.py``), a worker looks ahead in its ring. What another worker waits for runs first:
a copy that is to be sent, and what it is made of. What is left, such as gradients of weights, runs while nothing of the kind
can. So a backward has the order of a zero-bubble schedule (Qi et al., ICLR 2024), and parts that go round the workers are
interleaved: a worker that waits for a copy of one micro-batch computes another.

Where the caller posts TURNs, messages keep the order of posts unless they wait, and what follows a TURN runs when all that was
posted before the TURN before has been run. So a worker keeps few micro-batches (1F1B; Narayanan et al., SOSP 2019).

Results are those of the posted order: of two messages that touch one tensor, of which one writes it, the one that was posted
earlier runs first (Thornton's scoreboard, CDC 6600). Copies of one region are sent and counted in their order, too.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable


class Entry:
    """A message that has not been run. ``start``: position of its batch in the ring. ``waits``: how many entries of ``after``
    have not been run. ``region``: that which another worker writes, if this is a copy from there."""

    __slots__ = ("after", "at", "before", "done", "region", "start", "urgent", "waits", "words")

    def __init__(self, words: list[int], at: int, start: int, region: int | None) -> None:
        self.words, self.at, self.start, self.region = words, at, start, region
        self.after: list[Entry] = []
        self.before: list[Entry] = []
        self.waits = 0
        self.urgent = self.done = False

    @property
    def position(self) -> int:
        return self.start + self.at


class Scoreboard:
    """One thread. ``arrived``: whether the next copy that another worker writes into a region is here."""

    def __init__(self, arrived: Callable[[int], bool]) -> None:
        self._arrived = arrived
        self._writer: dict[object, Entry] = {}
        self._readers: dict[object, list[Entry]] = {}
        self._left: dict[Entry, None] = {}
        self._ready: list[tuple[bool, int, Entry]] = []
        self.landings: dict[int, Entry] = {}
        """By region, the copies that wait for nothing but their coming."""

    def __bool__(self) -> bool:
        return bool(self._left)

    @property
    def oldest(self) -> Entry:
        """Of those that are left, the one that was posted first."""
        return next(iter(self._left))

    def add(self, entry: Entry, reads: Iterable[object], writes: Iterable[object], urgent: bool) -> None:
        """The last in the order of posts. ``reads`` and ``writes``: what the message touches. ``urgent``: another worker waits
        for it."""
        self._left[entry] = None
        for key in reads:
            self._behind(entry, self._writer.get(key))
            self._readers.setdefault(key, []).append(entry)
        for key in writes:
            self._behind(entry, self._writer.get(key))
            for reader in self._readers.pop(key, ()):
                self._behind(entry, reader)
            self._writer[key] = entry
        if urgent:
            self._hurry(entry)
        if not entry.waits:
            self._offer(entry)

    @staticmethod
    def _behind(entry: Entry, earlier: Entry | None) -> None:
        if earlier is not None and earlier is not entry and not earlier.done:
            earlier.before.append(entry)
            entry.after.append(earlier)
            entry.waits += 1

    def _hurry(self, last: Entry) -> None:
        """The entry and all that it waits for."""
        left = [last]
        while left:
            entry = left.pop()
            if not entry.urgent and not entry.done:
                entry.urgent = True
                left += entry.after
                if not entry.waits and entry is not last:
                    self._offer(entry)

    def _offer(self, entry: Entry) -> None:
        if entry.region is not None:
            self.landings[entry.region] = entry
        else:
            heapq.heappush(self._ready, (not entry.urgent, entry.position, entry))

    def next(self) -> Entry | None:
        """The entry to run now. ``None``: all wait for copies."""
        for region, entry in self.landings.items():
            if self._arrived(region):
                del self.landings[region]
                return entry
        while self._ready:
            entry = heapq.heappop(self._ready)[2]
            if not entry.done:  # it may have been offered twice
                return entry
        return None

    def ran(self, entry: Entry) -> None:
        entry.done = True
        del self._left[entry]
        for each in entry.before:
            each.waits -= 1
            if not each.waits and not each.done:
                self._offer(each)
        entry.before, entry.after, entry.words = [], [], []
        if not self._left:
            self._writer.clear()
            self._readers.clear()

    def in_order(self) -> list[Entry]:
        """All that are left, in the order of their posts; they count as run."""
        found = list(self._left)
        for entry in found:
            entry.done = True
        for table in (self._left, self._writer, self._readers, self._ready, self.landings):
            table.clear()
        return found
