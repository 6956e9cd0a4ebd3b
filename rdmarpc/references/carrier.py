"""How the messages of references travel: over the links of this worker."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from ..links.frames import CONTROL, REFERENCES, alone
from ..links.ring import Link
from ..links.table import Links
from ..transport import Guard, PeerLost, RdmaError, broken_by, nobody
from .context import RRefContext


class Carrier:
    """Is ``Mail.transmit`` of ``rrefs`` until ``stop``.

    The link queues what the peer has no room for. What has no link yet is left to a thread of that peer's own, which ends when
    it has caught up, or found the peer lost. So the reader of the rings never waits, and none of it queues behind users'
    functions.
    """

    def __init__(self, me: int, device: str, links: Links, connect: Callable[[int], Link], rrefs: RRefContext) -> None:
        """``me``: our number; ``device``: the device's name, for errors; ``connect(worker)`` makes a link to a worker."""
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
