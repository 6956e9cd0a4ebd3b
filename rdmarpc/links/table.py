"""The links to the others: which there are, by worker and by row, which are lost, and the reading of their frames.

Workers are known by their numbers (``members.Record``), which are never used twice: a connection that ended does so for good.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable

from ..transport import Channel, Guard, Poller, RdmaError, broken_by, nobody
from .frames import GOODBYE, GRADIENTS, Frame, NotTheirs
from .group.group import Group
from .group.members import Record
from .ring import CREDIT_DUE, RING, Distrust, Link

Handler = Callable[[Link, Frame], None]
"""Takes a frame, on the thread that reads for everybody: never blocks. ``NotTheirs``, or any other error, ends the link."""


def _goodbye(link: Link, frame: Frame) -> None:
    raised, words = frame.body[: frame.function], frame.body[frame.function :]
    link.goodbye = raised.decode(errors="replace"), words.decode(errors="replace")


class Links:
    """The table of one worker's links. Thread-safe, but for ``read``. ``missed(number, error)`` is called for workers that left
    before there was a link."""

    def __init__(self, poller: Poller, group: Group, missed: Callable[[int, RdmaError], None]) -> None:
        self._poller, self._group, self.missed = poller, group, missed
        self.by_worker: dict[int, Link] = {}
        """The links to send by, by the number of the peer. ``lost`` has the errors of lost workers, by number too."""
        self.rows: dict[int, Link] = {}
        """The links that are read, by the row of the poller."""
        self.gone_rows: deque[Link] = deque()
        """Links whose rows the holder of the polling role has to forget."""
        self.lost: dict[int, RdmaError] = {}
        self.changed = threading.Condition()
        """Held while this table must not change between two looks at it; notified when a link is entered."""
        self._past = [0] * 8
        self.handlers: list[Handler] = [nobody] * (GRADIENTS + 1)
        group.missed, group.lost = self.miss, self.lost

    def listen(
        self, refuse: Distrust, completed: Callable[[], None], resume: Callable[[Link], None], takes: dict[int, Handler]
    ) -> None:
        """From now on frames go to the handlers of their kinds (``takes``). ``refuse`` ends a link whose data cannot be
        trusted; ``completed()`` is called where queued frames may have been sent, ``resume(link)`` after frames were read from
        a peer of which requests are held."""
        self._refuse, self._completed, self._resume, self._guard = refuse, completed, resume, Guard("rdmarpc")
        for kind, handler in (takes | {GOODBYE: _goodbye}).items():
            self.handlers[kind] = handler

    def read(self, row: int, fresh: int) -> None:
        """Read the frames that were announced (holder of the polling role)."""
        if row == Poller.KICK:
            while self.gone_rows:
                self.forget_row(self.gone_rows.popleft())
            return
        link = self.rows.get(row)
        while link is None:  # added a moment ago by another thread
            time.sleep(0)
            link = self.rows.get(row)
        for _ in range(fresh):
            try:
                frame = link.read()
            except RdmaError as error:
                self._refuse(link, error)
                return
            if frame is None:
                continue
            try:
                self.handlers[frame.kind](link, frame)
            except Exception as error:  # this thread reads for all peers, so one peer's error must not end it
                self._refuse(link, self._why(link, frame.kind, error))
                return
        if link.behind:
            link.flush()
            self._completed()
        if link.held.any:
            self._resume(link)
        if link.taken - link.told > CREDIT_DUE:
            link.give_credit()

    def _why(self, link: Link, kind: int, error: Exception) -> RdmaError:
        """What ends a link whose frame was not handled."""
        if isinstance(error, NotTheirs):
            return error
        if isinstance(error, struct.error):
            return RdmaError(f"what came is no message (frame of kind {kind}: {error})", peer=link.name)
        self._guard.note(error, "handling a message")
        return broken_by(error, "handling its message", peer=link.name, device=link.channel.device.name)

    def enter(self, link: Link, record: Record, *, serve_only: bool) -> None:
        """Enter a link that has its channel: it is read from now on. ``serve_only``: it is not used to send. Call it with
        ``changed`` held."""
        link.name = link.channel.peer = record.name
        link.rank = record.rank
        link.row = self._poller.add(link.channel, RING)
        self.rows[link.row] = link
        # The thread that polls now looks only at the rows that there were when it began. It has to begin again, or it would
        # sleep although this row has news.
        self._poller.kick()
        if not serve_only:
            self.by_worker[link.worker] = link
        self.changed.notify_all()

    def of(self, channel: Channel) -> Link | None:
        """The link that is read from this channel."""
        return next((link for link in list(self.rows.values()) if link.channel is channel), None)

    def other_end(self, number: int) -> Link:
        """The link that is read for what this worker, ``number``, sends to itself."""
        return next(link for link in list(self.rows.values()) if link.worker == number and link is not self.by_worker[number])

    def lose(self, link: Link, error: RdmaError) -> None:
        """Note that the connection of a link has ended. Its worker is lost then, unless another link to it counts."""
        with self.changed:
            if self.by_worker.get(link.worker) is link or link.worker not in self.by_worker:
                self.lost[link.worker] = error
                self.by_worker.pop(link.worker, None)

    def miss(self, number: int) -> None:
        """Note that a worker has left the group. If there is a link to it, its answers are still taken."""
        with self.changed:
            if number in self.by_worker or number in self.lost:
                return
            self.lost[number] = error = self._group.departed(number)
        self.missed(number, error)

    def forget_row(self, link: Link) -> None:
        """Look at this ring no longer (holder of the polling role). Comes twice for a link that was refused, and its row may be
        another one's by then."""
        if self.rows.get(link.row) is link:
            del self.rows[link.row]
            self._poller.drop(link.row)
            self._past = [past + now for past, now in zip(self._past, _counts(link), strict=True)]

    def close(self) -> None:
        """At the end of this worker, forget all links and callbacks, and drop all frames that are read from now on."""
        self.handlers = [nobody] * (GRADIENTS + 1)
        self._refuse = self._completed = self._resume = nobody
        self.rows.clear()
        self.by_worker.clear()
        self.missed = self._group.missed = nobody

    @property
    def flushed(self) -> bool:
        """Whether nothing is queued for a peer that may still take it."""
        return not any(link.behind for link in list(self.rows.values()))

    @property
    def counts(self) -> list[int]:
        """Frames sent, requests of users sent and answered, messages of which something had to be READ, frames queued,
        frames dropped, requests held, and grants refused, ever."""
        return [sum(each) for each in zip(self._past, *map(_counts, list(self.rows.values())), strict=True)]


def _counts(link: Link) -> tuple[int, ...]:
    return link.sent, link.requests, link.answers, link.reads, link.queued, link.dropped, link.held.ever, link.grants.refused
