"""The owner's side of remote references: which values live here, and who still refers to them."""

from __future__ import annotations

import threading
from typing import Any

import torch


class Slot:
    """One value: not there yet, there, or failed. ``references``: fork ids of users, and of local owner objects."""

    __slots__ = ("future", "references")

    def __init__(self) -> None:
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.references: set[int] = set()


class RRefStore:
    """Thread-safe. A slot lives while anybody refers to it."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}
        self._lock = threading.Lock()

    def add(self, rref: int, reference: int) -> Slot:
        """One more reference; makes the slot if need be."""
        with self._lock:
            slot = self._slots.setdefault(rref, Slot())
            slot.references.add(reference)
            return slot

    def slot(self, rref: int) -> Slot:
        """The slot, made on demand: a fetch may overtake the call that creates the value."""
        with self._lock:
            return self._slots.setdefault(rref, Slot())

    def drop(self, rref: int, reference: int) -> None:
        """One reference less; the last one takes the value with it."""
        with self._lock:
            slot = self._slots.get(rref)
            if slot is None:
                return
            slot.references.discard(reference)
            if not slot.references:
                del self._slots[rref]

    def fulfil(self, rref: int, value: Any) -> None:
        self.slot(rref).future.set_result(value)

    def fail(self, rref: int, error: BaseException) -> None:
        self.slot(rref).future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def __len__(self) -> int:
        return len(self._slots)
