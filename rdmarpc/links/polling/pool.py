"""The threads that run functions and jobs, without handing work from thread to thread.

A waiter that holds the polling role (``progress``) leaves the requests that it finds to the pool. One thread of the pool gets
them all; the watchdog calls another if that one takes none for a tick.

When nobody waits, a thread of the pool has the role. What it reads it runs itself, at once, on the same thread. While a
function runs, a waiter may take the role away, and the watchdog does so after a tick (``_TICK_NS``), so that a function that
blocks or calls back delays the others by that much only. No thread is woken for a short function.

Functions that call other workers and wait can fill a pool: if what they wait for needs a thread here, nothing would ever move.
So when all threads have waited for ``_STUCK_S`` and jobs wait too, threads that wait stop counting (``relieved``) until fewer
functions run than the limit says. A pool of one thread is not relieved: its functions may count on running one after the other.

Order of locks: none but ``_spawn_lock``, inside which nothing is waited for. The job queue is a ``deque`` (append and popleft
are atomic under the GIL); everything else is words.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

import torch

from ...transport import Guard, kernels, nobody
from . import steps
from .modes import clear, left
from .progress import Job, Progress

_TICK_NS = 200_000
_IDLE_TICKS = 50
_SECOND_NS = 1_000_000_000
_END_S = 1.0
_STUCK_S = 1.0
_MOST_THREADS = 1000


class Pool:
    """The threads of one worker. ``threads``: how many user functions may run at once. Nothing runs before ``start``."""

    def __init__(self, progress: Progress, threads: int, name: str) -> None:
        self._progress, self._limit, self._name = progress, threads, name
        self.jobs = progress.jobs
        """Jobs for the threads of the pool. The thread that reads the rings appends to it; other threads call ``submit``."""
        self._owed: deque[Job] = deque()
        """Jobs that somebody may wait for. Each has a ``_run_owed`` among ``jobs``; ``end`` runs what the pool left."""
        self._ended = False
        self._words = progress.words
        self._token, self._bell = self._words.token, self._words.bell
        self.running: set[int] = set()
        """The numbers of the threads that run a function; ``idle`` has those of threads without work."""
        self.idle: set[int] = set()
        self._at_work: set[int] = set()
        """Threads that will look for another job when they have done theirs."""
        self._stands_by = 0
        """The thread that sleeps on the bell, for a message that finds the token free; 0: none."""
        self._called = False
        """One was woken for jobs and has not arrived yet."""
        self.threads: list[threading.Thread] = []
        self._guard = Guard(name)
        self._spawn_lock = threading.Lock()
        self._stopping = False
        self.relieved = 0
        """How often threads were added because all that there may be waited for other workers."""
        self._relief = False
        self._oldest: tuple[Job | None, float] = None, 0.0
        """The job that waited first at the watchdog's last looks, and since when (s) it has been that one."""
        progress.offer = self._offer

    def start(self) -> None:
        """Start the threads. From now on they read the rings."""
        for _ in range(2):
            self._spawn()
        watchdog = threading.Thread(target=self._watch, name=f"{self._name}-watch", daemon=True)
        try:
            watchdog.start()
        except BaseException:
            self.stop()
            raise
        self.threads.append(watchdog)

    @property
    def slot(self) -> int:
        """The number of the calling thread in the pool; 0 if it is not one of the pool's."""
        return self._progress.here.pool

    def submit(self, job: Job) -> None:
        """Have the pool run ``job`` soon."""
        self.jobs.append(job)
        self.call_out()

    def owe(self, job: Job) -> None:
        """``submit`` a job that a thread may wait for: it runs even if the pool ends before. After ``end`` it runs at once, on
        the calling thread."""
        self._owed.append(job)
        if not self._ended:
            self.jobs.append(self._run_owed)
            if not self._progress.reading:  # the reader looks at the jobs itself when it has read
                self.call_out()
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
        return bool(self.jobs or self.running)

    def call_out(self) -> None:
        """Announce that there are jobs: a free thread looks for them."""
        if not self.idle:
            self._spawn()
        steps.call_out(self._words.jobs, self._bell)

    def _offer(self) -> None:
        """Tell the pool that the poller has appended jobs. A thread that is at work takes them when it can: waking another one
        for each job would cost more than most functions take. The watchdog wakes another one if that thread is stuck."""
        if self._called or self._at_work:
            steps.leave_to_watchdog(self._words.backlog, self._words.asleep)
            return
        self._called = True
        if not self.idle:
            self._spawn()
        steps.call_one(self._words.jobs, self._bell)

    def _spawn(self) -> None:
        with self._spawn_lock:
            # One more than may run functions: it reads the rings when all others are busy.
            extra = min(len(self._progress.waiting), _MOST_THREADS) if self._relief else 0
            if self._stopping or len(self.threads) > self._limit + 1 + extra:
                return
            number = self._progress.new_number()
            thread = threading.Thread(target=self._pool, args=(number,), name=f"{self._name}-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads: those that there are go on
                if not self.threads:
                    raise
                if threading.main_thread().is_alive():  # not at the interpreter's end (Python 3.12)
                    self._guard.note(error, "starting another thread")
                return
            self.threads.append(thread)

    def _run_one(self, number: int) -> bool:
        """Run the oldest job, if there is one."""
        self.running.add(number)
        try:
            job = self.jobs.popleft()
        except IndexError:
            self.running.discard(number)
            return False
        try:
            job()
            if left():
                clear()
        except BaseException as error:
            # Jobs report their errors to those that wait for them; this is a bug of ours and must not end the thread.
            self._guard.note(error, "running a job")
        finally:
            self.running.discard(number)
            if self._relief and len(self.running) < self._limit:
                self._relief = False
        return True

    @property
    def _full(self) -> bool:
        """Whether no other job may begin. (Code that runs for every call looks at the first half itself.)"""
        return len(self.running) >= self._limit and not (
            self._relief and len(self.running - self._progress.waiting) < self._limit
        )

    def _pool(self, number: int) -> None:
        # A new thread has OpenMP's own idea of how many threads there are until it first asks torch; results depend on it.
        torch.get_num_threads()
        mine = 8 * number + steps.POLLING
        self._progress.here.pool = number
        while not self._stopping:
            seen = kernels.load(self._words.jobs)
            self._called = False
            self._at_work.add(number)
            if self._progress.unfinished:
                self._progress.want_finish()
            while self.jobs:
                if not self._stands_by:
                    # Somebody has to look after the rings, and the next job, should this one block.
                    steps.leave_to_watchdog(self._words.backlog, self._words.asleep)
                steps.show(self._words.runs, self._words.asleep)
                if self._full or not self._run_one(number):
                    break
            self._at_work.discard(number)
            if steps.take(self._token, mine, self._bell):
                self._poll(number, mine)
                continue
            self.idle.add(number)
            with self._spawn_lock:
                self._stands_by = self._stands_by or number
            if self._stands_by == number:
                steps.stand_by(self._token, self._bell, self._words.jobs, seen, _SECOND_NS)
                self._stands_by = 0
            else:
                steps.spare(self._words.jobs, seen, _SECOND_NS)
            self.idle.discard(number)

    def _poll(self, number: int, mine: int) -> None:
        progress, poller, jobs = self._progress, self._progress.poller, self.jobs
        token, bell, of = self._token, self._bell, self._words
        table, port, runs, asleep = of.table, of.port, of.runs, of.asleep
        held, running = mine + steps.HOLDING, mine + steps.RUNNING
        while not self._stopping:
            found = kernels.wait_any(table, poller.rows, bell, token, mine, kernels.SPIN, _SECOND_NS, port)
            if found == kernels.CHANGED:
                return
            if found == kernels.TIMEOUT:
                continue
            try:
                progress.read(found >> 32, found & 0xFFFFFFFF)
            except BaseException as error:  # the token is ours: nobody would read any more
                self._guard.note(error, "reading messages")
            if progress.unfinished:
                progress.want_finish()
            while jobs and (len(self.running) < self._limit or not self._full):
                steps.start_run(token, held, running, runs, asleep)
                self._run_one(number)
                if not kernels.swap_if(token, running, held):
                    return
            kernels.store(token, mine)
        steps.let_go(token, mine, bell, table, poller.rows)

    def _watch(self) -> None:
        while not self._stopping:
            try:
                found = steps.watch(
                    self._token, self._words.runs, self._words.asleep, self._words.backlog, self._bell, _TICK_NS, _IDLE_TICKS
                )
                if found and not self._stands_by:
                    self.call_out()
                elif found == 2 and self.jobs:
                    self.call_out()
                    if not self._full:
                        steps.leave_to_watchdog(self._words.backlog, self._words.asleep)
                self._relieve()
            except BaseException as error:
                self._guard.note(error, "looking for threads that are held up")

    def _relieve(self) -> None:
        """Let more functions run if all of those that may run wait for other workers, and have for a while."""
        jobs, now = list(self.jobs)[:1], time.monotonic()
        oldest = jobs[0] if jobs and self._limit > 1 and self._full and self.running <= self._progress.waiting else None
        if oldest is None or oldest is not self._oldest[0]:
            self._oldest = oldest, now
        elif now - self._oldest[1] >= _STUCK_S and not self._relief:
            self.relieved += 1
            self._relief = True
            if self.relieved == 1:
                why = "all %d threads wait for other workers while requests wait for a thread: more threads run these"
                logging.getLogger("rdmarpc").warning(why + " (num_worker_threads)", self._limit)
            self.call_out()
            steps.leave_to_watchdog(self._words.backlog, self._words.asleep)

    def stop(self) -> None:
        """End the threads. Returns when all but the caller's own have ended, or after a second: a thread inside a user
        function cannot be ended (it is a daemon)."""
        self._stopping = True
        kernels.store(self._words.asleep, 0)
        deadline = time.monotonic() + 1.0
        for thread in list(self.threads):
            while thread is not threading.current_thread() and thread.is_alive() and time.monotonic() < deadline:
                steps.call_out(self._words.jobs, self._bell)
                steps.event(self._words.events)
                steps.event(self._words.asleep)
                thread.join(0.01)

    def end(self) -> None:
        """Drop the requests that the pool has left, and run its owed jobs, for a second at most, as users' callbacks may block.
        Call it after ``stop``, when nothing can be sent or come any more."""
        self._ended = True
        self.jobs.clear()
        if self._owed or self._progress.unfinished:
            thread = threading.Thread(
                target=self._run_rest, args=(self._progress.finish,), name=f"{self._name}-end", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the interpreter ends: it starts no threads any more, and nobody waits
                return
            thread.join(_END_S)
        self._progress.finish = nobody

    def _run_rest(self, finish: Job) -> None:
        while self._owed:
            try:
                self._run_owed()
            except BaseException as error:
                self._guard.note(error, "running a job")
        finish()
