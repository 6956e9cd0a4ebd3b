"""The owner's half of the protocol of references: the values that live here, and who refers to them.

States of a fork as the owner sees it (``rref_context`` has the protocol): unknown, then known (in ``Slot.forks``), then
deleted. Messages may come in any order, so a fork may also be *early* (deleted first: its introduction is still to come), and
one that was refused is remembered until its deletion has come. Each fork is introduced once (by the call that creates the
value, by a FORK, or by the owner itself) and deleted once; both are then forgotten.

A fork is deleted at its holder's word, and nobody else's: that of another is counted (``refused``) and has no effect. What
waits for the rest of its story (early, parked, refused forks; values that are still to be created) is bounded, for each
worker that it is owed to.
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
from .rref_mail import ACCEPT, PROBE, REFUSE, NotTheirs
from .transport import PeerLost, RdmaError

LOCAL_BITS = 40
MAX_OPEN = 1 << 18
"""Forks of one worker whose story is half told, and values that one worker is still to create: an honest one has at most as
many as it has calls and messages under way."""

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
        self._early: set[tuple[int, int]] = set()
        """Fork and holder, and so in ``_refused``."""
        self._refused: set[tuple[int, int]] = set()
        self._open: dict[int, int] = {}
        """By holder: how many of its forks are early, parked or refused."""
        self._awaited: dict[int, int] = {}
        """By creator: how many values are wanted whose creating call has not come."""
        self._lost: set[int] = set()
        self.refused = 0
        """Words about forks that had another holder."""
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
            wanted = not self._forget(self._early, fork, creator) and creator not in self._lost
            slot = self._slots.get(rref)
            if slot is None:
                if not wanted:
                    return  # the function runs all the same; its result is dropped
                slot = self._slots[rref] = Slot()
                slot.known = True
            self._learn(rref, slot)
            if wanted:
                slot.forks[fork] = creator
            slot.forks.update(slot.parked)
            for number, holder in slot.parked.items():
                self._count(holder, -1)
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
            if self._forget(self._early, fork, holder):
                self._send(holder, ACCEPT, rref, fork)
                return
            slot = self._slots.get(rref)
            # Who passed it on may have given two workers, or one worker twice, the same fork.
            twice = slot is not None and (fork in slot.forks or fork in slot.parked)
            if twice or (slot is None and self._crowded(rref)):
                self.refused += 1
                self._refuse(rref, fork, holder)
                return
            slot = self._slot(rref)
            if slot.known:
                slot.forks[fork] = holder
                self._send(holder, ACCEPT, rref, fork)
            else:
                self._count(holder, 1)
                slot.parked[fork] = holder

    def delete(self, rref: int, fork: int, holder: int) -> None:
        """DELETE: a fork died at its holder."""
        with self._lock:
            if holder in self._lost or self._forget(self._refused, fork, holder):
                return
            slot = self._slots.get(rref)
            known = None if slot is None else slot.forks.get(fork, slot.parked.get(fork))
            if slot is None or known is None:
                if (fork, holder) not in self._early:
                    self._count(holder, 1)
                    self._early.add((fork, holder))
            elif known != holder:
                self.refused += 1
            elif slot.forks.pop(fork, None) is not None:
                self._drop_if_unused(rref, slot)
            else:
                del slot.parked[fork]
                self._count(holder, -1)
                self._send(holder, ACCEPT, rref, fork)

    # -- with the lock held

    def _count(self, holder: int, more: int) -> None:
        """``NotTheirs`` for more than an honest worker can have."""
        count = self._open.get(holder, 0) + more
        if more > 0 and count > MAX_OPEN and holder != self._me:
            raise NotTheirs(f"it deletes, or asks for, {MAX_OPEN} references that nobody gave it")
        if count:
            self._open[holder] = count
        else:
            self._open.pop(holder, None)

    def _forget(self, table: set[tuple[int, int]], fork: int, holder: int) -> bool:
        """Whether that fork was in the table; it is not any more."""
        if (fork, holder) not in table:
            return False
        table.discard((fork, holder))
        self._count(holder, -1)
        return True

    def _refuse(self, rref: int, fork: int, holder: int) -> None:
        if (fork, holder) not in self._refused:
            self._count(holder, 1)
            self._refused.add((fork, holder))
        self._send(holder, REFUSE, rref, fork)

    def _learn(self, rref: int, slot: Slot) -> None:
        """Whether the value will be is known from here on."""
        if not slot.known:
            slot.known = True
            self._await(created_on(rref), -1)

    def _crowded(self, rref: int) -> bool:
        return self._awaited.get(created_on(rref), 0) >= MAX_OPEN and created_on(rref) != self._me

    def _await(self, creator: int, more: int) -> None:
        count = self._awaited.get(creator, 0) + more
        if count:
            self._awaited[creator] = count
        else:
            self._awaited.pop(creator, None)

    def _slot(self, rref: int) -> Slot:
        """The slot, made on demand; then the creator is asked whether the value is really to come. ``RdmaError`` where too many
        are asked for already."""
        slot = self._slots.get(rref)
        if slot is None:
            if self._crowded(rref):
                raise RdmaError(f"{MAX_OPEN} values are awaited that worker number {created_on(rref)} is still to create")
            slot = self._slots[rref] = Slot()
            self._await(created_on(rref), 1)
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
        self._learn(rref, slot)
        slot.settled = True
        parked, slot.parked = slot.parked, {}
        for number, holder in parked.items():
            self._count(holder, -1)
            self._refuse(rref, number, holder)
        error = PeerLost(f"the value of RRef {id_text(rref)} does not exist: a worker that had the reference was lost")
        self._jobs.append(partial(fail, slot.future, error))
        self._drop_if_unused(rref, slot)

    def lost(self, worker: int) -> None:
        """A worker was lost, and with it all forks that it held."""
        with self._lock:
            self._lost.add(worker)
            self._open.pop(worker, None)
            for table in (self._early, self._refused):
                table.difference_update([item for item in table if item[1] == worker])
            for rref, slot in list(self._slots.items()):
                for forks in (slot.forks, slot.parked):
                    for fork in [fork for fork, holder in forks.items() if holder == worker]:
                        del forks[fork]
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
