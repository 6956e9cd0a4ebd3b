"""GPU memory on a ``verbs`` device: registered with the adapter where that is possible, else staged in the arena.

What is registered is an allocation of the driver (a *segment*: torch's allocator makes many tensors in one), whole and once,
so that a tensor in a known one costs two questions to the driver. The driver's number of an allocation is never given again:
memory that was freed, and another allocation at its address, are told from it. A registration holds the memory (a dma-buf does)
until somebody notices that it was freed: the next registration, or a thread within half a second.

The adapter knows no streams. So memory is posted when what the current streams of the posting thread have been given is done
(``behind``); and where the GPU does not see arrived data in order by itself, it is made visible after each notification and
each READ (``flush``, see ``gpudirect.NONE``).

Never run on hardware: see ``gpudirect``.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterable
from ctypes import byref, c_int, c_uint, c_uint64
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..channel import Work
from ..errors import NotSupported, RdmaError, RegistrationError
from ..gpu import driver
from ..gpu.driver import Driver
from ..gpu.events import NOT_READY, Event
from ..gpu.pins import Pins
from ..memory.arena import Block
from ..nic.libibverbs import REMOTE_WRITE
from ..nic.native import Context, MemoryRegion
from ..peers.guard import Guard
from ..region import local_bytes
from . import gpudirect
from .gpudirect import Decision, Refused

if TYPE_CHECKING:
    from ..gpu.behind import Behind

WAIT_LIMIT_S = 60.0
"""How long ``wait`` does."""
_TEND_S, _JOIN_S = 0.5, 5.0
_ROOT = Path("/")
_FOR_GOOD = ("EOPNOTSUPP", "EPROTONOSUPPORT", "ENOSYS", "CUDA_ERROR_NOT_SUPPORTED")
"""Errors that refuse a way for all memory, not only for one allocation."""
_WAIT_FLUSH = 1 << 30  # CU_STREAM_WAIT_VALUE_FLUSH


@dataclass(slots=True)
class Segment:
    """An allocation of the driver. ``mr`` is ``None`` where it is staged; ``refused`` says why ``way`` is not a better one."""

    number: int
    base: int
    nbytes: int
    index: int
    mr: MemoryRegion | None = None
    way: str = gpudirect.STAGED
    refused: list[Refused] = field(default_factory=list)
    views: int = 0


class _View(MemoryRegion):
    """A tensor's part of a segment, for peers. While it is open the segment stays registered."""

    def __init__(self, segment: Segment, mr: MemoryRegion, pointer: int, lock: threading.RLock) -> None:
        self.address = mr.address + pointer - segment.base
        self.lkey, self.rkey = mr.lkey, mr.rkey
        self._segment: Segment | None = segment
        self._lock = lock
        with lock:
            segment.views += 1

    def close(self) -> None:
        with self._lock:
            segment, self._segment = self._segment, None
            if segment is not None:
                segment.views -= 1


