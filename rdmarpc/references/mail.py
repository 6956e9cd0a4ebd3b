"""Control messages of references: entries ``(kind, rref, fork)``, many in a frame, and how they travel over the links of this
worker.

The links below neither lose nor repeat frames. They may deliver them in another order than they were sent in: the protocol does
not rely on it. A worker that takes over the rank of another is another sender and receiver.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from ..links.frames import CONTROL, REFERENCES, alone
from ..links.ring import Link
from ..links.table import Links
from ..transport import Guard, PeerLost, RdmaError, broken_by, nobody

T = TypeVar("T")
FORK, ACCEPT, REFUSE, CHILD, DELETE, PROBE, GONE = range(1, 8)
"""Kinds of entries; what they mean is said in ``references/context``."""

_ENTRY = struct.Struct("<BQQ")
_BATCH = 1024  # the reader of the rings takes a whole message at once


def drained(queue: deque[T]) -> Iterator[T]:
    """Takes out what is in a queue that other threads empty, too."""
    while queue:
        try:
            yield queue.popleft()
        except IndexError:
            return


class Mail:
    """The control messages of one worker, out and in. Thread-safe; never blocks. ``transmit(worker, message)`` carries bytes to
    the ``open`` of another worker, with any delay."""

    def __init__(self) -> None:
        self.transmit: Callable[[int, bytes], None] = nobody
        self._out: dict[int, deque[bytes]] = {}
        self._lost: set[int] = set()

    def put(self, worker: int, kind: int, rref: int, fork: int) -> None:
        """Add an entry for ``worker``, which the next ``flush`` sends."""
        if worker not in self._lost:
            self._out.setdefault(worker, deque()).append(_ENTRY.pack(kind, rref, fork))

    def flush(self) -> None:
        """Send all that was put."""
        for worker, entries in list(self._out.items()):
            while entries:
                batch: list[bytes] = list(islice(drained(entries), _BATCH))
                if batch:  # else another thread flushes, too
                    self.transmit(worker, b"".join(batch))

    def open(self, sender: int, message: bytes) -> Iterable[tuple[int, int, int]]:
        """The entries of a message from ``sender``; none if it was lost. ``struct.error`` for bytes that are none."""
        entries = list(_ENTRY.iter_unpack(message))
        for kind, _, _ in entries:
            if not FORK <= kind <= GONE:
                raise struct.error(f"there is no kind {kind} of entry")
        return () if sender in self._lost else entries

    def lost(self, worker: int) -> None:
        """Send nothing to ``worker`` any more, and take nothing from it."""
        self._lost.add(worker)
        self._out.pop(worker, deque()).clear()


class Carrier:
    """Is ``Mail.transmit`` of ``rrefs`` until ``stop``.

    The link queues what the peer has no room for. What has no link yet is left to a thread of that peer's own, which ends when
    it has caught up, or found the peer lost. So the reader of the rings never waits, and none of it queues behind users'
    functions.
    """

    def __init__(self, me: int, device: str, links: Links, connect: Callable[[int], Link], rrefs: Any) -> None:
        """``me``: our number; ``device``: the device's name, for errors; ``connect(worker)`` makes a link to a worker;
        ``rrefs``: the ``RRefContext``."""
        self._me, self._device, self._links, self._connect, self._rrefs = me, device, links, connect, rrefs
        self._left: dict[int, deque[bytes]] = {}
        self._lock = threading.Lock()
        self._stopped = False
        self._guard = Guard("rdmarpc")
        rrefs.mail.transmit = self._transmit

    def _transmit(self, worker: int, message: bytes) -> None:
        if worker == self._me:
            self._rrefs.receive(worker, message)
            return
        link = self._links.by_worker.get(worker)
        try:
            if link is not None:
                link.post(REFERENCES, 0, CONTROL, parts=alone(message))
                return
        except PeerLost:
            return
        with self._lock:
            left = self._left.get(worker)
            if left is not None:
                left.append(message)
                return
            self._left[worker] = deque((message,))
        try:
            threading.Thread(target=self._catch_up, args=(worker,), name=f"rdmarpc-references-{worker}", daemon=True).start()
        except RuntimeError:  # no more threads
            with self._lock:
                del self._left[worker]
            raise

    def _catch_up(self, worker: int) -> None:
        while not self._stopped:
            with self._lock:
                left = self._left[worker]
                if not left:
                    del self._left[worker]
                    return
            try:
                link = self._connect(worker)
                link.post(REFERENCES, 0, CONTROL, parts=alone(left[0]))
            except BaseException as error:
                if not isinstance(error, RdmaError):
                    self._guard.note(error, "telling a worker of references")
                with self._lock:
                    del self._left[worker]
                if not self._stopped:
                    peer = self._rrefs.names(worker)
                    lost = broken_by(error, "telling it of references", peer=peer, device=self._device)
                    self._rrefs.lost(worker, lost)
                return
            left.popleft()

    def stop(self) -> None:
        """Send nothing any more."""
        self._stopped = True
        self._rrefs.mail.transmit = nobody
