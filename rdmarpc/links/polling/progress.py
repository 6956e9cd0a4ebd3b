"""The polling role: the one thread that holds it reads the rings for all threads.

A thread that waits for a result takes the role and reads the rings itself, until its result is there. It leaves the requests
that it finds meanwhile to the pool (``pool``), because a function may block, and its own result could then not be read. When no
thread waits, a thread of the pool has the role.

``steps`` has the words of the role, their memory order, and the compiled steps by which the role changes hands. No locks.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from ...base.recursion import ROOM
from ...transport import Poller, RdmaError, interruptible, kernels, nobody
from . import steps

Job = Callable[[], None]
Awaited = Any
"""What a thread can wait for, until its ``done`` is true."""
Read = Callable[[int, int], None]
"""``read(row, fresh)`` is called by the holder of the role for every row of the poller with news; it must not block."""

_LINGER_S = 50e-6  # how long a lingering caller need not show that it is still there: less than a tick
_PATIENCE_NS = 100_000  # how long an answer waits for the thread that wants it


_NEVER = SimpleNamespace(done=False)


class Here(threading.local):
    """The values by which the token names this thread; 0: it has none yet."""

    waiter = 0
    """The token's value while this thread polls for a result of its own."""
    pool = 0
    """The thread's number in the pool, if it is one of the pool's."""