class GpuMemory:
    """The GPU memory that one RDMA device has registered, and posts from it. Thread-safe. Close it before its context.
    ``count(name)`` adds one to a counter. ``pins``: the arena's pinned segments, if there are any."""

    def __init__(self, context: Context, count: Callable[[str], None], pins: Pins | None = None) -> None:
        """Raises ``NotSupported`` where no GPU driver is installed."""
        self._cuda: Driver = driver.driver()
        self.kind = driver.kind()
        self._context, self._count = context, count
        self._pins, self._own_pins = pins or Pins(), pins is None
        self._lock = threading.RLock()
        self._segments: dict[int, Segment] = {}
        self._decisions: dict[int, Decision] = {}
        self._gpus: dict[int, gpudirect.Gpu] = {}
        self._adapter = gpudirect.adapter_of(context.name, _ROOT, context.dma_buf_status())
        self._module = gpudirect.peermem(_ROOT)
        self._behind: dict[int, Behind] = {}
        self._notes: set[str] = set()
        self._flushers: dict[int, Callable[[], None]] = {}
        self._flushed: set[int] = set()  # GPUs that something can arrive in, and that need it
        self._stopping = threading.Event()
        self._tending: threading.Thread | None = None

    # -- registration

    def decision(self, index: int) -> Decision:
        """How the adapter reaches a GPU. The decision changes when a way turns out not to work."""
        with self._lock:
            if index not in self._decisions:
                gpu = self._gpus[index] = gpudirect.gpu_of(self._cuda, index, _ROOT)
                found = gpudirect.decide(gpu, self._adapter, self._module)
                if found.way != gpudirect.STAGED and found.flush != gpudirect.NONE:
                    found = self._with_flush(index, found)
                self._decisions[index] = found
            return self._decisions[index]

    def _with_flush(self, index: int, decision: Decision) -> Decision:
        """Try the flush that a GPU needs. If it fails, the decision is to stage the GPU's memory."""
        try:
            with self._cuda.on(index):
                flush = self._flusher(index, decision.flush)
                flush()
        except RdmaError as error:
            for way in decision.ways[:-1]:
                decision = decision.without(Refused(way, f"GPU {index} needs a flush, and {error.message}", error.hint))
            return decision
        self._flushers[index] = flush
        return decision

    def segment(self, pointer: int, nbytes: int, index: int) -> Segment:
        """The segment that holds these bytes of a GPU, registered if it can be. ``NotSupported`` for memory that is no single
        allocation."""
        with self._cuda.on(index):
            base, size, number = self._cuda.allocation(pointer)
            if pointer + nbytes > base + size:
                hint = "PYTORCH_CUDA_ALLOC_CONF without expandable_segments gives memory in one piece"
                raise NotSupported("this GPU memory is made of several allocations", device="verbs", hint=hint)
            with self._lock:
                found = self._segments.get(number)
                if found is None:
                    self.sweep()
                    found = Segment(number, base, size, index)
                    self._register(found)
                    self._segments[number] = found
        return found

    def _register(self, segment: Segment) -> None:
        """Try the ways, in the context of the GPU."""
        decision = self.decision(segment.index)
        if decision.way != gpudirect.STAGED:
            # Synchronous copies of the driver then have ended when they return.
            yes = c_uint(1)
            attribute = driver.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
            if status := self._cuda.attempt("cuPointerSetAttribute", byref(yes), attribute, segment.base):
                self._notes.add(f"CU_POINTER_ATTRIBUTE_SYNC_MEMOPS was refused: {status}")
        for way in decision.ways[:-1]:
            try:
                segment.mr = self._dma_buf(segment) if way == gpudirect.DMA_BUF else self._pinned(segment)
            except RdmaError as error:
                status = "" if error.status in error.message else f" ({error.status})"
                refused = Refused(way, error.message + status, error.hint)
                if error.status in _FOR_GOOD:
                    decision = self._decisions[segment.index] = decision.without(refused)
                else:
                    segment.refused.append(refused)
                continue
            segment.way = way
            self._count("registrations")
            if self._tending is None:
                self._tending = threading.Thread(target=self._tend, name="rdmarpc-gpu-memory", daemon=True)
                self._tending.start()
            if segment.index in self._flushers:
                self._flushed.add(segment.index)
            break
        segment.refused = list(gpudirect.better([*decision.refused, *segment.refused], segment.way))

    def _dma_buf(self, segment: Segment) -> MemoryRegion:
        """Register a segment as a dma-buf. ``cuMemGetHandleForAddressRange`` takes whole pages of the host."""
        page, fd = os.sysconf("SC_PAGE_SIZE"), c_int(-1)
        start = segment.base // page * page
        nbytes = -(-(segment.base + segment.nbytes - start) // page) * page
        kind = driver.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        self._cuda.call("cuMemGetHandleForAddressRange", byref(fd), start, nbytes, kind, 0)
        try:
            return self._context.register_dma_buf(fd.value, segment.base - start, segment.nbytes)
        finally:
            os.close(fd.value)

    def _pinned(self, segment: Segment) -> MemoryRegion:
        return self._context.register(segment.base, segment.nbytes, REMOTE_WRITE, device_memory=True)

    def reach(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """The address of the tensor's first byte in work requests, and its key; ``None`` if it has to be staged."""
        pointer, nbytes = local_bytes(tensor, self.kind)
        try:
            segment = self.segment(pointer, nbytes, tensor.device.index)
        except RdmaError as error:  # of a kind of memory that the driver tells nothing of, or that is not in one piece
            with self._lock:
                self._notes.add(f"staged: {error.message}")
            return None
        return (segment.mr.address + pointer - segment.base, segment.mr.lkey) if segment.mr is not None else None

    def share(self, tensor: torch.Tensor) -> MemoryRegion:
        """Register a tensor for peers. Raises ``RegistrationError`` with the reason against each way, if there is none."""
        pointer, nbytes = local_bytes(tensor, self.kind)
        try:
            segment = self.segment(pointer, nbytes, tensor.device.index)
        except RdmaError as error:  # as in ``reach``
            raise RegistrationError(error.message, device="verbs", status=error.status, hint=error.hint) from error
        if segment.mr is None:
            why = "; ".join(map(str, segment.refused))
            hint = next((each.hint for each in segment.refused if each.hint), "")
            raise RegistrationError(
                f"peers cannot reach memory of GPU {segment.index}: {why}",
                device="verbs",
                hint=f"let it land in host memory (device.empty), and copy it; to have it land there: {hint}",
            )
        return _View(segment, segment.mr, pointer, self._lock)

    def _tend(self) -> None:
        """A thread of its own, because calls of the driver may block for as long as a kernel runs."""
        guard = Guard("rdmarpc-gpu-memory")
        while not self._stopping.wait(_TEND_S):
            try:
                self.sweep()
            except BaseException as error:
                guard.note(error, "letting go of GPU memory that was freed")

    def sweep(self) -> None:
        """Let go of what was freed. Any thread; raises nothing."""
        with self._lock:
            for segment in [each for each in self._segments.values() if not each.views]:
                try:
                    self._look_after(segment)
                except RdmaError as error:
                    self._notes.add(error.message)

    def _look_after(self, segment: Segment) -> None:
        number = c_uint64()
        with self._cuda.on(segment.index):
            attribute = driver.CU_POINTER_ATTRIBUTE_BUFFER_ID
            gone = self._cuda.attempt("cuPointerGetAttribute", byref(number), attribute, segment.base)
        if gone or number.value != segment.number:
            del self._segments[segment.number]
            _close(segment)

    # -- order

    def behind(self, channel: Any, indices: Collection[int], post: Callable[[], Work]) -> Work | None:
        """Have ``post`` called when what the current streams of these GPUs have been given is done, and what was posted from
        the first of them before. ``None``: that is so now, and the caller posts. ``RdmaError`` where a GPU has failed."""
        if driver.capturing():
            why = "the current stream is being captured into a CUDA graph"
            raise NotSupported(why, device="verbs", hint="post before or after that")
        streams = [(index, driver.current_stream(index)) for index in indices]
        streams = [(index, stream) for index, stream in streams if self._busy(index, stream)]
        first = min(indices)
        queue = self._behind.get(first)
        if not streams and (queue is None or queue.idle):
            return None
        if queue is None:
            from ..gpu.behind import Behind  # it compiles a kernel, which only a process with a GPU needs

            with self._lock:
                if (queue := self._behind.get(first)) is None:
                    queue = self._behind[first] = Behind(self._cuda, first)
        self._count("gpu_posts_behind")
        return queue.put(channel, streams, post)

    def _busy(self, index: int, stream: int) -> bool:
        with self._cuda.on(index):
            status = self._cuda.attempt("cuStreamQuery", stream)
        if status not in ("", NOT_READY):
            raise RdmaError(f"work of the GPU failed before memory was posted: {status}", device="verbs", status=status)
        return status == NOT_READY

    def wait(self, indices: Iterable[int]) -> None:
        """Wait until the current streams of these GPUs have done what they have been given; other threads may run meanwhile.
        Raises ``RdmaError`` with the driver's error if that failed, ``TransferTimeout`` after ``WAIT_LIMIT_S``."""
        for index in indices:
            stream = driver.current_stream(index)
            if not self._busy(index, stream):
                continue
            self._count("gpu_waits")
            late = f"GPU {index} is not done after {WAIT_LIMIT_S:g} s with what the current stream was given"
            Event(index, stream).wait(WAIT_LIMIT_S, late, "verbs")  # not the stream: others may give it work for ever

    @property
    def flushes(self) -> bool:
        """Whether ``flush`` has anything to do."""
        return bool(self._flushed)

    def flush(self) -> None:
        """Make the data that has arrived so far visible to work that is started on the GPUs from now on."""
        for index in list(self._flushed):
            with self._cuda.on(index):
                self._flushers[index]()
            self._count("gpu_flushes")

    def _flusher(self, index: int, how: str) -> Callable[[], None]:
        cuda = self._cuda
        if how == gpudirect.CALL:
            target = driver.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
            scope = driver.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
            return lambda: cuda.call("cuFlushGPUDirectRDMAWrites", target, scope)
        # A wait that is satisfied already, with a flush behind it, on a stream of our own; its end is waited for.
        word = torch.zeros(1, dtype=torch.int32, device=torch.device(driver.kind(), index))
        self.wait([index])
        stream = cuda.new_stream()

        def flush() -> None:
            flags = driver.CU_STREAM_WAIT_VALUE_GEQ | _WAIT_FLUSH
            cuda.call("cuStreamWaitValue32_v2", stream, word.data_ptr(), 0, flags)
            cuda.call("cuStreamSynchronize", stream)

        return flush

    # -- staging

    def stage(self, block: Block, tensor: torch.Tensor, *, out: bool) -> None:
        """Copy a tensor of a GPU to the start of a block of the arena (``out``), or back, on its current stream: ``wait`` for
        it."""
        pointer, nbytes = local_bytes(tensor, self.kind)
        index, segment = tensor.device.index, block.segment
        at = segment.address + block.offset
        stream = driver.current_stream(index)
        with self._cuda.on(index):
            self._pins.segment(segment, index)
            self._cuda.call("cuMemcpyAsync", *((at, pointer) if out else (pointer, at)), nbytes, stream)

    # -- for people, and the end

    def explain(self) -> list[str]:
        """A line for each GPU that was used, and one for each way that it is not reached by."""
        lines = []
        with self._lock:
            for index, decision in self._decisions.items():
                mine = [segment for segment in self._segments.values() if segment.index == index]
                ways = {way: sum(each.way == way for each in mine) for way in gpudirect.WAYS}
                told = ", ".join(f"{count} segments {way}" for way, count in ways.items() if count) or "nothing registered"
                gpu = self._gpus[index]
                far = gpudirect.distance(gpu, self._adapter) + (f", a window of {gpu.bar1 >> 20} MiB" if gpu.bar1 else "")
                lines.append(f"  gpu {index:<10} {decision.way}, {far}; {told}; flush: {decision.flush} (untried on hardware)")
                refused = dict.fromkeys([*decision.why, *(each for one in mine for each in one.refused)])
                lines += [f"                 {each}" for each in refused]
            return [*lines, *(f"  gpu            {note}" for note in sorted(self._notes))]

    def close(self) -> None:
        """Deregister everything. Idempotent."""
        self._stopping.set()
        for queue in self._behind.values():
            queue.close()
        if self._tending is not None:
            self._tending.join(timeout=_JOIN_S)
        with self._lock:
            segments, self._segments = list(self._segments.values()), {}
            self._flushed.clear()
            for segment in segments:
                _close(segment)
            if self._own_pins:
                with contextlib.suppress(RdmaError):  # the driver is gone already: the process ends
                    self._pins.close()


def _close(segment: Segment) -> None:
    mr, segment.mr = segment.mr, None
    if mr is not None:
        mr.close()
