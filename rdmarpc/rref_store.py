"""The owner's half of the protocol of references: the values that live here, and who refers to them.

States of a fork as the owner sees it (``rref_context`` has the protocol): unknown, then known (in ``Slot.forks``), then
deleted. Messages may come in any order, so a fork may also be *early* (deleted first: its introduction is still to come), and
one that was refused is remembered until its deletion has come. Each fork is introduced once (by the call that creates the
value, by a FORK, or by the owner itself) and deleted once; both are then forgotten.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from . import gpu_streams
from .future import Value, fail
from .rref_mail import ACCEPT, PROBE, REFUSE
from .transport import PeerLost

LOCAL_BITS = 40

Send = Callable[[int, int, int, int], None]
Job = Callable[[], None]


def created_on(number: int) -> int:
    """The number of the worker that drew an id."""
    return number >> LOCAL_BITS


def id_text(number: int) -> str:
    return f"GloballyUniqueId(created_on={created_on(number)}, local_id={number & ((1 << LOCAL_BITS) - 1)})"


class Slot:
    """One value: not there yet, there, or failed."""

    __slots__ = ("forks", "future", "known", "own", "parked", "settled")

    def __init__(self) -> None:
        self.future = Value()
        self.settled = False
        """The value, or its error, is there or about to be."""
        self.known = False
        """The call that creates the value has reached us."""
        self.own = False
        """Made by ``RRef(value)`` here."""
        self.forks: dict[int, int] = {}
        """Known forks and who holds them. Our own handles are forks that we hold."""
        self.parked: dict[int, int] = {}
        """Forks that ask to be known before the value is."""

    def set(self, value: Any) -> None:
        if gpu_streams.current is not None:
            self.future.mark = gpu_streams.current.mark()
        self.future.set_result(value)


class RRefStore:
    """Thread-safe; never blocks, never runs users' code. Values that nobody refers to any more go to ``dead``, what has to run
    as a consequence to ``jobs``: the caller sees to both when it holds no lock."""

    def __init__(self, me: int, send: Send, jobs: deque[Job]) -> None:
        self._me, self._send, self._jobs = me, send, jobs
        self._slots: dict[int, Slot] = {}
        self._early: dict[int, int] = {}
        self._refused: dict[int, int] = {}
        self._lost: set[int] = set()
        self._lock = threading.Lock()
        self.dead: deque[Slot] = deque()

    # -- values

    def add(self, rref: int, value: Any) -> None:
        """A value of our own, held by one handle whose fork has the id of the reference."""
        slot = Slot()
        slot.known = slot.own = slot.settled = True
        slot.forks[rref] = self._me
        slot.set(value)
        with self._lock:
            self._slots[rref] = slot

    def introduce(self, rref: int, fork: int, creator: int) -> None:
        """The call that creates a value has arrived."""
        with self._lock:
            wanted = self._early.pop(fork, None) is None and creator not in self._lost
            slot = self._slots.get(rref)
            if slot is None:
                if not wanted:
                    return  # the function runs all the same; its result is dropped
                slot = self._slots[rref] = Slot()
            slot.known = True
            if wanted:
                slot.forks[fork] = creator
            slot.forks.update(slot.parked)
            for number, holder in slot.parked.items():
                self._send(holder, ACCEPT, rref, number)
            slot.parked.clear()
            self._drop_if_unused(rref, slot)

    def fulfil(self, rref: int, value: Any) -> None:
        slot = self._settle(rref)
        if slot is not None:
            slot.set(value)

    def fail(self, rref: int, error: BaseException) -> None:
        slot = self._settle(rref)
        if slot is not None:
            fail(slot.future, error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}"))

    def _settle(self, rref: int) -> Slot | None:
        with self._lock:
            slot = self._slots.get(rref)
            if slot is None or slot.settled or not slot.known:
                return None  # nobody refers to it, or only some who came too late
            slot.settled = True
            return slot

    def future(self, rref: int) -> torch.futures.Future[Any]:
        """Of the value. A fetch may overtake the call that creates it."""
        with self._lock:
            return self._slot(rref).future

    # -- forks

    def lend(self, rref: int, fork: int, holder: int) -> None:
        """We send one of our handles to ``holder``."""
        with self._lock:
            if holder not in self._lost:
                self._slot(rref).forks[fork] = holder

    def take(self, rref: int, fork: int) -> None:
        """A reference came back to us: the fork is now held by a handle of ours."""
        with self._lock:
            self._slot(rref).forks[fork] = self._me

    def request(self, rref: int, fork: int, holder: int) -> None:
        """FORK: ``holder`` got a handle from another user."""
        with self._lock:
            if holder in self._lost:
                return
            if self._early.pop(fork, None) is not None:
                self._send(holder, ACCEPT, rref, fork)
                return
            slot = self._slot(rref)
            if slot.known:
                slot.forks[fork] = holder
                self._send(holder, ACCEPT, rref, fork)
            else:
                slot.parked[fork] = holder

    def delete(self, rref: int, fork: int, holder: int) -> None:
        """DELETE: a fork died at its holder."""
        with self._lock:
            if holder in self._lost:
                return
            slot = self._slots.get(rref)
            if slot is not None and slot.forks.pop(fork, None) is not None:
                self._drop_if_unused(rref, slot)
            elif slot is not None and slot.parked.pop(fork, None) is not None:
                self._send(holder, ACCEPT, rref, fork)
            elif self._refused.pop(fork, None) is None:
                self._early[fork] = holder

    def _slot(self, rref: int) -> Slot:
        """With the lock held: the slot, made on demand; then the creator is asked whether the value is really to come."""
        slot = self._slots.get(rref)
        if slot is None:
            slot = self._slots[rref] = Slot()
            if created_on(rref) in self._lost:
                self._jobs.append(partial(self.gone, rref))
            else:
                self._send(created_on(rref), PROBE, rref, 0)
        return slot

    def _drop_if_unused(self, rref: int, slot: Slot) -> None:
        if slot.known and not slot.forks:
            del self._slots[rref]
            self.dead.append(slot)

    def gone(self, rref: int) -> None:
        """GONE: no call that creates this value is on its way. If it never came, or came and its value was deleted, whoever
        still asks is told so. That happens only when a worker was lost that had passed the reference on."""
        with self._lock:
            self._give_up(rref)

    def _give_up(self, rref: int) -> None:
        slot = self._slots.get(rref)
        if slot is None or slot.known:
            return
        slot.known = slot.settled = True
        for number, holder in slot.parked.items():
            self._refused[number] = holder
            self._send(holder, REFUSE, rref, number)
        slot.parked.clear()
        error = PeerLost(f"the value of RRef {id_text(rref)} does not exist: a worker that had the reference was lost")
        self._jobs.append(partial(fail, slot.future, error))
        self._drop_if_unused(rref, slot)

    def lost(self, worker: int) -> None:
        """A worker was lost, and with it all forks that it held."""
        with self._lock:
            self._lost.add(worker)
            for table in (self._early, self._refused):
                for fork in [fork for fork, holder in table.items() if holder == worker]:
                    del table[fork]
            for rref, slot in list(self._slots.items()):
                for table in (slot.forks, slot.parked):
                    for fork in [fork for fork, holder in table.items() if holder == worker]:
                        del table[fork]
                if slot.known:
                    self._drop_if_unused(rref, slot)
                elif created_on(rref) == worker:
                    self._give_up(rref)

    def close(self, error: Exception) -> None:
        """The end: values are let go, and who waits for one gets ``error``."""
        with self._lock:
            slots = list(self._slots.values())
            self._slots.clear()
            waiting = [slot.future for slot in slots if not slot.settled]
            for slot in slots:
                slot.settled = True
        for future in waiting:
            fail(future, error)

    # -- looking

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def unfinished(self) -> int:
        """Forks whose introduction or deletion has come without the other."""
        with self._lock:
            return len(self._early) + len(self._refused) + sum(len(slot.parked) for slot in self._slots.values())

    def counts(self) -> tuple[int, int]:
        """Values that were shared, and the forks that share them: handles of our own to ``RRef(value)`` do not count."""
        with self._lock:
            shared = [self._shared(rref, slot) for rref, slot in self._slots.items()]
        return sum(1 for count in shared if count), sum(shared)

    def _shared(self, rref: int, slot: Slot) -> int:
        return sum(holder != self._me or (fork == rref and not slot.own) for fork, holder in slot.forks.items())