class Progress:
    """The polling role of one worker, and the waits of its threads. Thread-safe. Nothing is read before ``read`` is set."""

    def __init__(self, poller: Poller) -> None:
        self.poller, self.words, self.here = poller, steps.Words(poller), Here()
        self.read: Read = nobody
        self.jobs: deque[Job] = deque()
        """Jobs that the holder leaves to the pool. The pool is told by ``offer``."""
        self.offer: Job = nobody
        self.finish: Job = nobody
        """Completes the futures of the answers in ``unfinished``. The pool runs it for answers that no thread has come for
        after a while: most are taken a moment later, by a thread that is awake anyway."""
        self._finishing = False
        self.outstanding: dict[int, object] = {}
        """The calls under way (owned by the caller's side). While there are any, a waiter that has its answer lingers for the
        other answers."""
        self.unfinished: deque[Any] = deque()
        """Answers that were read and belong to futures (owned by the caller's side)."""
        # The words once more, as attributes of our own: each look through ``words`` would cost every call.
        of = self.words
        self._token, self._events, self._runs, self._asleep = of.token, of.events, of.runs, of.asleep
        self._bell, self._table, self._port = of.bell, of.table, of.port
        self.waiting: set[int] = set()
        """The numbers of those threads of the pool that wait here."""
        self.new_number: Callable[[], int] = itertools.count(1).__next__
        """Draws a number by which the token names a thread. No number is given twice."""
        self.followers: set[int] = set()
        """Threads that wait for what another one reads: they hear of it by ``completed``."""
        self._lingers_until = 0.0

    def want_finish(self) -> bool:
        """Leave the answers in ``unfinished``, of which there are some, to the pool, as one job. Returns whether that job is
        new."""
        if self._finishing:
            return False
        self._finishing = True
        self.jobs.append(self._finish)
        return True

    def _finish(self) -> None:
        self._finishing = False
        self.finish()

    def wait_for(self, awaited: Awaited, deadline: float | None = None) -> bool:
        """Make progress until ``awaited.done``; ``False`` if ``deadline`` (``time.monotonic``) passed first."""
        isinstance(None, ROOM)
        mine, pool = self.here.waiter or self._enter(), self.here.pool
        if pool in self.waiting:  # a finalizer waits in the midst of another wait
            pool = 0
        if pool:
            self.waiting.add(pool)
        try:
            while not awaited.done:
                if steps.take(self._token, mine, self._bell):
                    held, interrupted = mine, True
                    try:
                        held = self._drive(awaited, mine, deadline)
                        interrupted = False
                    finally:
                        wanted = self.outstanding or self.unfinished
                        if not (wanted and steps.start_run(self._token, held, mine - 2, self._runs, self._asleep)):
                            self._lingers_until = 0.0
                            steps.let_go(self._token, held, self._bell, self._table, self.poller.rows)
                        if self.followers:
                            steps.event(self._events)
                        if interrupted and self.jobs:  # the handler may have come before the pool was told of them
                            self.offer()
                elif kernels.load(self._token) == mine:
                    self._drive_inside(awaited, mine, deadline)
                elif self.reading:
                    raise RdmaError(
                        "a call that a finalizer makes while its thread reads messages cannot be waited for",
                        hint="do not wait there, or have a thread make the call",
                    )
                else:
                    self._follow(awaited, mine)
                if deadline is not None and not awaited.done and time.monotonic() >= deadline:
                    return False
            return True
        except BaseException:  # another thread may have raised it here as ``take`` returned
            steps.let_go(self._token, mine, self._bell, self._table, self.poller.rows)
            raise
        finally:
            if pool:
                self.waiting.discard(pool)

    def _drive_inside(self, awaited: Awaited, mine: int, deadline: float | None) -> None:
        """Read on behalf of a finalizer that has interrupted this thread's own ``_drive``, which goes on afterwards."""
        held = mine
        try:
            held = self._drive(awaited, mine, deadline)
        finally:
            kernels.swap_if(self._token, held, mine)
            self.poller.kick()  # what the interrupted wait is for may have come

    def pause(self, seconds: float) -> None:
        """Make progress for that long."""
        self.wait_for(_NEVER, time.monotonic() + seconds)

    @property
    def reading(self) -> bool:
        """Whether this thread reads the rings this moment: it must not wait for what comes through them."""
        held = kernels.load(self._token)
        return held & 3 == steps.HOLDING and held >> 3 in (self.here.waiter >> 3, self.here.pool)

    @property
    def holding(self) -> bool:
        """Whether some thread has taken messages that it may not have handled yet."""
        return kernels.load(self._token) & 3 == steps.HOLDING

    def _enter(self) -> int:
        """This thread waits for the first time."""
        self.here.waiter = 8 * self.new_number() + steps.WAITER
        return self.here.waiter

    def linger(self, now: float) -> None:
        """The caller will come back for an answer soon: take the role, as if running a function. So the answers that come in
        between wake nobody, unless the caller stays away for longer than a tick. ``now``: ``time.monotonic()``."""
        if now < self._lingers_until:
            return
        mine = self.here.waiter or self._enter()
        if steps.linger(self._token, mine - 2, self._bell, self._runs, self._asleep):
            self._lingers_until = now + _LINGER_S

    @contextlib.contextmanager
    def _aside(self, mine: int) -> Iterator[None]:
        """This thread polls, and runs a signal handler: others may take the role meanwhile, as from a function that runs."""
        steps.start_run(self._token, mine, mine - 2, self._runs, self._asleep)
        try:
            yield
        finally:
            kernels.swap_if(self._token, mine - 2, mine)

    @interruptible(unless=lambda local: local["self"].reading, around=lambda local: local["self"]._aside(local["mine"]))
    def _drive(self, awaited: Awaited, mine: int, deadline: float | None) -> int:
        """Read until ``awaited`` is done or the deadline has passed. Returns the token as it is left."""
        token, table, bell, poller, jobs = self._token, self._table, self._bell, self.poller, self.jobs
        spin, limit = kernels.SPIN, kernels.SLICE_NS
        while not awaited.done:
            patience = _PATIENCE_NS if self.unfinished else limit
            try:
                found = kernels.wait_any(table, poller.rows, bell, token, mine, spin, patience, self._port)
            except BaseException:  # another thread has raised it here, as the kernel returned
                kernels.untake(table, token, mine)
                raise
            if found >= 0:
                try:
                    self.read(found >> 32, found & 0xFFFFFFFF)
                    if awaited.done and not jobs:
                        return mine + steps.HOLDING
                except BaseException:
                    kernels.store(token, mine)
                    raise
                kernels.store(token, mine)
                if jobs:
                    self.offer()
                if deadline is not None and time.monotonic() >= deadline:  # messages of others may never end
                    return mine
                continue
            if found == kernels.CHANGED:  # a signal handler took long, and others have the role
                return mine
            if self.unfinished and self.want_finish():
                self.offer()
            if deadline is not None:
                left = int((deadline - time.monotonic()) * 1e9)
                if left <= 0:
                    return mine
                limit = min(limit, left)
        return mine

    @interruptible()
    def _follow(self, awaited: Awaited, mine: int) -> None:
        seen = kernels.load(self._events)
        self.followers.add(mine)
        try:
            if not awaited.done:
                steps.follow(self._token, self._events, seen, kernels.SPIN_MIN_NS, kernels.SLICE_NS // 10)
        finally:
            self.followers.discard(mine)

    def completed(self) -> None:
        """Something that another thread may wait for is done. Cheap when nobody does."""
        if self.followers:
            steps.event(self._events)

    def interrupt(self) -> None:
        """Make every waiter look again whether it is done."""
        steps.event(self._events)
        self.poller.kick()

    def end(self) -> None:
        """Read nothing any more, and forget the callbacks of the reader and the pool."""
        self.read, self.offer, self.finish = nobody, nobody, nobody
