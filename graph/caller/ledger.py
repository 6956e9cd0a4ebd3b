"""The caller's record of its forwards and commands: the numbers that it has given out, the reports of the workers, and the
forwards that were given up.

Every method but ``abandon`` is called with the caller's lock held.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping

from ...transport import fresh
from ..edges.slot import Slot
from ..wire.header import DONE, ERROR, NONE, Header
from ..work.command import WorkerError, unpadded
from .stage import Plan

_DROPPED = 4096

Abandoned = tuple[Plan, int, Mapping[str, bytes]]
"""A forward that ended without its backward: its plan, its sequence, and the marks (``Zeroing``) that went with it."""


class Ledger:
    """``commands``: how many were sent. ``last_backward``: by worker, the sequence of the last one that has finished there.
    ``present``: which of a worker's parameters had a gradient then, a byte each; ``None``: another backward has begun since."""

    def __init__(self, workers: Mapping[str, int]) -> None:
        self.commands = 0
        self.last_backward = dict.fromkeys(workers, 0)
        self.present: dict[str, bytes | None] = {worker: bytes(count) for worker, count in workers.items()}
        self._told = dict(self.present)
        self.sequence = 0
        self._done: dict[int, set[str]] = {}
        self._errors: dict[int, Exception] = {}
        self._open: set[int] = set()
        """The forwards that have not ended."""
        self._fatal: Exception | None = None
        self._dropped: OrderedDict[int, None] = OrderedDict()
        self._abandoned: deque[Abandoned] = deque()

    def reserve(self, count: int) -> int:
        """The first of so many consecutive sequences."""
        self.sequence += count
        first = self.sequence - count + 1
        self._open.update(range(first, first + count))
        return first

    # -- what workers report

    def report(self, worker: str, slot: Slot, header: Header) -> None:
        """Take down that a backward is done there, or that something failed."""
        if header.flags & ERROR:
            error = WorkerError.load(unpadded(slot.payload)).raised(worker)
            if header.fatal:
                self._fatal = error
            elif header.sequence not in self._dropped:
                self._errors.setdefault(header.sequence, error)
        elif header.flags & DONE:
            if not header.flags & NONE:
                self._told[worker] = unpadded(slot.payload)
            if header.sequence not in self._dropped:
                self._done.setdefault(header.sequence, set()).add(worker)

    def done_by(self, sequence: int) -> set[str]:
        """Workers that have reported the backward of this forward; it grows with what they report."""
        return self._done.setdefault(sequence, set())

    def finished_backward(self, workers: Iterable[str], sequence: int) -> None:
        """Of this forward, at all of these workers."""
        self.ended(sequence)
        for worker in workers:
            self.last_backward[worker] = sequence
            self.present[worker] = self._told[worker]

    def ended(self, sequence: int) -> None:
        """This forward is complete, or was never begun."""
        self._done.pop(sequence, None)
        self._open.discard(sequence)

    def raise_errors(self, sequences: Iterable[int] = ()) -> None:
        """What workers have reported about these forwards, about all, or about forwards that had ended here."""
        if self._fatal is not None:
            raise fresh(self._fatal)
        for number in (*sequences, *self._errors.keys() - self._open) if self._errors else ():
            if number in self._errors:
                raise self._errors.pop(number)

    # -- what is given up

    def abandon(self, plan: Plan, sequence: int, zeroed: Mapping[str, bytes]) -> None:
        """This forward ends without its backward. Any thread, also from finalizers: only remembers it."""
        self._abandoned.append((plan, sequence, zeroed))

    def drop_abandoned(self) -> Iterator[Abandoned]:
        """Each of them once; whatever comes for it from now on has been ``dropped``."""
        while self._abandoned:
            plan, sequence, zeroed = self._abandoned.popleft()
            plan.pending.discard(sequence)
            self.ended(sequence)
            self._errors.pop(sequence, None)
            self._dropped[sequence] = None
            if len(self._dropped) > _DROPPED:
                self._dropped.popitem(last=False)
            yield plan, sequence, zeroed

    def dropped(self, sequence: int) -> bool:
        return sequence in self._dropped
