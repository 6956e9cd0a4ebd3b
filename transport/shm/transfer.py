"""What the two ends of a ``shm`` connection share, an inbox of each, and transfers: a WRITE or READ of what is mapped is one
memcpy, complete when the post returns.

An inbox is a memfd that the peer maps too: ``+0 closed`` (written by its owner), ``+64 inflight`` (written by the peer), then
the notification records. The invariants are those of ``words/kernels``.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..channel import DONE, NOTHING, Mapped, Transfer, Window, Work, rebound
from ..memory.mapping import address_of
from ..region import RemoteRegion, local_bytes
from ..words import kernels
from ..words.signals import MAX_NOTIFY, RECORD_BYTES

_RECORDS_AT = 4096
INBOX_BYTES = _RECORDS_AT + MAX_NOTIFY * RECORD_BYTES
_CLOSED_AT, _INFLIGHT_AT = 0, 64


class Inboxes:
    """Our inbox, the peer's inbox and the peer's bells, as they are mapped here, and how much was posted."""

    def __init__(self, own: mmap.mmap, peer: mmap.mmap, peer_bells: mmap.mmap) -> None:
        self._keep = (own, peer, peer_bells)
        self._own, theirs, self.peer_bells = map(address_of, self._keep)
        self.records, self.peer_records = self._own + _RECORDS_AT, theirs + _RECORDS_AT
        self.peer_closed = theirs + _CLOSED_AT
        """Address of the word that is set when the peer has closed its inbox."""
        self.inflight = theirs + _INFLIGHT_AT
        """Address of the count of our copies under way."""
        self._stats = np.zeros(kernels.STATS_WORDS, np.int64)
        self.stats = int(self._stats.ctypes.data)

    def totals(self) -> tuple[int, int]:
        """Posts and bytes so far."""
        return int(self._stats[0]), int(self._stats[1])

    def close(self) -> None:
        """Close our inbox: no copy of the peer begins from now on."""
        kernels.store(self._own + _CLOSED_AT, 1)

    def end(self) -> None:
        """No copy of ours begins from now on, in this process."""
        kernels.store(self.stats + 8 * kernels.STATS_OVER, 1)

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

    __slots__ = ("__weakref__", "_inboxes", "address", "block")

    def __init__(self, inboxes: Inboxes, imm: int | None, copies: Sequence[tuple[int, int, int]]) -> None:
        """``imm``: the notification that comes after the copies, each of (destination, source, bytes)."""
        self._inboxes = inboxes
        block = np.zeros(kernels.WR_HEAD + 3 * len(copies), np.int64)
        block[kernels.WR_COUNT] = len(copies)
        if imm is not None:
            block[kernels.WR_RECORD] = inboxes.peer_records + imm * RECORD_BYTES
        block[kernels.WR_BELLS] = inboxes.peer_bells
        block[kernels.WR_CLOSED] = inboxes.peer_closed
        block[kernels.WR_INFLIGHT] = inboxes.inflight
        block[kernels.WR_STATS] = inboxes.stats
        block[kernels.WR_BYTES] = sum(nbytes for _, _, nbytes in copies)
        for at, copy in enumerate(copies):
            block[kernels.WR_HEAD + 3 * at : kernels.WR_HEAD + 3 * at + 3] = copy
        self.block, self.address = block, block.ctypes.data


class PreparedRequest(WorkRequest):
    """A work request that is used apart from its channel. It keeps the channel alive, because it needs the channel's memory."""

    __slots__ = ("_channel",)

    def __init__(self, channel: Any, imm: int | None, copies: Sequence[tuple[int, int, int]]) -> None:
        self._channel = channel
        super().__init__(channel.inboxes, imm, copies)


