"""The links to the others: which there are, by worker and by row, and which are lost.

Workers are known by their numbers (``members.Record``), which are never used twice: a connection that ended does so for good.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from ..transport import Channel, Poller, RdmaError, nobody
from .group.group import Group
from .group.members import Record
from .ring import RING, Link


class Links:
    """The table of one worker's links. Thread-safe. ``missed(number, error)`` is called for workers that left before there was
    a link."""

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
        group.missed, group.lost = self.miss, self.lost

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
        """At the end of this worker, forget all links and callbacks."""
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
