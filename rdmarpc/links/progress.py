"""Whoever waits, polls: how messages get read and functions get run without handing work from thread to thread.

One thread at a time holds the polling role (the token of ``words``):

* A thread that waits for a result takes the role and reads the rings itself, until its result is there. Requests that it
  finds meanwhile it leaves to the pool: it must not run a function that may block for what it would do next.
  One pool thread gets them all; the watchdog calls another if that one takes none for a tick.
* When nobody waits, a pool thread has the role. What it reads it runs itself, at once, on the same thread. While a function
  runs, a waiter may take the role away, and a watchdog does so after a tick (``_TICK_NS``), so that a function that blocks
  or calls back delays the others by that much only. No thread is woken for a short function.

Order of locks: none. The job queue is a ``deque`` (append and popleft are atomic under the GIL); everything else is words.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from ..transport import Poller
from ..transport.peers.ended import nobody
from ..transport.peers.guard import Guard
from ..transport.words import kernels
from . import words

_TICK_NS = 200_000
_IDLE_TICKS = 50
_LINGER_S = 50e-6  # how long a lingering caller need not show that it is still there: less than a tick
_SECOND_NS = 1_000_000_000
_PATIENCE_NS = 100_000  # how long an answer waits for the thread that wants it
_END_S = 1.0
_LINE = 8  # int64 words a cache line

Job = Callable[[], None]


class Awaited(Protocol):
    @property
    def done(self) -> bool: ...


class _Never:
    done = False


_NEVER = _Never()


class Progress:
    """``threads``: user functions that may run at once. Nothing is read, and nothing runs, before ``start``."""

    def __init__(self, poller: Poller, threads: int, name: str) -> None:
        self._poller, self._limit, self._name = poller, threads, name
        self._read: Callable[[int, int], None] = nobody
        self.jobs: deque[Job] = deque()
        self._owed: deque[Job] = deque()
        """Jobs that somebody may wait for. Each has a ``_run_owed`` among ``jobs``; ``end`` runs what the pool left."""
        self._ended = False
        self.outstanding: dict[int, object] = {}
        """Calls under way (owned by the caller's side): whether a waiter that has its answer should linger for others."""
        self.unfinished: deque[Any] = deque()
        """Answers that were read and belong to futures (owned by the caller's side). ``finish`` completes these. The pool does
        so if nobody has come for them after a while: most are waited for a moment later, by a thread that is awake anyway."""
        self.finish: Job = lambda: None
        self._finishing = False
        self._words = np.zeros(7 * _LINE, np.int64)
        base = -(-self._words.ctypes.data // 64) * 64
        self._token, self._jobs_word, self._events, self._runs, self._asleep, self._backlog = (
            base + 64 * at for at in range(6)
        )
        self._bell, self._table, self._port = poller.bell_address, poller.address, poller.port
        kernels.add(self._bell + 8, 1)  # the free token counts as a sleeper
        self._numbers = itertools.count(1)
        self._local = threading.local()
        self._running: set[int] = set()
        self._idle: set[int] = set()
        self._at_work: set[int] = set()
        """Pool threads that will look for another job when they have done theirs."""
        self._stands_by = 0
        """The pool thread that sleeps on the bell, for a message that finds the token free; 0: none."""
        self._called = False
        """One was woken for jobs and has not arrived yet."""
        self._followers: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._guard = Guard(name)
        self._spawn_lock = threading.Lock()
        self._lingers_until = 0.0
        self._stopping = False

    def start(self, read: Callable[[int, int], None]) -> None:
        """``read(row, fresh)`` is called by the holder of the role for every row of the poller with news; it must not block."""
        self._read = read
        for _ in range(2):
            self._spawn()
        watchdog = threading.Thread(target=self._watch, name=f"{self._name}-watch", daemon=True)
        try:
            watchdog.start()
        except BaseException:
            self.stop()
            raise
        self._threads.append(watchdog)

    # -- waiting

    def wait_for(self, awaited: Awaited, deadline: float | None = None) -> bool:
        """Make progress until ``awaited.done``; ``False`` if ``deadline`` (``time.monotonic``) passed first."""
        mine = self._waiter()
        while not awaited.done:
            if words.take(self._token, mine, self._bell):
                held = mine
                try:
                    held = self._drive(awaited, mine, deadline)
                finally:
                    wanted = self.outstanding or self.unfinished
                    if not (wanted and words.start_run(self._token, held, mine - 2, self._runs, self._asleep)):
                        self._lingers_until = 0.0
                        words.let_go(self._token, held, self._bell, self._table, self._poller.rows)
                    if self._followers:
                        words.event(self._events)
            else:
                self._follow(awaited, mine)
            if deadline is not None and not awaited.done and time.monotonic() >= deadline:
                return False
        return True

    def pause(self, seconds: float) -> None:
        """Make progress for that long."""
        self.wait_for(_NEVER, time.monotonic() + seconds)

    @property
    def reading(self) -> bool:
        """Whether this thread reads the rings this moment: it must not wait for what comes through them."""
        held = kernels.load(self._token)
        local = self._local.__dict__
        return held & 3 == words.HOLDING and held >> 3 in (local.get("waiter", 0) >> 3, local.get("pool", 0))

    @property
    def slot(self) -> int:
        """Which thread of the pool this one is; 0: none."""
        return self._local.__dict__.get("pool", 0)

    def others_run(self, besides: set[int]) -> bool:
        """Whether functions run on threads of the pool other than these (by ``slot``)."""
        return bool(self._running - besides)

    def _waiter(self) -> int:
        try:
            return self._local.waiter
        except AttributeError:
            self._local.waiter = 8 * next(self._numbers) + words.WAITER
            return self._local.waiter

    def linger(self, now: float) -> None:
        """The caller will come back for an answer soon: take the role, as if running a function. So the answers that come in
        between wake nobody, unless the caller stays away for longer than a tick. ``now``: ``time.monotonic()``."""
        if now < self._lingers_until:
            return
        if words.linger(self._token, self._waiter() - 2, self._bell, self._runs, self._asleep):
            self._lingers_until = now + _LINGER_S

    def _drive(self, awaited: Awaited, mine: int, deadline: float | None) -> int:
        """Read until ``awaited`` is done or the deadline has passed. Returns the token as it is left."""
        token, table, bell, poller = self._token, self._table, self._bell, self._poller
        spin, limit = kernels.SPIN, kernels.SLICE_NS
        while not awaited.done:
            patience = _PATIENCE_NS if self.unfinished else limit
            found = kernels.wait_any(table, poller.rows, bell, token, mine, spin, patience, self._port)
            if found >= 0:
                try:
                    self._read(found >> 32, found & 0xFFFFFFFF)
                except BaseException:
                    kernels.store(token, mine)
                    raise
                if awaited.done and not self.jobs:
                    return mine + words.HOLDING
                kernels.store(token, mine)
                if self.jobs:
                    self._offer()
                if deadline is not None and time.monotonic() >= deadline:  # messages of others may never end
                    return mine
                continue
            if self._want_finish():
                self._offer()
            if deadline is not None:
                left = int((deadline - time.monotonic()) * 1e9)
                if left <= 0:
                    return mine
                limit = min(limit, left)
        return mine

    def _follow(self, awaited: Awaited, mine: int) -> None:
        seen = kernels.load(self._events)
        self._followers.add(mine)
        try:
            if not awaited.done:
                words.follow(self._token, self._events, seen, kernels.SPIN_MIN_NS, kernels.SLICE_NS // 10)
        finally:
            self._followers.discard(mine)

    def completed(self) -> None:
        """Something that another thread may wait for is done. Cheap when nobody does."""
        if self._followers:
            words.event(self._events)

    def interrupt(self) -> None:
        """Make every waiter look again whether it is done."""
        words.event(self._events)
        self._poller.kick()

    # -- running

    def submit(self, job: Job) -> None:
        """Have the pool run ``job`` soon."""
        self.jobs.append(job)
        self._call_out()

    def owe(self, job: Job) -> None:
        """``submit`` a job that somebody may wait for: it runs even if the pool ends before. After ``end``: here and now."""
        self._owed.append(job)
        if not self._ended:
            self.submit(self._run_owed)
        if self._ended:  # maybe only since
            self._run_owed()

    def _run_owed(self) -> None:
        try:
            job = self._owed.popleft()
        except IndexError:  # another thread was faster
            return
        job()

    @property
    def busy(self) -> bool:
        """Whether functions run or wait to run."""
        return bool(self.jobs or self._running)

    def _call_out(self) -> None:
        if not self._idle:
            self._spawn()
        words.call_out(self._jobs_word, self._bell)

    def _want_finish(self) -> bool:
        """Leave the answers that nobody has come for to the pool, as one job. Whether that job is new."""
        if not self.unfinished or self._finishing:
            return False
        self._finishing = True
        self.jobs.append(self._finish)
        return True

    def _finish(self) -> None:
        self._finishing = False
        self.finish()

    def _offer(self) -> None:
        """Jobs for the pool, from the poller itself. A thread that is at work takes them when it can: waking another for each
        would cost more than most functions take. The watchdog does so if that thread is stuck."""
        if self._called or self._at_work:
            words.leave_to_watchdog(self._backlog, self._asleep)
            return
        self._called = True
        if not self._idle:
            self._spawn()
        words.call_one(self._jobs_word, self._bell)

    def _spawn(self) -> None:
        with self._spawn_lock:
            # One more than may run functions: it reads the rings when all others are busy.
            if self._stopping or len(self._threads) > self._limit + 1:
                return
            number = next(self._numbers)
            thread = threading.Thread(target=self._pool, args=(number,), name=f"{self._name}-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads: those that there are go on
                if not self._threads:
                    raise
                self._guard.note(error, "starting another thread")
                return
            self._threads.append(thread)

    def _run_one(self, number: int) -> bool:
        """Run the oldest job, if there is one and the limit allows it."""
        if not self.jobs or len(self._running) >= self._limit:
            return False
        self._running.add(number)
        try:
            job = self.jobs.popleft()
        except IndexError:
            self._running.discard(number)
            return False
        try:
            job()
        except BaseException as error:
            # Jobs report their errors to whoever waits for them; this is a bug of ours and must not end the thread.
            self._guard.note(error, "running a job")
        finally:
            self._running.discard(number)
        return True

    def _pool(self, number: int) -> None:
        # A new thread has OpenMP's own idea of how many threads there are until it first asks torch; results depend on it.
        torch.get_num_threads()
        mine = 8 * number + words.POLLING
        self._local.pool = number
        while not self._stopping:
            seen = kernels.load(self._jobs_word)
            self._called = False
            self._at_work.add(number)
            self._want_finish()
            while self.jobs:
                if not self._stands_by:
                    # Somebody has to look after the rings, and the next job, should this one block.
                    words.leave_to_watchdog(self._backlog, self._asleep)
                words.show(self._runs, self._asleep)
                if not self._run_one(number):
                    break
            self._at_work.discard(number)
            if words.take(self._token, mine, self._bell):
                self._poll(number, mine)
                continue
            self._idle.add(number)
            with self._spawn_lock:
                self._stands_by = self._stands_by or number
            if self._stands_by == number:
                words.stand_by(self._token, self._bell, self._jobs_word, seen, _SECOND_NS)
                self._stands_by = 0
            else:
                words.spare(self._jobs_word, seen, _SECOND_NS)
            self._idle.discard(number)

    def _poll(self, number: int, mine: int) -> None:
        token, table, bell, poller, jobs = self._token, self._table, self._bell, self._poller, self.jobs
        held, running = mine + words.HOLDING, mine + words.RUNNING
        while not self._stopping:
            found = kernels.wait_any(table, poller.rows, bell, token, mine, kernels.SPIN, _SECOND_NS, self._port)
            if found == kernels.CHANGED:
                return
            if found == kernels.TIMEOUT:
                continue
            try:
                self._read(found >> 32, found & 0xFFFFFFFF)
            except BaseException as error:  # the token is ours: nobody would read any more
                self._guard.note(error, "reading messages")
            self._want_finish()
            while jobs and len(self._running) < self._limit:
                words.start_run(token, held, running, self._runs, self._asleep)
                self._run_one(number)
                if not kernels.swap_if(token, running, held):
                    return
            kernels.store(token, mine)
        words.let_go(token, mine, bell, table, poller.rows)

    def _watch(self) -> None:
        while not self._stopping:
            try:
                self._look()
            except BaseException as error:
                self._guard.note(error, "looking for threads that are held up")

    def _look(self) -> None:
        found = words.watch(self._token, self._runs, self._asleep, self._backlog, self._bell, _TICK_NS, _IDLE_TICKS)
        if found and not self._stands_by:
            self._call_out()
        elif found == 2 and self.jobs:
            self._call_out()
            if len(self._running) < self._limit:
                words.leave_to_watchdog(self._backlog, self._asleep)

    def stop(self) -> None:
        """End the threads. Returns when all but the caller's own have ended, or after a second: a thread inside a user
        function cannot be ended (it is a daemon)."""
        self._stopping = True
        kernels.store(self._asleep, 0)
        deadline = time.monotonic() + 1.0
        for thread in list(self._threads):
            while thread is not threading.current_thread() and thread.is_alive() and time.monotonic() < deadline:
                words.call_out(self._jobs_word, self._bell)
                words.event(self._events)
                words.event(self._asleep)
                thread.join(0.01)

    def end(self) -> None:
        """After ``stop``, and when nothing can be sent or come any more: what the pool did not come to is dropped (requests) or
        run now (what is owed). For a second at most: users' callbacks may block."""
        self._ended = True
        self.jobs.clear()
        if self._owed or self.unfinished:
            thread = threading.Thread(target=self._run_rest, args=(self.finish,), name=f"{self._name}-end", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter ends: it starts no threads any more, and nobody waits
                return
            thread.join(_END_S)
        self._read, self.finish = nobody, nobody

    def _run_rest(self, finish: Job) -> None:
        while self._owed:
            try:
                self._run_owed()
            except BaseException as error:
                self._guard.note(error, "running a job")
        finish()