class ShmTransfer(PreparedRequest, Transfer):
    """A transfer whose remote sides are all mapped. A post is one kernel call, and complete when it returns."""

    __slots__ = ("_sides",)

    def __init__(self, channel: Any, sides: list[tuple[int, torch.Tensor, bool]], imm: int | None) -> None:
        self._sides = sides
        copies = []
        for address, tensor, write in sides:
            local, nbytes = local_bytes(tensor)
            copies.append((address, local, nbytes) if write else (local, address, nbytes))
        super().__init__(channel, imm, copies)

    def post(self) -> Work:
        if kernels.post(self.address) != kernels.OK:
            raise self._channel.ended()
        return DONE

    def rebind(self, index: int, tensor: torch.Tensor) -> None:
        remote, _, write = self._sides[index]
        at = kernels.WR_HEAD + 3 * index
        self.block[at + (1 if write else 0)] = rebound(index, self.block[at + 2], tensor)
        self._sides[index] = (remote, tensor, write)

    def unbind(self, index: int) -> None:
        remote, _, write = self._sides[index]
        self._sides[index] = (remote, NOTHING, write)


class CmaTransfer(Transfer):
    """Some remote side is memory of the peer that cannot be mapped: copied by the kernel, one call a pair."""

    __slots__ = ("__weakref__", "_channel", "_imm", "_pairs")

    def __init__(self, channel: Any, pairs: list[tuple[RemoteRegion, torch.Tensor, bool]], imm: int | None) -> None:
        self._channel, self._pairs, self._imm = channel, pairs, imm

    def post(self) -> Work:
        channel = self._channel
        channel.check()
        inboxes, memory = channel.inboxes, channel.peer_memory
        for remote, tensor, write in self._pairs:
            local, nbytes = local_bytes(tensor)
            # The lock keeps the owner's deregistration waiting until the copy is over; the count, its abort. Within, nothing
            # waits for the peer: the thread that hears its answer may itself wait for this lock.
            with memory.copying:
                address, mapped = memory.resolve(remote, write=write)
                kernels.add(inboxes.inflight, 1)
                try:
                    if kernels.load(inboxes.peer_closed):
                        raise channel.ended()
                    if mapped:
                        kernels.copy(*((address, local) if write else (local, address)), nbytes)
                    elif nbytes:
                        memory.attach(local, address, nbytes, write=write)
                finally:
                    kernels.add(inboxes.inflight, -1)
            kernels.add(inboxes.stats, 1)
            kernels.add(inboxes.stats + 8, nbytes)
        if self._imm is not None:
            channel.notify(self._imm)
        return DONE

    def rebind(self, index: int, tensor: torch.Tensor) -> None:
        remote, _, write = self._pairs[index]
        rebound(index, remote.nbytes, tensor)
        self._pairs[index] = (remote, tensor, write)

    def unbind(self, index: int) -> None:
        remote, _, write = self._pairs[index]
        self._pairs[index] = (remote, NOTHING, write)


class ShmWindow(PreparedRequest, Window):
    """A memcpy a ``put``."""

    __slots__ = ("_local", "_remote", "_tensor")

    def __init__(self, channel: Any, remote: int, local: torch.Tensor, imm: int) -> None:
        super().__init__(channel, imm, ())
        self._remote, self._local, self._tensor = remote, local.data_ptr(), local

    def put(self, offset: int, nbytes: int) -> None:
        if kernels.put(self.address, self._remote + offset, self._local + offset, nbytes) != kernels.OK:
            raise self._channel.ended()

    put_now = put  # nothing is queued here


class ShmMapped(PreparedRequest, Mapped):
    """A piece of the peer's arena, which is mapped here anyway."""

    __slots__ = ("_inflight", "memory", "whole")

    def __init__(self, channel: Any, whole: memoryview, start: int, nbytes: int) -> None:
        super().__init__(channel, None, ())
        self.whole, self.memory, self._inflight = whole, whole[start : start + nbytes], 0

    def begin(self) -> None:
        self._inflight = kernels.enter(self.address)
        if self._inflight == 0:
            raise self._channel.ended()

    def end(self, nbytes: int) -> None:
        stats = self._channel.inboxes.stats
        kernels.add(stats, 1)
        kernels.add(stats + 8, nbytes)
        kernels.add(self._inflight, -1)
