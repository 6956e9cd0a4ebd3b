"""Graceful shutdown: how the workers of a group agree that no call is under way anywhere."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..base import here
from ..base.futures import fail
from ..functions import TOLD_WHO
from ..message import gpu
from ..transport import NotSupported, RdmaError, TransferTimeout, fresh, kept

_LEAVE_TIMEOUT_S, _SPEAKS_S = 5.0, 10.0
_IDLE_POLL_S, _ROUND_PAUSE_S = 0.005, 0.05


class Termination:
    """Graceful shutdown: all workers keep serving until none has anything left to do (rank 0 decides).

    Mattern's four counters ("Algorithms for distributed termination detection", 1987): a worker that is idle reports how
    many requests it sent and answered. When the sums over all workers agree, and are those of the round before, no request
    is under way.
    """

    def __init__(self, agent: Any) -> None:
        """``agent``: the ``Agent`` that leaves, with all parts of it that have to come to an end first."""
        self._agent = weakref.proxy(agent)
        self._reports: dict[int, dict[int, tuple[int, int, torch.futures.Future[bool]]]] = {}
        self._round = 0
        self._last: tuple[int, int] | None = None
        self._error: RdmaError | None = None
        self._waiting: threading.Event | None = None
        self._lock = threading.Lock()
        self._beginning, self._beginner, self._speaks = threading.Lock(), 0, math.inf
        self.over = threading.Event()
        """Set once this worker has left."""

    def begin(self, timeout: float) -> bool:
        """Whether this thread is to shut down. ``False`` if another one did meanwhile, for which it waits, or if it is at that
        already, and this is a signal handler. ``NotSupported`` in what shutdown would wait for."""
        pool = self._agent.pool
        if pool.slot in pool.running:
            raise NotSupported(
                "shutdown waits for functions and callbacks that run here, and is called by one of them",
                hint="call it in the main thread, or shutdown(graceful=False), which waits for nobody",
            )
        if self._beginning.acquire(blocking=False):
            self._beginner, self._speaks = threading.get_ident(), time.monotonic() + _SPEAKS_S
            return True
        if self._beginner != threading.get_ident() and not self.over.wait(timeout or None):
            raise TransferTimeout("another thread's shutdown is not over", hint="shutdown(timeout=) sets the limit")
        return False

    def report(self, number: int, rank: int, sent: int, answered: int) -> torch.futures.Future[bool]:
        """Take a worker's counts in round ``number`` (on rank 0). The future completes with whether all is done."""
        future: torch.futures.Future[bool] = torch.futures.Future()
        with self._lock:
            if self._error is not None:
                fail(future, self._error)
                return future
            if number != self._round:
                raise RuntimeError(f"round {number} of the shutdown is reported in round {self._round}")
            reports = self._reports.setdefault(number, {})
            reports[rank] = (sent, answered, future)
            if len(reports) < len(self._agent.workers):
                return future
            del self._reports[number]
            self._round += 1
            totals = sum(item[0] for item in reports.values()), sum(item[1] for item in reports.values())
            done = totals[0] == totals[1] and totals == self._last
            self._last = totals
        for _, _, waiting in reports.values():
            waiting.set_result(done)
        return future

    def fail(self, error: RdmaError) -> None:
        """A worker was lost: no graceful end is possible any more."""
        with self._lock:
            self._error = self._error or error
            reports, self._reports = self._reports, {}
        for entries in reports.values():
            for _, _, waiting in entries.values():
                fail(waiting, error)
        if self._waiting is not None:
            self._waiting.set()

    def part(self, deadline: float | None, leaves: Callable[[], None]) -> None:
        """Serve until nothing is left to do, anywhere (in a dynamic group: here), and take leave. ``leaves()`` is called when
        functions here need nothing of other workers any more, and these are still there. Raises ``RdmaError`` where that cannot
        be: what others wait for here has had its time then."""
        agent = self._agent
        try:
            agent.rrefs.collect()
            if agent.group.dynamic:
                self._leave(deadline)
                return
            self.wait(deadline)
            self._finish(deadline)  # rank 0 knows its own answer before it has sent all others theirs
            leaves()
            if agent.timeline is not None:
                agent.timeline.gather(deadline)
            agent.group.part()
        except RdmaError as error:
            self.fail(kept(error))  # for the workers that have come already, and wait for all others
            # Others may still wait for functions that run here.
            self._finish(deadline)
            raise

    def _leave(self, deadline: float | None) -> None:
        """Leave a dynamic group: our own calls end first; then no new caller finds us, and earlier callers get their
        answers."""
        agent = self._agent
        while not agent.caller.idle:
            self._sleep(threading.Event(), deadline, _IDLE_POLL_S, own=True)
        agent.group.leave()
        self._finish(deadline)

    def _finish(self, deadline: float | None) -> None:
        """Let functions that run here for others end, and their results be fetched, also from our GPU memory, which goes with
        our process: for seconds, not for ever."""
        agent = self._agent
        _wait_until(lambda: agent.idle and agent.callee.settled and agent.links.flushed, deadline)
        _wait_until(lambda: gpu.current is None or gpu.current.settled, deadline)

    def wait(self, deadline: float | None) -> None:
        """Keep serving until all workers are done. The calling thread sleeps: it must not compete with the pool."""
        agent = self._agent
        leader = agent.workers[0]
        if agent.me.id == 0:
            for info in agent.workers:
                if info.id:
                    agent.connections.to(info.number, deadline)
        for number in itertools.count():
            # After a loss others may never let go of a function that runs here.
            while not agent.idle and self._error is None:
                self._sleep(threading.Event(), deadline, 0.001, own=number == 0)
            self._check()
            arrived = self._waiting = threading.Event()
            if number == 0:  # a call would wait for that for as long as it takes
                agent.connections.to(leader.number, deadline)
            _, sent, answered, *_ = agent.links.counts
            future = agent.call_async(leader, _report, (number, sent, answered), None, 0, control=True)
            future.add_done_callback(lambda _, arrived=arrived: arrived.set())
            self._check()
            while not arrived.is_set():
                self._sleep(arrived, deadline, 0.1)
            try:
                if future.done() and future.wait():
                    return  # whoever was lost since
            except RdmaError:
                self._check()
                raise
            self._check()
            time.sleep(min(_ROUND_PAUSE_S, number / 1e3))  # a call may stay unanswered for long

    def _check(self) -> None:
        if self._error is not None:
            raise fresh(self._error)

    def _sleep(self, event: threading.Event, deadline: float | None, seconds: float, own: bool = False) -> None:
        event.wait(seconds)
        now, agent = time.monotonic(), self._agent
        if own and now > self._speaks and not (agent.caller.idle or agent.pool.busy):  # functions here may be why
            self._speaks = math.inf
            whom = {pending.link.name for pending in list(agent.caller.pending.values()) if not pending.control}
            logging.getLogger("rdmarpc").warning("shutdown waits for the answers of calls to %s", ", ".join(sorted(whom)))
        if deadline is not None and now > deadline:
            raise TransferTimeout(self._late(own), hint="shutdown(timeout=) sets the limit; rdmarpc.explain() says what runs")

    def _late(self, own: bool) -> str:
        """What shutdown still waits for, as far as is known here: rank 0 has all reports. ``own``: for this worker itself."""
        agent = self._agent
        with self._lock:
            came, last = self._reports.get(self._round, {}), self._last
        if last is not None:
            return f"every worker came to shutdown, but of {last[0]} calls only {last[1]} are answered"
        if own:
            return "calls or functions of this worker are still under way"
        if agent.me.id:
            return "not every worker came to shutdown in time, or calls are still under way"
        return f"{', '.join(info.name for info in agent.workers if info.id not in came)} did not come to shutdown in time"


def _wait_until(settled: Callable[[], bool], deadline: float | None) -> None:
    """For ``_LEAVE_TIMEOUT_S`` at most."""
    limit = time.monotonic() + _LEAVE_TIMEOUT_S
    limit = limit if deadline is None else min(limit, deadline)
    while not settled() and time.monotonic() < limit:
        time.sleep(_IDLE_POLL_S)


def _report(sender: int, number: int, sent: int, answered: int) -> torch.futures.Future[bool]:
    me = here.current()
    return me.termination.report(number, me.group.worker(sender).id, sent, answered)


_report._wrapped_async_rpc_function = TOLD_WHO  # type: ignore[attr-defined]
