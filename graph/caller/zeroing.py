"""Gradients of remote parameters that are to be zeroed before the next backward or step."""

from __future__ import annotations

from collections.abc import Mapping

from ..work.command import KEEP, ZERO, Command
from .stage import Plan


class Zeroing:
    """``parameters`` counts the parameters of each worker; ``present``: see ``Ledger``. *Marks* are one byte a parameter:
    ``KEEP``, or how it is zeroed.
    Under the caller's lock, but for ``mark``."""

    def __init__(self, parameters: Mapping[str, int], present: Mapping[str, bytes | None]) -> None:
        self.trainable: dict[int, dict[str, bytes]] = {}
        """By mode and worker: one byte a parameter, ``TO_NONE`` where it requires gradients. A mode that is not here has its
        gradients zeroed by commands."""
        self._marks = {worker: bytearray(count) for worker, count in parameters.items()}
        self.due = False
        self.assigned: set[str] = set()
        """Workers where a parameter was given a gradient from here since their last backward."""
        self._present = present

    def mark(self, worker: str, position: int, how: int) -> None:
        self._marks[worker][position] = how
        self.due = True

    def ride(self, plan: Plan, mode: int) -> dict[str, bytes]:
        """Take the marks of a plan's workers, to go with the gradients of its next backward (``header.CLEAR``), if they are all
        that these workers train; else nothing."""
        trainable = self.trainable.get(mode, {})
        marks = {worker: bytes(self._marks[worker]) for worker in plan.participants}
        if not marks or not all(self._all(worker, trainable.get(worker), mine) for worker, mine in marks.items()):
            return {}
        for worker in marks:
            self._marks[worker][:] = bytes(len(self._marks[worker]))
        self.due = any(map(any, self._marks.values()))
        return marks

    def _all(self, worker: str, trainable: bytes | None, marks: bytes) -> bool:
        """Whether these marks zero every gradient that trainable parameters may have."""
        if trainable is None or marks == trainable:
            return trainable is not None
        present = self._present[worker]
        if present is None or worker in self.assigned:
            return False
        return all(mark == learns or not (mark or has) for mark, learns, has in zip(marks, trainable, present))

    def again(self, marks: Mapping[str, bytes]) -> None:
        """The backward that took these has failed: whether they came to everybody, nobody knows."""
        for worker, mine in marks.items():
            self._marks[worker][:] = bytes(map(max, self._marks[worker], mine))
            self.due = True

    def commands(self) -> dict[str, Command]:
        """Take all marks, as commands."""
        self.due = False
        commands = {worker: Command(ZERO, payload=bytes(marks)) for worker, marks in self._marks.items() if any(marks)}
        for marks in self._marks.values():
            marks[:] = bytes([KEEP]) * len(marks)
        return commands
