"""Posts behind the streams of a GPU. An adapter knows no streams: so a thread here posts memory when the streams that compute
it are done, and no other thread waits for them.

A post belongs behind the work that the current streams of the calling thread have been given so far. A side stream waits for
that work, and then has the driver count up (``count``, a host function without Python); the thread here sleeps on that count.

Invariants:

1. after the producer: a post is made when the count has reached its number, so behind all work that was given before it.
2. order: the posts from one GPU are made in the order in which they were given. While one waits, all later ones wait behind it,
   even if their own streams are done.
3. every post ends: a post on a channel that has ended fails, and its waiters are told at once. A GPU that has failed completes
   nothing any more, so the channels with waiting posts fail; else their peers would wait for ever.
4. the count outlives the side stream, and the interpreter, because the driver's thread writes to it. It is never freed.

Never run on hardware: see ``verbs/gpudirect``.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..channel import Work
from ..errors import RdmaError, TransferTimeout, fresh
from ..peers.guard import Guard
from ..words import kernels
from ..words.compiled import compiled_callback
from ..words.signals import signal
from ..words.symbols import i64, void
from .driver import Driver
from .events import NOT_READY, Event, status

_SLICE_S, _JOIN_S = 0.05, 5.0


@compiled_callback(void(i64))
def count(record: int) -> None:
    """The host function: on a thread of the driver, which must neither call the driver nor wait for Python."""
    signal(record, 0)


class Later(Work):
    """A post that may still wait for a GPU."""

    __slots__ = ("_error", "_left", "_post", "_work", "channel")

    def __init__(self, channel: Any, post: Callable[[], Work]) -> None:
        self.channel = channel
        self._post: Callable[[], Work] | None = post  # keeps what is to be copied
        self._left = threading.Event()
        self._work: Work | None = None
        self._error: RdmaError | None = None

    def go(self) -> None:
        """Post it."""
        post, self._post = self._post, None
        assert post is not None
        try:
            self._work = post()
        except Exception as error:  # raised to those that wait for the work; the other posts are made all the same
            self._error = error if isinstance(error, RdmaError) else RdmaError(f"the post failed: {error!r}", device="verbs")
        finally:
            self._left.set()
            self.channel.later.discard(self)

    def fail(self, error: RdmaError) -> None:
        """Give the post up: it fails with ``error``."""
        self._post, self._error = None, error
        self._left.set()
        self.channel.later.discard(self)

    def leave(self, timeout: float | None) -> None:
        """Wait until it is posted, or cannot be any more. Raises ``TransferTimeout``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._left.is_set() and self.channel.error is None:
            left = _SLICE_S if deadline is None else min(_SLICE_S, deadline - time.monotonic())
            if left <= 0:
                raise TransferTimeout(
                    f"the GPU has not made within {timeout} s what is to be sent",
                    peer=self.channel.peer,
                    device="verbs",
                    hint="nothing was posted; does a kernel run for that long?",
                )
            self._left.wait(left)

    def done(self) -> bool:
        if self._work is not None:
            return self._work.done()
        return self._left.is_set() or self.channel.error is not None

    def wait(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        self.leave(timeout)
        if (error := self._failure()) is not None:
            raise fresh(error)
        assert self._work is not None
        self._work.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))

    def exception(self) -> RdmaError | None:
        return self._work.exception() if self._work is not None else self._failure()

    def _failure(self) -> RdmaError | None:
        return self._error or (self.channel.error if self._work is None else None)


class Behind:
    """The posts behind streams of one GPU. Any thread may call ``put``; a thread of its own posts."""

    def __init__(self, cuda: Driver, index: int) -> None:
        """Raises ``RdmaError`` if the GPU has failed."""
        self._cuda, self.index = cuda, index
        with cuda.on(index):
            self._stream = cuda.new_stream()
        memory = np.zeros(2, np.int64)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
        self._count = int(memory.ctypes.data)
        self._spin = np.zeros(1, np.int64)
        self._waiting: deque[Later] = deque()
        self._guard = Guard(f"rdmarpc-gpu-posts {index}")
        self._gone = 0  # how many of all were posted
        self._lock = threading.Lock()  # held over calls of the driver
        self._given = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        return not self._waiting

    def put(self, channel: Any, streams: Sequence[tuple[int, int]], post: Callable[[], Work]) -> Later:
        """Have ``post`` called when the work that these streams have been given so far is done, and all earlier posts are made.
        ``streams``: index of the GPU and handle of each."""
        later = Later(channel, post)
        with self._lock:
            for index, stream in streams:
                Event(index, stream).follow(self._stream)
            with self._cuda.on(self.index):
                self._cuda.call("cuLaunchHostFunc", self._stream, count.address, self._count)
            channel.later.add(later)
            with self._given:
                self._waiting.append(later)
                self._given.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="rdmarpc-gpu-posts", daemon=True)
                self._thread.start()
        return later

    def _serve(self) -> None:
        while True:
            with self._given:
                while not self._waiting and not self._stopping:
                    self._given.wait()
                if self._stopping:
                    return
            try:
                self._post_next()
            except BaseException as error:
                self._guard.note(error, "posting memory of a GPU")
                self._fail("INTERNAL")

    def _post_next(self) -> None:
        """Post what is due, if it is within a while."""
        self._spin[0] = kernels.SPIN_MIN_NS
        if kernels.wait_count(self._count, self._gone + 1, self._spin.ctypes.data, kernels.SLICE_NS, 0) == kernels.OK:
            self._waiting[0].go()
            self._gone += 1
            self._waiting.popleft()  # now, so that nothing from this GPU went before it
        elif word := self._failed():
            self._fail(word)

    def _failed(self) -> str:
        """The driver's word, if the GPU has failed."""
        found = status(self.index, "cuStreamQuery", self._stream)
        return "" if found == NOT_READY or "CAPTURE" in found else found

    def _fail(self, word: str) -> None:
        with self._given:
            waiting = list(self._waiting)
            self._waiting.clear()
        for later in waiting:
            channel = later.channel
            error = RdmaError("a GPU failed", peer=channel.peer, device="verbs", status=word)
            later.fail(error)
            channel.lost(error)

    def close(self) -> None:
        """End the thread. Posts that still wait fail."""
        with self._given:
            self._stopping = True
            self._given.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=_JOIN_S)
        for later in list(self._waiting):
            later.fail(later.channel.error or RdmaError("the device was closed", device="verbs"))
        with contextlib.suppress(RdmaError), self._cuda.on(self.index):  # the driver may be gone already: the process ends
            self._cuda.attempt("cuStreamDestroy_v2", self._stream)  # when it is idle
