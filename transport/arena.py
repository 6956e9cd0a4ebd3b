"""The arena: an allocator over a few large registered segments. Tensors made here are born registered.

Sizes are rounded up to classes (eight per doubling: at most one eighth is wasted, at least ``ALIGN`` bytes). A freed
block first goes to its class's last-in-first-out bin, so that repeated work gets memory that is still mapped and warm
(a cold page costs 4 to 10 times the copy into it). Only when no bin and no extent fits are the bins merged back into
extents, neighbours joined; only then does the arena grow by a segment.
"""

from __future__ import annotations

import bisect
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from .errors import ArenaFull

ALIGN = 64
SEGMENT_BYTES = 64 << 20
PINNED_SEGMENT_BYTES = 16 << 20
"""The first one where registering it pins all of it."""
_RESERVE = 1 << 20
_MAX_GROWTH = 1 << 30
_HUGE_PAGE = 2 << 20
_SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Segment:
    """One registered piece of memory, shared (``fd`` >= 0) or private, readable and writable for its whole life."""

    def __init__(self, number: int, key: int, memory: mmap.mmap, fd: int = -1) -> None:
        self.number, self.key, self.fd = number, key, fd
        self.view = memoryview(memory)
        self.nbytes = len(memory)
        self.address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        self._reserved = 0
        # Refused where the system does not allow huge pages for this kind of memory; the pages are then small ones.
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass

    def reserve(self, end: int) -> None:
        """Have the pages of the first ``end`` bytes now. A shared page that is first touched costs 1 to 2 us, one that only has
        to be mapped a quarter of that (the kernel maps sixteen at once); and where there is no memory left, this is an error
        instead of a SIGBUS. Raises ``ArenaFull``."""
        if self.fd < 0 or end <= self._reserved:
            return
        end = min(self.nbytes, -(-end // _RESERVE) * _RESERVE)
        try:
            os.posix_fallocate(self.fd, self._reserved, end - self._reserved)
        except OSError as error:
            raise ArenaFull(
                f"this host has no memory for {end - self._reserved} more bytes of the arena: {error.strerror}",
                hint="free memory (memory limits of containers count shared memory too), or lower arena_limit",
            ) from None
        self._reserved = end

    def close(self) -> None:
        """Close the file. The memory stays mapped for as long as a tensor over it is held."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


@dataclass(slots=True, frozen=True)
class Block:
    """A range of a segment. Whoever allocated it frees it, once."""

    segment: Segment
    offset: int
    nbytes: int


class _Lease(weakref.ref):
    __slots__ = ("block", "storage")
    block: Block
    storage: int
    """Which storage holds the block, as torch identifies it."""


def parse_bytes(text: str) -> int:
    """``"512MiB"``, ``"8g"``, ``"1048576"`` -> bytes."""
    lowered = text.strip().lower().removesuffix("ib").removesuffix("b")
    number, suffix = (lowered[:-1], lowered[-1]) if lowered and lowered[-1] in "kmgt" else (lowered, "")
    return int(float(number) * _SUFFIXES[suffix])


def default_limit() -> int:
    """``RDMARPC_ARENA_LIMIT`` if set, else half of this host's memory (bytes)."""
    if text := os.environ.get("RDMARPC_ARENA_LIMIT"):
        try:
            return parse_bytes(text)
        except ValueError:
            raise ValueError(f"RDMARPC_ARENA_LIMIT={text!r} is not a size; 512MiB or 8g would be") from None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def size_class(nbytes: int) -> int:
    """The rounded size, in bytes, that an allocation of ``nbytes`` takes."""
    nbytes = max(nbytes, ALIGN)
    step = max(ALIGN, 1 << (nbytes - 1).bit_length() >> 4)
    return (nbytes + step - 1) // step * step


class Arena:
    """Thread-safe. ``new_segment(nbytes)`` makes and registers a segment of at least that size; ``limit`` (bytes) bounds the
    sum of all segments. Segments live as long as the arena."""

    def __init__(self, new_segment: Callable[[int], Segment], limit: int | None = None) -> None:
        self.limit = default_limit() if limit is None else limit
        self.segment_bytes = SEGMENT_BYTES
        """Of the first segment; less where registering one pins all of it. The following ones double the arena."""
        self.segments: list[Segment] = []
        self.used = 0  # bytes in live blocks, class sizes
        self._new_segment = new_segment
        self._lock = threading.Lock()
        self._bins: dict[int, list[Block]] = {}
        self._extents: list[tuple[int, int, int]] = []  # (segment index, offset, bytes), sorted, neighbours joined
        self._index: dict[int, int] = {}  # segment number -> index in self.segments
        self._leases: dict[int, _Lease] = {}  # by address
        # Filled by weak reference callbacks, which run anywhere, even inside ``allocate``: append only, no lock.
        self._returned: deque[Block] = deque()

    @property
    def capacity(self) -> int:
        return sum(segment.nbytes for segment in self.segments)

    def allocate(self, nbytes: int) -> Block:
        """A block of at least ``nbytes``, aligned to ``ALIGN``. Raises ``ArenaFull``."""
        size = size_class(nbytes)
        with self._lock:
            self._reclaim()
            ready = self._bins.get(size)
            if ready:
                block = ready.pop()
            else:
                found = self._carve(size)
                if found is None:
                    self._merge_bins()
                    found = self._carve(size)
                if found is None:
                    self._grow(size)
                    found = self._carve(size)
                assert found is not None
                block = found
            self.used += size
        return block

    def free(self, block: Block) -> None:
        """Give a block back. No lock is taken: safe from finalizers and from any thread."""
        self._returned.append(block)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor over a fresh block, which returns when the last tensor over its storage dies."""
        count = prod(shape)
        nbytes = count * dtype.itemsize
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        return self._lease(nbytes, dtype, count)[0].view(tuple(shape))

    def run(self, nbytes: int) -> tuple[torch.Tensor, Block]:
        """As ``tensor``, of ``nbytes`` > 0 bytes, and the block it lies in."""
        return self._lease(nbytes, torch.uint8, nbytes)

    def _lease(self, nbytes: int, dtype: torch.dtype, count: int) -> tuple[torch.Tensor, Block]:
        block = self.allocate(nbytes)
        return self.hold(block, nbytes, dtype, count), block

    def hold(self, block: Block, nbytes: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        """A tensor of ``count`` elements over the first ``nbytes`` of a block, which belongs to it from now on."""
        view = block.segment.view[block.offset : block.offset + nbytes]
        lease = _Lease(view, self._expired)
        # The storage holds ``view``, so the weak reference to it fires when the storage dies.
        tensor = torch.frombuffer(view, dtype=dtype, count=count)
        lease.block, lease.storage = block, tensor.untyped_storage()._cdata
        self._leases[block.segment.address + block.offset] = lease
        return tensor

    def find(self, address: int, nbytes: int) -> tuple[Segment, int] | None:
        """The segment and offset where these local bytes lie, or ``None`` if they are not (all) in the arena."""
        for segment in self.segments:
            offset = address - segment.address
            if offset >= 0 and offset + nbytes <= segment.nbytes:
                return segment, offset
        return None

    def leased(self, storage: torch.UntypedStorage) -> Block | None:
        """The block that lives exactly as long as this storage; ``None`` for any other storage, also one that another library
        made over our memory."""
        lease = self._leases.get(storage.data_ptr())
        return lease.block if lease is not None and lease.storage == storage._cdata else None

    def _expired(self, lease: _Lease) -> None:
        self._leases.pop(lease.block.segment.address + lease.block.offset, None)
        self._returned.append(lease.block)

    def _reclaim(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            size = size_class(block.nbytes)
            self._bins.setdefault(size, []).append(block)
            self.used -= size

    def _carve(self, size: int) -> Block | None:
        best = -1
        for at, (_, _, free) in enumerate(self._extents):
            if free >= size and (best < 0 or free < self._extents[best][2]):
                best = at
        if best < 0:
            return None
        index, offset, free = self._extents[best]
        self.segments[index].reserve(offset + size)
        if free == size:
            del self._extents[best]
        else:
            self._extents[best] = (index, offset + size, free - size)
        return Block(self.segments[index], offset, size)

    def _merge_bins(self) -> None:
        for blocks in self._bins.values():
            for block in blocks:
                bisect.insort(self._extents, (self._index[block.segment.number], block.offset, block.nbytes))
        self._bins.clear()
        joined: list[tuple[int, int, int]] = []
        for index, offset, free in self._extents:
            if joined and joined[-1][0] == index and joined[-1][1] + joined[-1][2] == offset:
                joined[-1] = (index, joined[-1][1], joined[-1][2] + free)
            else:
                joined.append((index, offset, free))
        self._extents = joined

    def _grow(self, size: int) -> None:
        capacity = self.capacity
        wanted = max(self.segment_bytes, min(capacity, _MAX_GROWTH), -(-size // _HUGE_PAGE) * _HUGE_PAGE)
        room = (self.limit - capacity) // mmap.PAGESIZE * mmap.PAGESIZE
        if room < size:
            raise ArenaFull(
                f"the arena is full: {size} bytes asked for, {self.used} of {capacity} bytes in use, limit {self.limit}",
                hint="raise arena_limit (open_device, RpcBackendOptions) or RDMARPC_ARENA_LIMIT, or drop tensors",
            )
        segment = self._new_segment(min(wanted, room))
        self._index[segment.number] = len(self.segments)
        self.segments.append(segment)
        bisect.insort(self._extents, (len(self.segments) - 1, 0, segment.nbytes // ALIGN * ALIGN))
