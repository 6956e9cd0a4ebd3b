"""The calls of a group in the order in which they were made, each run by its caller or by a thread of the group.

One call runs at a time. A caller that waits anyway runs its call itself if no other is before it. Else a thread does, and then
runs the callbacks of the call's future; what they call runs there at once, before the next call begins. So ranks agree on the
order of calls that callbacks make: as long as the next call could go first, equal ones went to each other's places.

Who makes a call: the program, or a callback of a future; and calls that ranks may have in different orders.

A callback runs when its call is over, which is sooner at one rank than at another. Those of a group's own calls run before its
next call. What callbacks of other groups and of messages call has no such place among the calls of the program: equal ones went
to each other's places, silently. The program has one order at all ranks. So if ranks differ, one of them makes the call of the
callback behind another that came after the callback's future was asked for; that rank refuses it."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..transport import NotSupported, TransferTimeout, fresh, kept, nobody, timeouts
from .engine import aside

stamps = itertools.count(1)
"""Calls, and futures that were asked for, in the order in which this process made them. ``next`` is atomic."""
PROGRAM = 0


class Caller(NamedTuple):
    """A callback. Those of one ``origin`` run in one order at all ranks: of a group's calls. Messages have one each."""

    origin: int
    since: int
    """When its future was asked for; if a callback did that, when that one's was."""
    text: str


class _Here(threading.local):
    caller: Caller | None = None
    """The callback that this thread runs. One that a callback adds to a future that is over runs at once, as part of it."""
    work: Work | None = None
    """The call whose callbacks this thread of a queue runs."""


here = _Here()


class Order:
    """Calls that all ranks have to make in one order. Used by one thread at a time."""

    __slots__ = ("_of_callbacks", "_of_program")

    def __init__(self) -> None:
        self._of_program = (0, "")
        self._of_callbacks: dict[int, tuple[int, str]] = {}
        """The last calls of the last two origins."""

    def add(self, what: str) -> None:
        """This thread makes the next call. Raises ``NotSupported`` if a callback makes it behind one that it did not wait for,
        nor that one for it."""
        caller = here.caller
        if caller is None:
            self._of_program = (next(stamps), what)
            return
        last = {PROGRAM: self._of_program, **self._of_callbacks}
        late = [each for origin, each in last.items() if origin != caller.origin and each[0] > caller.since]
        if late:
            raise NotSupported(
                f"{what} by a callback of {caller.text} comes behind {max(late)[1]}, which was called after that: other ranks "
                "may have the two in another order",
                hint="wait for the callback's future before the next call, or have callbacks call their own group only",
            )
        self._of_callbacks.pop(caller.origin, None)
        self._of_callbacks[caller.origin] = (next(stamps), what)
        while len(self._of_callbacks) > 2:
            del self._of_callbacks[next(iter(self._of_callbacks))]


_IDLE_S = 5.0
_PATIENCE_S = 30.0
"""So long callbacks that call nothing hold up the next call. One that waits for it would wait for ever."""
_log = logging.getLogger("rdmarpc")
Run = Callable[[], Any]
_dropped: deque[Work] = deque(maxlen=1024)
"""See ``Work.__del__``."""
_SMALL = 4096


