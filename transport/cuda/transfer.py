"""Copies on side streams, prepared once as a job (``cuda/kernels``), so that a post is one call of a kernel.

Order: the copies wait for the work that the posting thread's current streams, of the GPUs that copy, were given before the
post. The notification comes after all copies. Later posts on the same GPU come later.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from ..channel import NOTHING, Transfer, Work, rebound
from ..errors import RdmaError, fresh
from ..gpu.driver import driver
from ..region import RemoteRegion
from ..shm.transfer import PreparedRequest
from ..words import kernels
from . import kernels as at
from .lane import Lane

Side = tuple[RemoteRegion, torch.Tensor, bool]
"""The remote range, the local tensor, and whether the copy is a WRITE."""
Copies = list[tuple[int, int, int]]
"""Destination, source, bytes."""
_table: list[np.ndarray] = []


def _functions() -> int:
    if not _table:
        found = [driver().function(name) for name in at.TABLE]
        _table.append(np.array([*found, at.finish.address], np.int64))
    return int(_table[0].ctypes.data)


class CudaWork(Work):
    __slots__ = ("_job", "_lane", "_ticket")

    def __init__(self, lane: Lane, ticket: int, job: CudaJob) -> None:
        self._lane, self._ticket, self._job = lane, ticket, job

    def done(self) -> bool:
        if not self._lane.over(self._ticket):
            self._lane.look()  # after a failure of the GPU nobody counts
        return self._lane.over(self._ticket)

    def wait(self, timeout: float | None = None) -> None:
        self._lane.wait(self._ticket, timeout)
        if error := self._job.error():
            raise fresh(error)
        self._lane.sweep()

    def exception(self) -> RdmaError | None:
        return self._job.error() if self.done() else None

    def block_current_stream(self) -> None:
        if not self._lane.over(self._ticket):
            self._lane.follow()


class CudaJob(PreparedRequest):
    """The words that one post needs. ``groups``: the copies of each lane; ``host``: the copies between host memories."""

    __slots__ = ("_after", "_job", "_words", "lanes")
    _channel: Any

    def __init__(self, channel: Any, groups: Sequence[tuple[Lane, Copies]], host: Copies, imm: int | None) -> None:
        super().__init__(channel, imm, host)
        self.block[kernels.WR_BYTES] += sum(nbytes for _, copies in groups for _, _, nbytes in copies)
        self.lanes = [lane for lane, _ in groups]
        self._after: list[tuple[int, Lane]] = []
        words = [0] * at.JOB_HEAD
        words[at.JOB_WR], words[at.JOB_DONE] = self.address, self.lanes[-1].done
        words[at.JOB_TABLE], words[at.JOB_GROUPS] = _functions(), len(groups)
        words[at.JOB_COPIES] = sum(len(copies) for _, copies in groups)
        for lane, copies in groups:
            self._after.append((len(words) + at.GROUP_AFTER, lane))
            head = [0] * at.GROUP_HEAD
            head[at.GROUP_CONTEXT], head[at.GROUP_STREAM] = lane.context, lane.stream
            head[at.GROUP_EVENT], head[at.GROUP_COUNT] = lane.event, len(copies)
            words += [*head, *(word for copy in copies for word in copy)]
        self._words = np.array(words, np.uint64).view(np.int64)  # addresses of a GPU may use all 64 bits
        self._job = int(self._words.ctypes.data)

    def post(self, things: object) -> CudaWork:
        """Enqueue it. ``things`` live until it is over."""
        lane = self.lanes[-1]
        lane.sweep()
        with ExitStack() if len(self.lanes) > 1 else lane.lock as held:
            if isinstance(held, ExitStack):
                for each in sorted(self.lanes, key=lambda lane: lane.index):
                    held.enter_context(each.lock)
            for word, each in self._after:
                self._words[word] = each.caller()
            status = at.post(self._job) if lane.stream else kernels.CLOSED
            ticket = lane.keep(self, things) if 0 <= status < at.NOT_STARTED else 0
        if status:
            raise self._failed(status & (at.NOT_STARTED - 1) if status > 0 else status)
        return CudaWork(lane, ticket, self)

    @property
    def failed(self) -> bool:
        """Whether it is of no use any more."""
        return bool(self._words[at.JOB_RESULT])

    def error(self) -> RdmaError | None:
        """How it went."""
        if status := self.lanes[-1].status:
            return self._channel.error or RdmaError("a GPU failed", peer=self._channel.peer, device="cuda", status=status)
        result = int(self._words[at.JOB_RESULT])
        return self._failed(result) if result else None

    def _failed(self, result: int) -> RdmaError:
        if result == kernels.CLOSED:
            return self._channel.ended()
        status = driver().name(result)
        hint = "the GPU's memory was freed, or a kernel before it failed"
        if result == at.CAPTURED:
            hint = "the current stream is being captured into a CUDA graph: post before or after that"
        return RdmaError(
            f"the driver refused a copy: {status}", peer=self._channel.peer, device="cuda", status=status, hint=hint
        )

    def lost(self) -> None:
        """The driver will not call ``finish`` any more: what this job has under way is not, either."""
        inflight = int(self._words[at.JOB_INFLIGHT])
        if inflight:
            kernels.add(inflight, -1)


class CudaTransfer(Transfer):
    """Some side is GPU memory. Where a remote side may be withdrawn, it is looked up anew for every post."""

    __slots__ = ("__weakref__", "_channel", "_imm", "_job", "_sides", "_withdrawable")

    def __init__(self, channel: Any, sides: list[Side], imm: int | None) -> None:
        self._channel, self._sides, self._imm = channel, sides, imm
        self._withdrawable = [remote for remote, _, _ in sides if channel.peer_gpus.withdrawable(remote)]
        self._job: CudaJob | None = self._built()

    def _built(self) -> CudaJob:
        """Addresses of everything, sorted by the GPU that copies."""
        groups: dict[Lane, Copies] = {}
        host: Copies = []
        for side in self._sides:
            lane, copies = self._channel.place(side)
            if lane is None:
                host += copies
            else:
                groups.setdefault(lane, []).extend(copies)
        return CudaJob(self._channel, list(groups.items()), host, self._imm)

    def post(self) -> Work:
        channel = self._channel
        channel.check()
        if self._job is None or self._job.failed:
            self._job = self._built()
        things = [tensor for _, tensor, _ in self._sides]
        if not self._withdrawable:
            return self._job.post(things)
        with channel.peer_gpus.lock:  # so that the owner, which takes a region back, hears of a post that was before
            for remote in self._withdrawable:
                channel.peer_gpus.still_there(remote)
            return self._job.post(things)

    def rebind(self, index: int, tensor: torch.Tensor) -> None:
        remote, _, write = self._sides[index]
        rebound(index, remote.nbytes, tensor, self._channel.peer_gpus.kind)
        self._sides[index] = (remote, tensor, write)
        if remote.nbytes:
            self._job = None  # built again when all are bound

    def unbind(self, index: int) -> None:
        remote, _, write = self._sides[index]
        self._sides[index] = (remote, NOTHING, write)
        if self._job is not None:
            for lane in self._job.lanes:
                lane.sweep()
