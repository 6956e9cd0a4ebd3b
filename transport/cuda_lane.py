"""A side stream of one channel on one GPU, and what is under way on it.

Everything enqueued on a lane gets a number (*ticket*), and is over in that order: the lane's record (``kernels``) counts how
many. What a post uses is kept until then, because nothing on a stream can be called back. So a lane is taken down only when its
stream is idle; one that is not when its channel ends stays for as long as that takes, with all that hangs on it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import time
from collections import deque
from typing import Protocol

import numpy as np
import torch

from . import kernels
from .cuda_arena import GpuArena
from .cuda_driver import active, current_stream, driver, kind
from .cuda_events import NOT_READY, status
from .errors import RdmaError, TransferTimeout, fresh

GRACE_S = 0.5
"""How long a wait goes on for the end of a copy after the channel has broken: its memory should not be used again before."""
_EXIT_S = 2.0


class Copying(Protocol):
    """The channel whose copies go over a lane."""

    peer: str
    error: RdmaError | None

    def fail(self, error: RdmaError) -> None:
        """Our GPU failed: the channel has ended."""


class Job(Protocol):
    """What is enqueued on a lane."""

    def lost(self) -> None:
        """The driver will not tell of its end any more."""


class Lane:
    """``channel``: whose copies go over it; ``arena``: of the device. ``lock`` is held while something is enqueued."""

    def __init__(self, channel: Copying, arena: GpuArena, index: int) -> None:
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
        self._pending: deque[tuple[int, Job, object]] = deque()
        self._active = False
        self.status = ""
        """The driver's error that ended it."""
        _lanes.add(self)
        arena.lanes.add(self)

    def keep(self, job: Job, things: object) -> int:
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
        """Until a ticket is over. ``TransferTimeout``; what broke the channel, when the copy has not ended soon after that."""
        deadline = None if timeout is None else time.monotonic() + timeout
        grace = None
        while kernels.load(self.done) < ticket:
            limit = kernels.SLICE_NS
            if deadline is not None:
                limit = min(limit, int((deadline - time.monotonic()) * 1e9))
                if limit <= 0:
                    raise TransferTimeout(
                        f"the copy was not done within {timeout} s",
                        peer=self.channel.peer,
                        device="cuda",
                        hint="a timeout ends the wait, not the copy: channel.abort() does",
                    )
            if kernels.wait_count(self.done, ticket, kernels.SPIN, limit, 0) == kernels.OK:
                return
            self.look()
            if self.channel.error is not None:
                grace = grace or time.monotonic() + GRACE_S
                if time.monotonic() > grace:
                    raise fresh(self.channel.error)

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
        """When idle."""
        with self.lock:
            stream, self.stream = self.stream, 0
        _lanes.discard(self)
        self._arena.lanes.discard(self)
        if stream:
            with contextlib.suppress(RdmaError), driver().on(self.index):
                driver().attempt("cuStreamDestroy_v2", stream)
                for event in (self.event, self._follow):
                    driver().attempt("cuEventDestroy_v2", event)


_lanes: set[Lane] = set()  # those there are


@atexit.register
def _at_exit() -> None:
    # The driver's threads may still call us after this: their memory must then outlive the interpreter.
    deadline = time.monotonic() + _EXIT_S
    for lane in list(_lanes):
        if lane._pid == os.getpid() and not lane.idle(deadline):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(lane))
