"""Messages of which something is not here yet, and requests whose sender does not take the answers that it has.

A body too large for a frame, and large tensors without a landing place, are READ from the sender. Where that takes a thread
of the sender's (``Channel.reads_take_peer``), which may hold the GIL for long, no thread of ours waits for it: the READ is
started, and the request begins, or its call is answered (``Caller.answer``), when the data is here.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from ..message.tensors import WORD_BYTES, Memory, check_wanted, to_read
from ..transport import Channel, RdmaError, RemoteRegion, TransferTimeout, bare, fresh
from ..transport.channel import Work
from . import bulks
from .bulks import Source
from .frames import BULK, READS, Frame

AWAY = BULK | READS
"""Flags of messages of which not everything came with the frame."""
_AT_ONCE = 2  # one is under way while the request of the other begins


class _AtOnce:
    """Memory for messages (``tensors.Memory``), for threads that must not wait for it: ``ArenaFull`` if there is none."""

    def empty(self, channel: Channel, nbytes: int, deadline: float | None) -> torch.Tensor:
        return channel.pool.run(nbytes)


_WITHOUT_WAITING = _AtOnce()


class Fetch:
    """The READs of one message. ``ready``: all of it is here, or never will be. ``runs``: the large tensors that were READ
    ahead; ``None``: they are READ where they are unpacked. ``error``: why something could not be READ.

    A READ owns its memory until it has ended, even if nobody wants the message any more."""

    __slots__ = ("_body", "_link", "_place", "_under_way", "_word", "_work", "error", "frame", "ready", "runs")

    def __init__(self, link: Source, frame: Frame) -> None:
        self._link, self.frame = link, frame
        self.ready = not (frame.flags & AWAY and link.channel.reads_take_peer)
        self.runs: list[torch.Tensor] | None = None
        self.error: BaseException | None = None
        self._under_way: torch.Tensor | None = None  # the body, until it is here
        self._body: torch.Tensor | None = None
        self._place: RemoteRegion | None = None  # of the word of a request that is recallable, until it is READ
        self._word: torch.Tensor | None = None
        self._work: Work | None = None

    def advance(self, memory: Memory, deadline: float | None = None) -> Work | None:
        """Start the next READ, when the one before has ended; ``None`` if nothing is left to READ, or nothing can be (after
        ``ArenaFull`` it may be tried again). Waits as ``memory`` does, which gets ``deadline``. One thread at a time."""
        try:
            if self._work is not None:
                self._work.wait()
                if self._under_way is not None:
                    self._body, self._under_way = self._under_way, None
            self.error = None
            self._work = self._next(memory, deadline)
        except BaseException as error:
            self._work, self._under_way, self.error = None, None, bare(error)  # kept, so without frames
        self.ready = self._work is None
        return self._work

    def run(self, over: Callable[[], None]) -> None:
        """Do all READs, one after the other, without ever waiting, and call ``over()`` at the end (see ``Work.then``)."""
        if self.advance(_WITHOUT_WAITING) is None:
            over()
        else:
            self.run_on(over)

    def run_on(self, over: Callable[[], None]) -> None:
        """Go on with ``run`` when the READ that is under way has ended."""
        assert self._work is not None
        self._work.then(partial(self.run, over))

    def finish(self, memory: Memory, deadline: float | None, *, patient: bool) -> None:
        """Do the READs for which there was no memory before. Waits for memory as ``memory`` does, and, if ``patient``, for the
        data until the ``deadline``. Raises ``TransferTimeout`` if a READ is still under way."""
        while (work := self.advance(memory, deadline)) is not None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                work.wait(left if patient else 0.0)
            except TransferTimeout:
                raise
            except RdmaError:
                pass  # it is kept, by ``advance``

    def whole(self, memory: Memory) -> Frame:
        """The frame with its body. Raises why that did not come."""
        if self._body is not None:
            self.frame, self._body = bulks.filled(self.frame, self._body, self._link), None
        elif self.runs is None:
            self.check()
            self.frame = bulks.fetch(self.frame, memory, self._link)
        return self.frame

    def take(self) -> list[torch.Tensor]:
        """The runs, once. Raises why they could not be READ."""
        self.check()
        assert self.runs is not None
        runs, self.runs = self.runs, []
        return runs

    def check(self) -> None:
        """Raises why something could not be READ."""
        if self.error is not None:
            raise fresh(self.error)

    def _next(self, memory: Memory, deadline: float | None) -> Work | None:
        link, frame = self._link, self.frame
        if self.runs is not None:
            return self._look(memory, deadline)
        if frame.flags & BULK and self._body is None:
            self._under_way, place = bulks.place_of(frame, memory, link, deadline)
            return link.channel.memcpy(self._under_way, place)
        if not frame.flags & READS:
            self.runs = []
            return None
        places, self._place = to_read(*bulks.table_of(frame, self._body))
        runs = [memory.empty(link.channel, nbytes, deadline) for nbytes, _ in places]
        work = link.channel.prepare([(run, place) for run, (_, place) in zip(runs, places)]).post()
        self.runs = runs
        return work

    def _look(self, memory: Memory, deadline: float | None) -> Work | None:
        """READ the word of a recallable request when its runs are here, then look at it."""
        if self._place is not None:
            self._word = memory.empty(self._link.channel, WORD_BYTES, deadline)
            place, self._place = self._place, None
            return self._link.channel.memcpy(self._word, place)
        word, self._word = self._word, None
        if word is not None:
            check_wanted(word)
        return None


class Held:
    """The requests of one peer that are not begun yet, in order. Thread-safe, never blocks."""

    __slots__ = ("_entries", "_lock", "_under_way", "_unread", "any", "ever", "reading")

    def __init__(self) -> None:
        self._entries: deque[Fetch] = deque()
        self._unread: deque[Fetch] = deque()
        self._under_way = 0
        self.reading = 0
        """How many READs are on their way, and so have the memory that they need."""
        self._lock = threading.Lock()
        self.any = False
        """Whether there are some: those that come go behind them."""
        self.ever = 0
        """How many there were."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Fetch) -> None:
        with self._lock:
            self._entries.append(request)
            if not request.ready:
                self._unread.append(request)
            self.any = True
            self.ever += 1

    def next_to_read(self) -> Fetch | None:
        """The next request with data to READ, if its READs may start now. The caller then has to call ``over``."""
        with self._lock:
            if not self._unread or self._under_way >= _AT_ONCE:
                return None
            self._under_way += 1
            return self._unread.popleft()

    def over(self) -> None:
        """Note that the READs of a request have ended: its data is here, or never will be."""
        with self._lock:
            self._under_way -= 1

    def reads(self, more: int) -> None:
        """Count a READ that has begun (1), or ended (-1)."""
        with self._lock:
            self.reading += more

    def take(self) -> Fetch | None:
        """Take out the first request, if it is ready; else ``None``."""
        with self._lock:
            if not self._entries or not self._entries[0].ready:
                return None
            found = self._entries.popleft()
            self.any = bool(self._entries)
            return found

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._unread.clear()
            self.any = False
