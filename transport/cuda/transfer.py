"""Copies on side streams, prepared once as a *job*, so that a post is one call of a kernel.

Order: the copies wait for the work that the posting thread's current streams, of the GPUs that copy, were given before the
post. The notification comes after all copies. Later posts on the same GPU come later.

Neither a post nor what the driver's own thread does when the copies are over takes any Python. A *job* is a block of words
(``JOB_*``) in private memory: the driver's functions, a *work request block* (``kernels.WR_*``: the copies between host
memories and the notification), and a *group* (``GROUP_*``) for every GPU that copies. ``post`` enqueues for each group: an
event on the caller's stream, the side stream's wait for it, the copies; then, behind the copies of all groups, the host
function ``FINISH`` with the job as its argument, on the side stream of the last group.

Invariants:

1. after the producer: a side stream waits for the event on the caller's stream before it copies.
2. data before count: ``FINISH`` is called when the copies before it on its stream, and those of the other groups, which that
   stream has waited for, are in memory. It makes the copies between host memories and the notification with ``kernels.post``.
3. no copy after abort: ``post`` enters (``kernels.enter``) before it enqueues anything, and ``FINISH`` leaves: ``inflight``
   counts the copies from the moment that they cannot be called back. A channel that has ended meanwhile notifies nobody any
   more. What has no copies for a GPU is not counted until ``FINISH`` runs: an abort need not wait for a stream that owes a
   notification only.
4. memory outlives its use: ``FINISH`` counts ``JOB_DONE`` last, and touches only that record from then on. The record belongs
   to the lane, which is not taken down before its stream is idle.
5. after a failure nothing is announced: once a call of the driver has failed (``JOB_RESULT``) no more copies are enqueued, but
   ``FINISH`` still is, behind those that were, so that the count ends. Where not even that could be enqueued, the context is
   lost and no stream of it runs on.

``JOB_RESULT`` stays what it became: a job that failed, or found its channel at its end, is of no use any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import numpy as np
import torch

from ..channel import NOTHING, Transfer, Work, rebound
from ..errors import RdmaError, fresh
from ..gpu.driver import CU_STREAM_CAPTURE_MODE_RELAXED, driver
from ..region import RemoteRegion
from ..shm.transfer import PreparedRequest
from ..words import kernels
from ..words.atomics import call, fetch_add, load_acquire, store_release, word_of
from ..words.compiled import compiled, compiled_callback
from ..words.kernels import CLOSED, OK, enter
from ..words.kernels import post as finish_host
from ..words.signals import signal
from ..words.symbols import i64, void
from .lane import Lane

JOB_WR, JOB_DONE, JOB_TABLE, JOB_COPIES, JOB_INFLIGHT, JOB_RESULT, JOB_SCRATCH, JOB_MODE, JOB_GROUPS, JOB_HEAD = range(10)
"""The work request block; the lane's record; the functions; whether GPUs copy; where ``FINISH`` leaves; how it went (``OK``,
``CLOSED``, or the driver's error); a word for answers of the driver; the mode of captures (``Driver.relaxed``); how many
groups; the first of them."""
GROUP_CONTEXT, GROUP_STREAM, GROUP_AFTER, GROUP_EVENT, GROUP_COUNT, GROUP_HEAD = range(6)
"""The device's context, the side stream, the caller's stream, an event of the lane; then (destination, source, bytes) a
copy."""
PUSH, POP, MODE, CAPTURING, RECORD, AWAIT, COPY, LAUNCH, FINISH = range(9)
"""The table of functions, as ``TABLE`` names them, and the address of ``finish``."""
TABLE = (
    "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuThreadExchangeStreamCaptureMode", "cuStreamIsCapturing", "cuEventRecord",
    "cuStreamWaitEvent", "cuMemcpyAsync", "cuLaunchHostFunc",
)  # fmt: skip
CAPTURED = 900
"""``CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED``."""
NOT_STARTED = 1 << 32
"""Added to an error of ``post`` after which ``FINISH`` will not run."""


@compiled(i64(i64, i64, i64, i64))
def _group(job: int, group: int, table: int, status: int) -> int:
    """Enqueue one group's wait and copies in its context, which is current then; the first error."""
    stream, event, scratch = word_of(group, GROUP_STREAM), word_of(group, GROUP_EVENT), job + 8 * JOB_SCRATCH
    if status == 0:
        store_release(scratch, 0)
        status = call(word_of(table, CAPTURING), word_of(group, GROUP_AFTER), scratch, 0, 0)
        # Our stream would become a part of the graph, and the copies too.
        status = CAPTURED if status == 0 and load_acquire(scratch) != 0 else status
    if status == 0:
        status = call(word_of(table, RECORD), event, word_of(group, GROUP_AFTER), 0, 0)
    if status == 0:
        status = call(word_of(table, AWAIT), stream, event, 0, 0)
    at = group + 8 * GROUP_HEAD
    for _ in range(word_of(group, GROUP_COUNT)):
        if status != 0:
            break
        status = call(word_of(table, COPY), load_acquire(at), load_acquire(at + 8), load_acquire(at + 16), stream)
        at += 24
    return status


