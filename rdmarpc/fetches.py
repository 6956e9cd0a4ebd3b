"""Requests that are not begun yet: data of theirs has still to come, or their sender does not take the answers that it has.

A body too large for a frame, and large arguments without a landing place, are READ from the sender. Where that takes a thread
of the sender's (``Channel.reads_take_peer``), which may hold the GIL for long, no thread of ours waits for it: the READ is
started, and the request begins when its data is here.

Requests of a peer are begun in the order in which they came, so those behind wait too; those of other peers do not. At most
``_AT_ONCE`` READs from one peer are under way, and only these take memory here. What waits is bounded as all that is held
(``link``): by what its sender may have outstanding.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import torch

from . import bulks
from .frames import BULK, READS, Frame
from .tensors import Memory, to_read
from .transport import bare, fresh

if TYPE_CHECKING:
    from .callee import Callee
    from .link import Link
    from .transport import Work

AWAY = BULK | READS
"""Flags of requests of which not everything came with the frame."""
_AT_ONCE = 2  # one is under way while the request of the other begins


class Fetch:
    """One request that is held. ``ready``: it may be begun. ``runs``: the large arguments that were READ ahead; ``None``: they
    are READ where they are unpacked. ``error``: why they could not be."""

    __slots__ = ("_body", "_link", "_work", "error", "frame", "ready", "runs")

    def __init__(self, link: Link, frame: Frame) -> None:
        self._link, self.frame = link, frame
        self.ready = not (frame.flags & AWAY and link.channel.reads_take_peer)
        self.runs: list[torch.Tensor] | None = None
        self.error: BaseException | None = None
        self._body: torch.Tensor | None = None
        self._work: Work | None = None

    def advance(self, memory: Memory) -> Work | None:
        """Start the next READ, when the one before has ended; ``None`` if nothing is left to READ, or nothing can be. May wait
        for memory. One thread at a time."""
        try:
            if self._work is not None:
                self._work.wait()
            self._work = self._next(memory)
        except BaseException as error:
            self._work, self.error = None, bare(error)  # kept, so without frames
        self.ready = self._work is None
        return self._work

    def whole(self, memory: Memory) -> Frame:
        """The frame with its body. Raises why it did not come."""
        if self.runs is None:
            self.check()
            self.frame = bulks.fetch(self.frame, memory, self._link)
        return self.frame

    def check(self) -> None:
        """Raises why something could not be READ."""
        if self.error is not None:
            raise fresh(self.error)

    def _next(self, memory: Memory) -> Work | None:
        link, frame = self._link, self.frame
        if self.runs is not None:
            return None
        if frame.flags & BULK and self._body is None:
            self._body, place = bulks.place_of(frame, memory, link, None)
            return link.channel.memcpy(self._body, place)
        if self._body is not None:
            frame = self.frame = bulks.filled(frame, self._body, link)
            self._body = None
        self.runs = []
        if not frame.flags & READS:
            return None
        table = frame.function + frame.payload
        places = to_read(frame.body[table : table + frame.table], frame.tensors)
        self.runs = [memory.empty(link.channel, nbytes, None) for nbytes, _ in places]
        return link.channel.prepare([(run, place) for run, (_, place) in zip(self.runs, places)]).post()


class Held:
    """The requests of one peer that are not begun yet, in order. Thread-safe, never blocks."""

    __slots__ = ("_entries", "_lock", "_under_way", "_unread", "any", "ever")

    def __init__(self) -> None:
        self._entries: deque[Fetch] = deque()
        self._unread: deque[Fetch] = deque()
        self._under_way = 0
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
        """The next of which something is to be READ, if that may start now: then ``over`` follows."""
        with self._lock:
            if not self._unread or self._under_way >= _AT_ONCE:
                return None
            self._under_way += 1
            return self._unread.popleft()

    def over(self) -> None:
        """All of one is here, or never will be."""
        with self._lock:
            self._under_way -= 1

    def take(self) -> Fetch | None:
        """The first, if it is ready: it is held no longer."""
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


# On threads of the pool, but for ``resume``.


def hold(callee: Callee, link: Link, frame: Frame) -> None:
    """Begin this request when its data is here, and those before it have begun."""
    link.held.add(Fetch(link, frame))
    _go_on(callee, link)  # it may be its turn


def resume(callee: Callee, link: Link) -> None:
    """The peer may have taken its answers. Never blocks; by the reader of the rings, which sees to the jobs."""
    if link.held.any and not link.crowded:
        callee.caller.progress.jobs.append(partial(_go_on, callee, link))


def _go_on(callee: Callee, link: Link) -> None:
    while (request := link.held.next_to_read()) is not None:
        _advance(callee, link, request)
    if link.crowded:
        return
    request = link.held.take()
    if request is None:
        return
    if link.held.any:
        callee.caller.progress.submit(partial(_go_on, callee, link))
    callee.begin(link, request)


def _advance(callee: Callee, link: Link, request: Fetch) -> None:
    work = request.advance(callee.caller.memory)
    if work is None:
        link.held.over()
    else:
        work.then(lambda: callee.caller.progress.submit(partial(_came, callee, link, request)))


def _came(callee: Callee, link: Link, request: Fetch) -> None:
    _advance(callee, link, request)
    _go_on(callee, link)
