"""The memory that the two ends of a connection share, an inbox of each, and the work requests on it.

An inbox is a memfd that the peer maps too: ``+0 closed`` (written by its owner), ``+64 inflight`` (written by the peer), then
the notification records. The invariants are those of ``words/kernels``.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Sequence

import numpy as np

from ..memory.mapping import address_of
from ..words import kernels
from ..words.signals import MAX_NOTIFY, RECORD_BYTES

_RECORDS_AT = 4096
INBOX_BYTES = _RECORDS_AT + MAX_NOTIFY * RECORD_BYTES
_CLOSED_AT, _INFLIGHT_AT = 0, 64


class Inboxes:
    """Our inbox, the peer's inbox and the peer's bells, as they are mapped here, and how much was posted."""

    def __init__(self, own: mmap.mmap, peer: mmap.mmap, peer_bells: mmap.mmap) -> None:
        self._keep = (own, peer, peer_bells)
        self._own, self._peer, self.peer_bells = map(address_of, self._keep)
        self.peer_closed = self._peer + _CLOSED_AT
        """Address of the word that is set when the peer has closed its inbox."""
        self.inflight = self._peer + _INFLIGHT_AT
        """Address of the count of our copies under way."""
        self._stats = np.zeros(3, np.int64)  # posts, bytes, and the advice of kernels.move
        self.stats = int(self._stats.ctypes.data)

    def record(self, imm: int) -> int:
        """Address of our record of a notification."""
        return self._own + _RECORDS_AT + imm * RECORD_BYTES

    def peer_record(self, imm: int) -> int:
        return self._peer + _RECORDS_AT + imm * RECORD_BYTES

    def totals(self) -> tuple[int, int]:
        """Posts and bytes so far."""
        return int(self._stats[0]), int(self._stats[1])

    def close(self) -> None:
        """Close our inbox: no copy of the peer begins from now on."""
        kernels.store(self._own + _CLOSED_AT, 1)

    @property
    def copying(self) -> bool:
        """Whether a copy of ours is under way."""
        return kernels.load(self.inflight) > 0

    @property
    def peer_copies(self) -> bool:
        """Whether a copy of the peer is under way, or it ended in the middle of one."""
        return kernels.load(self._own + _INFLIGHT_AT) > 0

    def quiesce(self, limit_ns: int) -> int:
        """As ``kernels.quiesce``, for our copies."""
        return kernels.quiesce(self.inflight, limit_ns)

    def quiesce_peer(self, limit_ns: int) -> int:
        """As ``kernels.quiesce``, for the peer's copies."""
        return kernels.quiesce(self._own + _INFLIGHT_AT, limit_ns)


class WorkRequest:
    """A work request block (``words/kernels``). It does not refer to the channel, which would else stay alive."""

    __slots__ = ("__weakref__", "address", "block")

    def __init__(self, inboxes: Inboxes, imm: int | None, copies: Sequence[tuple[int, int, int]]) -> None:
        """``imm``: the notification that comes after the copies, each of (destination, source, bytes)."""
        block = np.zeros(kernels.WR_HEAD + 3 * len(copies), np.int64)
        block[kernels.WR_COUNT] = len(copies)
        if imm is not None:
            block[kernels.WR_RECORD] = inboxes.peer_record(imm)
        block[kernels.WR_BELLS] = inboxes.peer_bells
        block[kernels.WR_CLOSED] = inboxes.peer_closed
        block[kernels.WR_INFLIGHT] = inboxes.inflight
        block[kernels.WR_STATS] = inboxes.stats
        block[kernels.WR_BYTES] = sum(nbytes for _, _, nbytes in copies)
        for at, copy in enumerate(copies):
            block[kernels.WR_HEAD + 3 * at : kernels.WR_HEAD + 3 * at + 3] = copy
        self.block, self.address = block, block.ctypes.data

    def disarm(self) -> None:
        """Make every later post of this request fail."""
        kernels.store(self.address + 8 * kernels.WR_INFLIGHT, 0)


class Requests:
    """The work requests of one channel. All are disarmed when the channel ends. Thread-safe. It does not keep them alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over = False
        self._armed: weakref.WeakSet[WorkRequest] = weakref.WeakSet()

    def add(self, request: WorkRequest) -> None:
        with self._lock:
            if self._over:
                request.disarm()
            self._armed.add(request)

    def disarm(self) -> None:
        """Disarm all requests, and each that is added later."""
        with self._lock:
            self._over = True
        self.forked()

    def forked(self) -> None:
        """Disarm all requests in a forked child, without a lock."""
        for request in list(self._armed):
            request.disarm()
