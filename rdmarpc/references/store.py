"""The owner's half of the protocol of references: the values that live here, and the workers that refer to them.

States of a fork as the owner sees it (``references/context`` has the protocol): unknown, then known (in ``Owned.forks``), then
deleted. Messages may come in any order, so a fork may also be *early* (deleted first: its introduction is still to come), and
one that was refused is remembered until its deletion has come. Each fork is introduced once (by the call that creates the
value, by a FORK, or by the owner itself) and deleted once; both are then forgotten.

Only the holder of a fork may delete it: a DELETE of another worker is counted (``refused``) and has no effect. Entries that
wait for a further message (early, parked and refused forks; values that are still to be created) are bounded for each worker
that causes them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from ..base import streams
from ..base.futures import Value, fail
from ..base.streams import Mark
from ..links.frames import NotTheirs
from ..transport import PeerLost, RdmaError
from .mail import ACCEPT, PROBE, REFUSE

LOCAL_BITS = 40
MAX_OPEN = 1 << 18
"""Forks of one worker whose story is half told, and values that one worker is still to create: an honest one has at most as
many as it has calls and messages under way."""

_MISSING = object()
_NONE: Mapping[int, int] = MappingProxyType({})
Send = Callable[[int, int, int, int], None]
Job = Callable[[], None]


def created_on(number: int) -> int:
    """The number of the worker that drew an id."""
    return number >> LOCAL_BITS


def id_text(number: int) -> str:
    return f"GloballyUniqueId(created_on={created_on(number)}, local_id={number & ((1 << LOCAL_BITS) - 1)})"


def _mark() -> Mark | None:
    return None if streams.current is None else streams.current.mark()


def _add(counts: dict[int, int], worker: int, more: int) -> None:
    counts[worker] = counts.get(worker, 0) + more
    if not counts[worker]:
        del counts[worker]


class Owned:
    """One value: not there yet, there, or failed. Small, as there may be very many. The lock of the store guards it."""

    __slots__ = ("_future", "_mark", "_value", "forks", "known", "own", "parked", "settled")

    def __init__(self) -> None:
        self.settled = False
        """The value, or its error, is there or about to be."""
        self.known = False
        """The call that creates the value has reached us."""
        self.own = False
        """Made by ``RRef(value)`` here."""
        self.forks: dict[int, int] = {}
        """The known forks, and the worker that holds each. Our own handles are forks that we hold."""
        self.parked = _NONE
        """Forks that ask to be known before the value is."""
        self._value: Any = _MISSING
        self._mark: Mark | None = None
        self._future: Value | None = None

    def set(self, value: Any, mark: Mark | None) -> Value | None:
        """Enter the value. Returns the future that is to be completed with it, without the lock, if somebody has asked for
        one. ``mark``: the streams that made it."""
        future = self._future
        if future is None:
            self._value, self._mark = value, mark
        else:
            future.mark = mark
        return future

    @property
    def future(self) -> Value:
        """The future of the value, made when it is first asked for."""
        future = self._future
        if future is None:
            future = self._future = Value()
            if self._value is not _MISSING:
                future.mark = self._mark
                future.set_result(self._value)
                self._value, self._mark = _MISSING, None
        return future

    @property
    def found(self) -> Any:
        """The value itself, if it is there and nothing has to be waited for, else its future."""
        value = self._value
        return self.future if value is _MISSING or self._mark is not None or isinstance(value, torch._C.Future) else value


class Unsettled:
    """Forks whose introduction and deletion have not both come: early, parked or refused. Guarded by the lock of the store."""

    def __init__(self, me: int) -> None:
        self._me = me
        self.early: set[tuple[int, int]] = set()
        """Pairs of fork and holder, as in ``refused``."""
        self.refused: set[tuple[int, int]] = set()
        self._counts: dict[int, int] = {}
        """The number of unsettled forks by holder, parked ones included."""

    def count(self, holder: int, more: int) -> None:
        """Change the count of a holder. Raises ``NotTheirs`` if it gets larger than that of an honest worker can be."""
        if more > 0 and self._counts.get(holder, 0) >= MAX_OPEN and holder != self._me:
            raise NotTheirs(f"it deletes, or asks for, {MAX_OPEN} references that nobody gave it")
        _add(self._counts, holder, more)

    def note(self, table: set[tuple[int, int]], fork: int, holder: int) -> None:
        """Enter a fork into ``early`` or ``refused``. As ``count``."""
        if (fork, holder) not in table:
            self.count(holder, 1)
            table.add((fork, holder))

    def forget(self, table: set[tuple[int, int]], fork: int, holder: int) -> bool:
        """Whether that fork was in the table; it is not any more."""
        if (fork, holder) not in table:
            return False
        table.discard((fork, holder))
        self.count(holder, -1)
        return True

    def lost(self, holder: int) -> None:
        self._counts.pop(holder, None)
        for table in (self.early, self.refused):
            table.difference_update([item for item in table if item[1] == holder])


class RRefStore:
    """The values that live on this worker. Thread-safe; never blocks, never runs users' code. Values without references go to
    ``dead``, and calls that follow from a change to ``jobs``: the caller empties both when it holds no lock."""

    def __init__(self, me: int, send: Send, jobs: deque[Job]) -> None:
        self._me, self._send, self._jobs = me, send, jobs
        self._values: dict[int, Owned] = {}
        self.unsettled = Unsettled(me)
        self._awaited: dict[int, int] = {}
        """For each creator the number of values that are asked for before its creating call has come."""
        self._lost: set[int] = set()
        self.refused = 0
        """The number of messages about forks by workers that do not hold them."""
        self._lock = threading.Lock()
        self.dead: deque[Owned] = deque()

    # -- values

    def add(self, rref: int, value: Any) -> None:
        """A value of our own, held by one handle whose fork has the id of the reference."""
        owned = Owned()
        owned.known = owned.own = owned.settled = True
        owned.forks[rref] = self._me
        owned.set(value, _mark())
        with self._lock:
            self._values[rref] = owned

    def introduce(self, rref: int, fork: int, creator: int) -> None:
        """The call that creates a value has arrived."""
        with self._lock:
            wanted = not self.unsettled.forget(self.unsettled.early, fork, creator) and creator not in self._lost
            owned = self._values.get(rref)
            if owned is None:
                if not wanted:
                    return  # the function runs all the same; its result is dropped
                owned = self._values[rref] = Owned()
                owned.known = True
            self._learn(rref, owned)
            if wanted:
                owned.forks[fork] = creator
            owned.forks.update(owned.parked)
            for number, holder in owned.parked.items():
                self.unsettled.count(holder, -1)
                self._send(holder, ACCEPT, rref, number)
            owned.parked = _NONE
            self._drop_if_unused(rref, owned)

    def fulfil(self, rref: int, value: Any) -> None:
        mark = _mark()
        with self._lock:
            owned = self._settle(rref)
            future = None if owned is None else owned.set(value, mark)
        if future is not None:
            future.set_result(value)

    def fail(self, rref: int, error: Exception) -> None:
        with self._lock:
            owned = self._settle(rref)
            future = None if owned is None else owned.future
        if future is not None:
            fail(future, error)

    def _settle(self, rref: int) -> Owned | None:
        """With the lock held: the entry that a creating call completes; ``None`` if there are no references to it, or only some
        that came too late."""
        owned = self._values.get(rref)
        if owned is None or owned.settled or not owned.known:
            return None
        owned.settled = True
        return owned

    def future(self, rref: int) -> torch.futures.Future[Any]:
        """The future of a value. There is one even before the call that creates the value has come: a fetch may overtake it."""
        with self._lock:
            return self._value(rref).future

    def found(self, rref: int) -> Any:
        """The value, if it is there, else its future; a value that is a future itself, and one that GPUs may still work on, are
        always given by a future."""
        with self._lock:
            return self._value(rref).found

    # -- forks

    def lend(self, rref: int, fork: int, holder: int) -> None:
        """Enter a fork of ours that is sent to ``holder``."""
        with self._lock:
            if holder not in self._lost:
                self._value(rref).forks[fork] = holder

    def take(self, rref: int, fork: int) -> None:
        """Enter a fork that came back to its owner: a handle of ours holds it now."""
        with self._lock:
            self._value(rref).forks[fork] = self._me

    def request(self, rref: int, fork: int, holder: int) -> None:
        """FORK: ``holder`` got a handle from another user."""
        with self._lock:
            if holder in self._lost:
                return
            if self.unsettled.forget(self.unsettled.early, fork, holder):
                self._send(holder, ACCEPT, rref, fork)
                return
            owned = self._values.get(rref)
            # The worker that passed it on may have given the same fork to two workers, or to one worker twice.
            twice = owned is not None and (fork in owned.forks or fork in owned.parked)
            if twice or (owned is None and self._crowded(rref)):
                self.refused += 1
                self._refuse(rref, fork, holder)
                return
            owned = self._value(rref)
            if owned.known:
                owned.forks[fork] = holder
                self._send(holder, ACCEPT, rref, fork)
            else:
                self.unsettled.count(holder, 1)
                owned.parked = {**owned.parked, fork: holder}

    def delete(self, rref: int, fork: int, holder: int) -> None:
        """DELETE: a fork died at its holder."""
        with self._lock:
            if holder in self._lost or self.unsettled.forget(self.unsettled.refused, fork, holder):
                return
            owned = self._values.get(rref)
            known = None if owned is None else owned.forks.get(fork, owned.parked.get(fork))
            if owned is None or known is None:
                self.unsettled.note(self.unsettled.early, fork, holder)
            elif known != holder:
                self.refused += 1
            elif owned.forks.pop(fork, None) is not None:
                self._drop_if_unused(rref, owned)
            else:
                owned.parked = {number: other for number, other in owned.parked.items() if number != fork} or _NONE
                self.unsettled.count(holder, -1)
                self._send(holder, ACCEPT, rref, fork)

    # -- with the lock held

    def _refuse(self, rref: int, fork: int, holder: int) -> None:
        self.unsettled.note(self.unsettled.refused, fork, holder)
        self._send(holder, REFUSE, rref, fork)

    def _learn(self, rref: int, owned: Owned) -> None:
        """Note that it is known from now on whether the value will ever exist."""
        if not owned.known:
            owned.known = True
            _add(self._awaited, created_on(rref), -1)

    def _crowded(self, rref: int) -> bool:
        return self._awaited.get(created_on(rref), 0) >= MAX_OPEN and created_on(rref) != self._me

    def _value(self, rref: int) -> Owned:
        """The entry of a value. If there is none it is made, and the creator is asked whether the value will come. Raises
        ``RdmaError`` if too many values of that creator are awaited already."""
        owned = self._values.get(rref)
        if owned is None:
            if self._crowded(rref):
                raise RdmaError(f"{MAX_OPEN} values are awaited that worker number {created_on(rref)} is still to create")
            owned = self._values[rref] = Owned()
            _add(self._awaited, created_on(rref), 1)
            if created_on(rref) in self._lost:
                self._jobs.append(partial(self.gone, rref))
            else:
                self._send(created_on(rref), PROBE, rref, 0)
        return owned

    def _drop_if_unused(self, rref: int, owned: Owned) -> None:
        if owned.known and not owned.forks:
            del self._values[rref]
            self.dead.append(owned)

    def gone(self, rref: int) -> None:
        """GONE: no call that creates this value is on its way. If it never came, or its value was deleted, those that still ask
        for the value get an error. That happens only when a worker was lost that had passed the reference on."""
        with self._lock:
            self._give_up(rref)

    def _give_up(self, rref: int) -> None:
        owned = self._values.get(rref)
        if owned is None or owned.known:
            return
        self._learn(rref, owned)
        owned.settled = True
        parked, owned.parked = owned.parked, _NONE
        for number, holder in parked.items():
            self.unsettled.count(holder, -1)
            self._refuse(rref, number, holder)
        error = PeerLost(f"the value of RRef {id_text(rref)} does not exist: a worker that had the reference was lost")
        self._jobs.append(partial(fail, owned.future, error))
        self._drop_if_unused(rref, owned)

    def lost(self, worker: int) -> None:
        """A worker was lost, and with it all forks that it held."""
        with self._lock:
            self._lost.add(worker)
            self.unsettled.lost(worker)
            for rref, owned in list(self._values.items()):
                owned.forks = {fork: holder for fork, holder in owned.forks.items() if holder != worker}
                owned.parked = {fork: holder for fork, holder in owned.parked.items() if holder != worker} or _NONE
                if owned.known:
                    self._drop_if_unused(rref, owned)
                elif created_on(rref) == worker:
                    self._give_up(rref)

    def close(self, error: Exception) -> None:
        """Let go of all values. Waits for a value fail with ``error``."""
        with self._lock:
            values = list(self._values.values())
            self._values.clear()
            waiting = [owned.future for owned in values if not owned.settled]
            for owned in values:
                owned.settled = True
        for future in waiting:
            fail(future, error)

    # -- looking

    def __len__(self) -> int:
        return len(self._values)

    def counts(self) -> tuple[int, int]:
        """Values that were shared, and the forks that share them: handles of our own to ``RRef(value)`` do not count."""
        with self._lock:
            shared = [self._shared(rref, owned) for rref, owned in self._values.items()]
        return sum(1 for count in shared if count), sum(shared)

    def _shared(self, rref: int, owned: Owned) -> int:
        return sum(holder != self._me or (fork == rref and not owned.own) for fork, holder in owned.forks.items())
