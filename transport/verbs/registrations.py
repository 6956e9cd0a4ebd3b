"""The memory that an RDMA device has registered with its adapter: segments of the arena, memory from elsewhere, GPU memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

from ..gpu import driver
from ..gpu.arena import GpuArena
from ..memory.arena import READ, Pool, Segment
from ..memory.memory import Memory
from ..nic.attributes import LOCAL, REMOTE_READ, REMOTE_WRITE
from ..nic.native import Context, MemoryRegion
from .control import LANDING, REGION, SEGMENT
from .gpu import GpuMemory

Announcement = tuple[int, int, int, int, int, int]
"""A control message: kind, number, key, address, bytes, rkey."""


class Registrations:
    """The memory regions of one device. Any thread. Close it before its context."""

    def __init__(self, context: Context, memory: Memory, lock: threading.RLock) -> None:
        """``lock``: the device's lock. The device enters new channels under it too, so that each channel is told of every
        region: when it connects, or when the region is registered."""
        self._context, self._memory, self._lock = context, memory, lock
        self.arena = memory.arena
        self.gpu_kind = driver.kind()
        """The type of the GPUs whose memory can be copied; empty: there are none."""
        self._regions: dict[int, MemoryRegion] = {}
        self._gpu: GpuMemory | None = None
        self._shared: dict[int, tuple[torch.Tensor, int]] = {}  # GPU memory: number -> (what peers may touch, key)

    def count(self, name: str) -> None:
        self._memory.count(name)

    def count_staged(self, nbytes: int) -> None:
        self._memory.count("bytes_staged", nbytes)

    # -- for peers

    def segment(self, segment: Segment) -> Announcement | None:
        """Register a segment of the arena. Returns ``None`` if it is registered already."""
        with self._lock:
            if segment.number in self._regions:
                return None
            access = REMOTE_READ if segment.pool.access == READ else REMOTE_WRITE
            region = self._regions[segment.number] = self._context.register(segment.address, segment.nbytes, access)
            return _of_segment(segment, region)

    def foreign(self, number: int, key: int, address: int, nbytes: int) -> Announcement:
        """Register memory from elsewhere."""
        region = self._regions[number] = self._context.register(address, nbytes, REMOTE_WRITE)
        return REGION, number, key, address, nbytes, region.rkey

    def on_gpu(self, tensor: torch.Tensor) -> MemoryRegion:
        """Register GPU memory, which holds then what the current stream has been given to do until now.
        ``RegistrationError`` where the adapter cannot reach it."""
        region = self.gpu.share(tensor)
        self.gpu.wait([tensor.device.index])
        return region

    def share(self, tensor: torch.Tensor, region: MemoryRegion) -> Announcement:
        """Open memory that ``on_gpu`` registered to peers. Call it with the lock held."""
        number, key = self._memory.take_number()
        self._regions[number], self._shared[number] = region, (tensor, key)
        return REGION, number, key, region.address, tensor.nbytes, region.rkey

    def is_gpu(self, number: int) -> bool:
        return number in self._shared

    def forget(self, number: int) -> None:
        """Deregister it."""
        with self._lock:
            region = self._regions.pop(number, None)
        if region is not None:
            region.close()

    def forget_gpu(self, number: int) -> None:
        """Release the tensor that ``share`` kept. Call it after ``forget``."""
        with self._lock:
            self._shared.pop(number, None)

    def announcements(self, own: Pool | None) -> Iterator[Announcement]:
        """The announcements for a new peer whose own pool is ``own``. Call it with the lock held."""
        segments, foreign = self._memory.registered(own)
        for number, region in self._regions.items():
            if (segment := segments.get(number)) is not None:
                yield _of_segment(segment, region)
            elif (entry := foreign.get(number)) is not None:
                yield REGION, number, entry.key, entry.address, entry.nbytes, region.rkey
            elif (shared := self._shared.get(number)) is not None:
                tensor, key = shared
                yield REGION, number, key, region.address, tensor.nbytes, region.rkey

    # -- for ourselves

    def lkey(self, address: int, nbytes: int) -> int | None:
        """The key of local memory that is registered for as long as it is held: the arena's."""
        found = self.arena.find(address, nbytes)
        return self._regions[found[0].number].lkey if found is not None else None

    def local(self, address: int, nbytes: int) -> MemoryRegion:
        """Register memory for our own posts only; the caller closes it."""
        self.count("registrations")
        return self._context.register(address, nbytes, LOCAL)

    # -- GPUs

    @property
    def gpu(self) -> GpuMemory:
        """The registered GPU memory. Raises ``NotSupported`` where no GPU driver is installed."""
        with self._lock:
            if self._gpu is None:
                arena = self._memory.gpu
                self._gpu = GpuMemory(self._context, self.count, arena.pins if isinstance(arena, GpuArena) else None)
            return self._gpu

    def arrived(self) -> None:
        """Make arrived data visible to the GPUs that need a flush for that."""
        if self._gpu is not None and self._gpu.flushes:
            self._gpu.flush()

    def explain(self) -> list[str]:
        return self._gpu.explain() if self._gpu is not None else []

    def close(self) -> None:
        """Deregister everything. Idempotent."""
        for region in self._regions.values():
            region.close()
        if self._gpu is not None:
            self._gpu.close()


def _of_segment(segment: Segment, region: MemoryRegion) -> Announcement:
    kind = SEGMENT if segment.pool.access == READ else LANDING
    return kind, segment.number, segment.key, segment.address, segment.nbytes, region.rkey