class Work(dist.Work):
    """A call under way, or one that has ended. Thread-safe. ``threaded``: a thread of the group runs it, and so may be the last
    to hold it."""

    # Most calls end without any of these being set, and to set one costs as much as a short call of C.
    source = -1
    over = threaded = _waited = _dropped = False
    error: BaseException | None = None
    _event: threading.Event | None = None
    _future: torch.futures.Future[Any] | None = None
    _ended: torch.futures.Future[None] | None = None
    """What ``_future`` follows."""
    origin = _since = 0
    """For ``Caller``. Without an origin it is one of its own."""

    def __init__(self, run: Run, outputs: Sequence[torch.Tensor], describe: str) -> None:
        super().__init__()
        self.run, self.outputs, self._text = run, outputs, describe
        self._lock = threading.Lock()

    @property
    def describe(self) -> str:
        """The call, for people."""
        return self._text

    def finish(self, error: BaseException | None, give: Callable[[], object] | None = None) -> None:
        """End it, and run callbacks. ``give`` is called before if there are none: those that are added later run where they are
        added."""
        with self._lock:
            if give is not None and self._ended is None:
                give()
            self.error, self.over = None if error is None else kept(error), True  # its frames hold the group
            self.run = nobody  # what it holds may be large
            ended = self._ended
        if ended is None:
            self._wake()
        else:
            before, here.caller = here.caller, Caller(self.origin or next(stamps), self._since, self.describe)
            try:
                ended.set_result(None)
            finally:
                here.caller = before
        if self._dropped:
            self._let_go()

    def _wake(self, _: object = None) -> None:
        if self._event is not None:
            self._event.set()

    @property
    def _told(self) -> bool:
        """Whether it has ended, and its future says so: who has waited asks that next."""
        return self.over and (self._future is None or self._future.done())

    def __del__(self) -> None:
        """A call that nobody has waited for stays when Python drops it: C++ may hold it, as DDP's ``join`` does, and its wait
        comes to ours through this object. Without it, it waits for ever. One that a thread ran stays even then: C++ may have
        waited for it, and ask for its result next."""
        if (self.threaded or not self._waited) and self._future is None:
            self._dropped = True
            if self.over:
                self._let_go()
            _dropped.append(self)

    def _let_go(self) -> None:
        """Do not hold large tensors that nobody else may want."""
        if sum(each.nbytes for each in self.outputs if each.layout is torch.strided) > _SMALL:
            self.outputs = ()

    def _outcome(self, _: object) -> list[torch.Tensor]:
        if self.error is not None:
            raise fresh(self.error)
        return list(self.outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the call has ended; raises its error. ``TransferTimeout`` after ``timeout`` (none: that of the group):
        the call goes on."""
        self._waited = True
        if not self._told:
            with self._lock:
                if self._event is None:
                    self._event = threading.Event()
                    if self._told:
                        self._event.set()
            limit = timeouts.seconds(timeout.total_seconds()) if timeout else None
            if not self._event.wait(limit):
                raise TransferTimeout(f"{self.describe} was not done within {limit:g} s")
        if self.error is not None:
            raise fresh(self.error)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.over

    def is_success(self) -> bool:
        return self.over and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def result(self) -> list[torch.Tensor]:
        return list(self.outputs)

    def source_rank(self) -> int:
        if self.source < 0:
            raise RuntimeError(f"sourceRank() is of a message that was received, not of {self.describe}")
        return self.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Of the outputs. It fails with a ``RuntimeError`` that has class and text of the error: a future keeps no other class
        for C++, and DDP's reducer takes what ``set_exception`` leaves there for tensors."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._since = next(stamps) if here.caller is None else here.caller.since
            ended: torch.futures.Future[None] = torch.futures.Future()
            self._future, self._ended = ended.then(self._outcome), ended
            future, over = self._future, self.over
            future.add_done_callback(self._wake)  # before those of the program
        if over:
            ended.set_result(None)
        return future

    def forked(self, error: BaseException) -> None:
        """In a forked child, whose parent runs it: who waits for it here gets this error. Takes no lock, runs no callback."""
        self._lock, self._event, self._future = threading.Lock(), None, None
        self.error, self.over, self.run = error, True, nobody


def failure(work: Work) -> BaseException | None:
    """Run a call: what it raised."""
    try:
        work.run()
    except BaseException as error:
        return error
    return None


class Queue:
    """Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._pending: deque[Work] = deque()
        self.busy = False
        """Whether a call runs."""
        self.running: Work | None = None
        """The call that runs, if it was submitted."""
        self._waiting = self._starting = 0  # threads that wait for a call to run, or will soon
        self.ended = False
        self._held: Work | None = None
        """The call whose callbacks run, while the next one waits for them."""
        self._origin = next(stamps)
        self._order = Order()
        self._held_since = 0.0
        """When they began, or ended a call of their own (``time.monotonic``)."""

    def take(self, what: str) -> bool:
        """Have this thread run a call at once, until ``give``: false if another is before it, or in a callback. ``running``
        stays what it is."""
        with self._lock:
            if self.busy or self._pending or here.caller is not None:
                return False
            self._order.add(what)
            self.busy = True
            return True

    def give(self) -> None:
        """The call that began with ``take``, or ``running``, has ended."""
        with self._lock:
            self.busy, self.running = False, None
            if self._pending:
                self._look_after()

    def submit(self, work: Work, waits: bool) -> None:
        """Have a call run. ``waits``: by this thread, if no other call is before it. That of a callback of this queue runs at
        once. Raises ``NotSupported`` if the next call did not wait for it, or that of another callback has no order."""
        work.origin = self._origin
        if here.caller is not None and here.caller.origin == self._origin:
            self._run_within(work)
            return
        with self._lock:
            self._order.add(work.describe)
            mine = waits and not self.busy and not self._pending
            if mine:
                self.busy, self.running = True, work
            else:
                self._pending.append(work)
                self._look_after()
        if mine:
            error = failure(work)
            self.give()
            work.finish(error)

    def _look_after(self) -> None:
        """With the lock held: a thread has to take what is pending. That of the call that runs may be busy with callbacks
        then."""
        if self._waiting:
            self._news.notify()
        elif not self._starting:
            self._starting += 1
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()

    def _run_within(self, work: Work) -> None:
        """Run what a callback of the call that is held calls."""
        with self._lock:
            if self._held is None or self._held is not here.work:
                why = f"{work.describe} by a callback for which later calls have not waited"
                raise NotSupported(why, hint=f"a callback may compute for {_PATIENCE_S:g} s before it calls")
            self.running = work
        error = failure(work)
        with self._lock:
            self.running, self._held_since = None, time.monotonic()
        work.finish(error)

    def _serve(self) -> None:
        aside.on = True
        with self._lock:
            self._starting -= 1
        while (work := self._next()) is not None:
            work.threaded = True
            error = failure(work)
            with self._lock:
                self.running, self._held, self._held_since = None, work, time.monotonic()
                if self._pending and not self._waiting:
                    self._look_after()
            here.work = work
            try:
                work.finish(error, partial(self._release, work))
            finally:
                here.work = None
                self._release(work)
            del work, error

    def _release(self, work: Work) -> None:
        """The callbacks of a call have ended: the next one may begin, if it has waited for them. This thread takes it.
        Idempotent."""
        with self._lock:
            if self._held is work:
                self._held, self.busy = None, False

    def _next(self) -> Work | None:
        """The next call to run; ``None`` if there was none for a while."""
        with self._lock:
            self._waiting, idle = self._waiting + 1, False
            try:
                while not self._pending or (self.busy and not self._overdue()):
                    if not self._pending and (self.ended or idle):
                        return None
                    idle = not self._news.wait(_IDLE_S)
                if (held := self._held) is not None:
                    _log.warning("callbacks of %s have run for %g s: the next call goes first", held.describe, _PATIENCE_S)
                    self._held = None
                self.busy, self.running = True, self._pending.popleft()
                return self.running
            finally:
                self._waiting -= 1

    def _overdue(self) -> bool:
        """With the lock held: whether callbacks have run for too long without a call of their own."""
        return self._held is not None and self.running is None and time.monotonic() - self._held_since > _PATIENCE_S

    def pending(self) -> list[Work]:
        with self._lock:
            return [*([self.running] if self.running is not None else []), *self._pending]

    def forked(self, error: BaseException) -> None:
        """In a forked child, which has none of the threads: end what they had to run. Takes no lock."""
        works = [self.running, self._held, *self._pending]
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._pending.clear()
        self.running = self._held = None
        self.busy, self._waiting, self._starting = False, 0, 0
        for work in works:
            if work is not None:
                work.forked(error)

    def stop(self) -> None:
        """Let the threads end once nothing is pending."""
        with self._lock:
            self.ended = True
            self._news.notify_all()