@compiled(i64(i64))
def post(job: int) -> int:
    """Enqueue a job whose last post is done (one without copies: any). ``OK``; ``CLOSED``; or the driver's error, with
    ``NOT_STARTED`` or else ``FINISH`` runs all the same. The caller holds the locks of all its lanes."""
    inflight = enter(word_of(job, JOB_WR))
    if inflight == 0:
        return CLOSED
    if word_of(job, JOB_COPIES) == 0:
        fetch_add(inflight, -1)
        inflight = 0
    store_release(job + 8 * JOB_INFLIGHT, inflight)
    table, groups, scratch = word_of(job, JOB_TABLE), word_of(job, JOB_GROUPS), job + 8 * JOB_SCRATCH
    status, group, mode = 0, job + 8 * JOB_HEAD, job + 8 * JOB_MODE
    store_release(mode, CU_STREAM_CAPTURE_MODE_RELAXED)
    call(word_of(table, MODE), mode, 0, 0, 0)
    for number in range(groups):
        pushed = call(word_of(table, PUSH), word_of(group, GROUP_CONTEXT), 0, 0, 0)
        status = _group(job, group, table, status if status != 0 else pushed)
        if pushed == 0 and number < groups - 1:
            # Again the same event: the wait above stands for its recording of then.
            failed = call(word_of(table, RECORD), word_of(group, GROUP_EVENT), word_of(group, GROUP_STREAM), 0, 0)
            status = status if status != 0 else failed
        elif pushed == 0:
            earlier = job + 8 * JOB_HEAD
            for _ in range(groups - 1):
                failed = call(word_of(table, AWAIT), word_of(group, GROUP_STREAM), word_of(earlier, GROUP_EVENT), 0, 0)
                status = status if status != 0 else failed
                earlier += 8 * (GROUP_HEAD + 3 * word_of(earlier, GROUP_COUNT))
            if status != 0:
                store_release(job + 8 * JOB_RESULT, status)
            launched = call(word_of(table, LAUNCH), word_of(group, GROUP_STREAM), word_of(table, FINISH), job, 0)
            if launched != 0:
                status = launched | NOT_STARTED
        else:
            status |= NOT_STARTED
        if pushed == 0:
            call(word_of(table, POP), scratch, 0, 0, 0)
        group += 8 * (GROUP_HEAD + 3 * word_of(group, GROUP_COUNT))
    call(word_of(table, MODE), mode, 0, 0, 0)  # as it was
    if status >= NOT_STARTED:
        store_release(job + 8 * JOB_RESULT, status & (NOT_STARTED - 1))
        if inflight != 0 and groups == 1:  # the streams of other GPUs may still run: then it stays counted
            fetch_add(inflight, -1)
    return status


@compiled_callback(void(i64))
def finish(job: int) -> None:
    """The host function: on a thread of the driver, which must neither call the driver nor wait for Python."""
    inflight, done = word_of(job, JOB_INFLIGHT), word_of(job, JOB_DONE)
    if word_of(job, JOB_RESULT) == OK:
        result = finish_host(word_of(job, JOB_WR))
        if result != OK:
            store_release(job + 8 * JOB_RESULT, result)
    if inflight != 0:
        fetch_add(inflight, -1)
    signal(done, 0)


Side = tuple[RemoteRegion, torch.Tensor, bool]
"""The remote range, the local tensor, and whether the copy is a WRITE."""
Copies = list[tuple[int, int, int]]
"""Destination, source, bytes."""


@cache
def _functions() -> np.ndarray:
    return np.array([*map(driver().function, TABLE), finish.address], np.int64)


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
        words = [0] * JOB_HEAD
        words[JOB_WR], words[JOB_DONE] = self.address, self.lanes[-1].done
        words[JOB_TABLE], words[JOB_GROUPS] = _functions().ctypes.data, len(groups)
        words[JOB_COPIES] = sum(len(copies) for _, copies in groups)
        for lane, copies in groups:
            self._after.append((len(words) + GROUP_AFTER, lane))
            head = [0] * GROUP_HEAD
            head[GROUP_CONTEXT], head[GROUP_STREAM] = lane.context, lane.stream
            head[GROUP_EVENT], head[GROUP_COUNT] = lane.event, len(copies)
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
            status = post(self._job) if lane.stream else kernels.CLOSED
            ticket = lane.keep(self, things) if 0 <= status < NOT_STARTED else 0
        if status:
            raise self._failed(status & (NOT_STARTED - 1) if status > 0 else status)
        return CudaWork(lane, ticket, self)

    @property
    def failed(self) -> bool:
        """Whether it is of no use any more."""
        return bool(self._words[JOB_RESULT])

    def error(self) -> RdmaError | None:
        """How it went."""
        if status := self.lanes[-1].status:
            return self._channel.error or RdmaError("a GPU failed", peer=self._channel.peer, device="cuda", status=status)
        result = int(self._words[JOB_RESULT])
        return self._failed(result) if result else None

    def _failed(self, result: int) -> RdmaError:
        if result == kernels.CLOSED:
            return self._channel.ended()
        status = driver().name(result)
        hint = "the GPU's memory was freed, or a kernel before it failed"
        if result == CAPTURED:
            hint = "the current stream is being captured into a CUDA graph: post before or after that"
        return RdmaError(
            f"the driver refused a copy: {status}", peer=self._channel.peer, device="cuda", status=status, hint=hint
        )

    def lost(self) -> None:
        """The driver will not call ``finish`` any more: what this job has under way is not, either."""
        inflight = int(self._words[JOB_INFLIGHT])
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
