"""A side stream of one channel on one GPU, and what is under way on it.

Everything enqueued on a lane gets a number (*ticket*), and is over in that order: the lane's record (``words/kernels``) counts
how many. What a post uses is kept until then, because nothing on a stream can be called back. So a lane is taken down only when
its stream is idle; one that is not when its channel ends stays for as long as that takes, with all that hangs on it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..errors import RdmaError, fresh
from ..gpu.arena import GpuArena
from ..gpu.driver import active, current_stream, driver, kind
from ..gpu.events import NOT_READY, status
from ..notify import wait_done
from ..words import kernels

GRACE_S = 0.5
"""How long a wait goes on for the end of a copy after the channel has broken: its memory should not be used again before."""
_EXIT_S = 2.0


class Lane:
    """A side stream for the copies of ``channel`` on one GPU. ``arena``: the device's. ``lock`` is held while work is
    enqueued."""

    def __init__(self, channel: Any, arena: GpuArena, index: int) -> None:
        self.channel, self.index, self.device = channel, index, torch.device(kind(), index)
        self._arena, self._pid = arena, os.getpid()
        with driver().on(index):
            self.stream, self.event, self._follow = driver().new_stream(), driver().new_event(), driver().new_event()
        self.context = driver().context(index)
        self.lock = threading.Lock()
        self._record = np.zeros(2, np.int64)
        self.done = self._record.ctypes.data
        """The lane's record: how many tickets are over."""
        self.sent = 0
        """How many were given out."""
        self._pending: deque[tuple[int, Any, object]] = deque()
        self._active = False
        self.status = ""
        """The driver's error that ended it."""
        _lanes.add(self)
        arena.lanes.add(self)

    def keep(self, job: Any, things: object) -> int:
        """The ticket of a job that was just enqueued, with ``lock`` held. It and ``things`` live until it is over."""
        self.sent += 1
        self._pending.append((self.sent, job, things))
        return self.sent

    def over(self, ticket: int) -> bool:
        return kernels.load(self.done) >= ticket

    def sweep(self) -> None:
        """Let go of what is over. Any thread."""
        dead = []  # let go of without the lock
        if self._pending and self.lock.acquire(blocking=False):  # a post of memory that is not pinned may hold it for long
            try:
                count = kernels.load(self.done)
                while self._pending and self._pending[0][0] <= count:
                    dead.append(self._pending.popleft())
            finally:
                self.lock.release()

    def caller(self) -> int:
        """The stream to wait for: the calling thread's current one. The default one in a process that does not use its GPUs."""
        self._active = self._active or active()
        return current_stream(self.index) if self._active else 0

    def follow(self) -> None:
        """Have the caller's current stream wait for all that was enqueued here."""
        after = self.caller()
        if not self.stream:
            return
        with self.lock, driver().on(self.index):
            driver().call("cuEventRecord", self._follow, self.stream)
            driver().call("cuStreamWaitEvent", after, self._follow, 0)

    def wait(self, ticket: int, timeout: float | None) -> None:
        """Wait until a ticket is over. Raises ``TransferTimeout``. If the channel breaks and the copy does not end soon after,
        raises the channel's error."""
        patient_until = 0.0

        def look() -> None:
            nonlocal patient_until
            self.look()
            if self.channel.error is not None:
                patient_until = patient_until or time.monotonic() + GRACE_S
                if time.monotonic() > patient_until:
                    raise fresh(self.channel.error)

        wait_done(self.done, ticket, timeout, 0, peer=self.channel.peer, device="cuda", look=look)

    def look(self) -> bool:
        """Whether the stream is idle. An error of the driver ends the channel: nothing of that context runs on then."""
        if not self.lock.acquire(blocking=False):
            return False
        try:
            if self.status or not self.stream:
                return True
            found = status(self.index, "cuStreamQuery", self.stream)
            if found in ("", NOT_READY) or "CAPTURE" in found:  # of a graph that somebody captures: that says nothing of us
                return not found
            self.status = found
            count = kernels.load(self.done)
            for ticket, job, _ in self._pending:
                if ticket > count:
                    job.lost()
            kernels.store(self.done, self.sent)
        finally:
            self.lock.release()
        self.channel.fail(RdmaError("a GPU failed", peer=self.channel.peer, device="cuda", status=found))
        return True

    def idle(self, deadline: float) -> bool:
        """Wait until ``deadline`` (``time.monotonic``) for the end of all that was enqueued."""
        nap = 20e-6
        while not self.look():
            if time.monotonic() > deadline:
                return False
            time.sleep(nap)
            nap = min(2 * nap, 1e-3)
        self.sweep()
        return True

    def destroy(self) -> None:
        """Give the stream and its events back. Call it only when the lane is idle."""
        with self.lock:
            stream, self.stream = self.stream, 0
        _lanes.discard(self)
        self._arena.lanes.discard(self)
        if stream:
            with contextlib.suppress(RdmaError), driver().on(self.index):
                driver().attempt("cuStreamDestroy_v2", stream)
                for event in (self.event, self._follow):
                    driver().attempt("cuEventDestroy_v2", event)


class Lanes:
    """The lanes of one channel, one for each GPU. Thread-safe."""

    def __init__(self, arena: GpuArena) -> None:
        self._arena = arena
        self._lanes: dict[int, Lane] = {}
        self._lock = threading.Lock()
        self._left = False

    def all(self) -> list[Lane]:
        return list(self._lanes.values())

    def find(self, channel: Any, index: int) -> Lane:
        """The one on a device: a new one where there is none. Raises what ended the channel."""
        found = self._lanes.get(index)
        if found is not None and not self._left:
            return found
        # Made without the lock: the thread that hears of the peer's end must not wait for this.
        made = Lane(channel, self._arena, index)
        try:
            with self._lock:
                channel.check()
                found = self._lanes.setdefault(index, made)
        finally:
            if found is not made:
                made.destroy()
        return found

    def idle(self, deadline: float) -> bool:
        """Wait until ``deadline`` (``time.monotonic``) for the end of all that was enqueued."""
        idle = [lane.idle(deadline) for lane in self.all()]
        return all(idle)

    def leave(self, over: Callable[[], None], *, now: bool, needed: bool) -> None:
        """The channel has ended: destroy all as soon as nothing is under way, then call ``over``, at once or from a thread.
        ``now``: this thread may ask the driver. ``needed``: also with no lane that takes a while."""
        with self._lock:
            first, self._left = not self._left, True
            nothing = not self._lanes and not needed
        if nothing or (now and self.idle(0.0)):
            self._destroy(over)
        elif first:
            with contextlib.suppress(RuntimeError):  # no more threads: the process ends
                threading.Thread(target=self._linger, args=(over,), name="rdmarpc-side-streams", daemon=True).start()

    def _linger(self, over: Callable[[], None]) -> None:
        while not self.idle(time.monotonic() + 1.0):
            pass
        self._destroy(over)

    def _destroy(self, over: Callable[[], None]) -> None:
        with self._lock:
            lanes, self._lanes = self.all(), {}
        for lane in lanes:
            lane.destroy()
        over()


_lanes: set[Lane] = set()  # those there are


@atexit.register
def _at_exit() -> None:
    # The driver's threads may still call us after this: their memory must then outlive the interpreter.
    deadline = time.monotonic() + _EXIT_S
    for lane in list(_lanes):
        if lane._pid == os.getpid() and not lane.idle(deadline):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(lane))
