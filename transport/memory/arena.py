"""The arena: an allocator over a few large registered segments. Tensors made here are born registered.

An adapter and the kernel guard whole segments, so the arena has *pools*, each with segments of its own. Peers have the same
rights on all memory of a pool (``Pool.admits``). Memory of one pool never becomes memory of another.

Sizes are rounded up to classes (eight per doubling: at most one eighth is wasted, at least ``ALIGN`` bytes). A freed
block first goes to its class's last-in-first-out bin, so that repeated work gets memory that is still mapped and warm
(a cold page costs 4 to 10 times the copy into it). Only when no bin and no extent fits are the bins merged back into
extents, neighbours joined; only then does the arena grow by a segment.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch

from ..errors import ArenaFull, RdmaError
from ..peers.guard import REFUSED
from . import sole
from .mapping import Shown, leave, watch

ALIGN = 64
SEGMENT_BYTES = 64 << 20
PINNED_SEGMENT_BYTES = 12 << 20
"""The first one where registering it pins all of it."""
POOL_BYTES = 2 << 20
"""The bytes of the first segment in the pool of a single peer, besides memory that is set apart there."""
READ, WRITE, OWN = range(3)
"""The rights on a pool: all peers read; all peers read and write; one peer reads and writes, the others have no rights."""
_RESERVE = 1 << 20
_MAX_GROWTH = 1 << 30
_HUGE_PAGE = 2 << 20
_MOST_SIZES = 4096
TENSORS, SLOTS, RINGS = "tensors of this program", "slots of served models", "rings"
"""The purposes of memory (``Arena.note``)."""
_SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Segment:
    """One registered piece of memory of a pool, shared (``fd`` >= 0) or private. This process may write it, whatever peers
    may."""

    def __init__(self, number: int, key: int, memory: mmap.mmap, pool: Pool, fd: int = -1) -> None:
        self.number, self.key, self.pool, self.fd = number, key, pool, fd
        self.shared = fd >= 0
        self.view = memoryview(memory)
        self.nbytes = len(memory)
        self.address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        self.apart = False
        """Made by ``Pool.set_apart``: it does not count."""
        self._reserved = 0
        # Refused where the system does not allow huge pages for shared memory; the pages are then small ones. For private
        # memory the system decides: where its memory is in small pieces, asking has each page wait until others have moved.
        if fd >= 0 and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)

    def reserve(self, end: int) -> None:
        """Have the pages of the first ``end`` bytes now. A shared page that is first touched costs 1 to 2 us, one that only has
        to be mapped a quarter of that (the kernel maps sixteen at once); and where there is no memory left, this is an error
        instead of a SIGBUS. Raises ``ArenaFull``."""
        if self.fd < 0 or end <= self._reserved:
            return
        step = _RESERVE if self.nbytes > POOL_BYTES else _RESERVE // 8  # a process may have hundreds of small pools
        end = min(self.nbytes, -(-end // step) * step)
        self.reserve_range(self._reserved, end - self._reserved)
        self._reserved = end

    def reserve_range(self, offset: int, nbytes: int) -> None:
        """Have these pages. Raises ``ArenaFull``."""
        if self.fd < 0:
            return
        try:
            os.posix_fallocate(self.fd, offset, nbytes)
        except OSError as error:
            if error.errno in REFUSED:
                return  # then pages come when they are touched
            why = f"this host has no memory for {nbytes} more bytes of the arena: {error.strerror}"
            hint = "free memory (memory limits of containers count shared memory too), or lower arena_limit"
            raise ArenaFull(why, hint=hint) from None

    def close(self) -> None:
        """Close the file. The memory stays mapped for as long as a tensor over it is held."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


@dataclass(slots=True, frozen=True)
class Block:
    """A range of a segment. The code that allocated it frees it, once."""

    segment: Segment
    offset: int
    nbytes: int


class _Lease(weakref.ref):
    __slots__ = ("block", "purpose", "storage")
    block: Block
    storage: int
    """The address of the ``c10::StorageImpl`` that holds the block (``_cdata``)."""
    purpose: str


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
    return _memory_of_host() // 2


def _memory_of_host() -> int:
    """In bytes. Where a sandbox forbids sysinfo, libc's sysconf gives any number without an error, so it is asked last."""
    try:
        with open("/proc/meminfo") as file:
            return int(file.readline().removeprefix("MemTotal:").split()[0]) << 10
    except (OSError, ValueError, IndexError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@lru_cache(_MOST_SIZES)
def size_class(nbytes: int) -> int:
    """The rounded size, in bytes, that an allocation of ``nbytes`` takes."""
    nbytes = max(nbytes, ALIGN)
    step = max(ALIGN, 1 << (nbytes - 1).bit_length() >> 4)
    return (nbytes + step - 1) // step * step


def _closed(nbytes: int, pool: Pool) -> Segment:
    raise RdmaError("this memory was closed")


class Pool:
    """A part of the arena in which peers may all do the same (``access``: ``READ``, ``WRITE``, ``OWN``). Made by ``Arena``.
    Thread-safe."""

    def __init__(self, arena: Arena, access: int) -> None:
        self._arena, self.access = arena, access
        self.segments: list[Segment] = []
        self.used = 0  # bytes in live blocks, class sizes
        self.closed = False
        # All of this under the lock of the arena.
        self.bins: dict[int, list[Block]] = {}
        self.extents: list[tuple[int, int, int]] = []  # (segment index, offset, bytes), sorted, neighbours joined
        self._index: dict[int, int] = {}  # segment number -> index in self.segments

    def admits(self, own: Pool | None, *, write: bool) -> bool:
        """Whether the peer whose own pool is ``own`` may read (``write``: and write) here."""
        return self is own or self.access == WRITE or (self.access == READ and not write)

    @property
    def capacity(self) -> int:
        return sum(segment.nbytes for segment in self.segments)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor over a fresh block, which returns when the last tensor over its storage dies."""
        nbytes = (count := prod(shape)) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        return self._arena.hold(self._arena.allocate(nbytes, self), nbytes, dtype, count).view(tuple(shape))

    def run(self, nbytes: int) -> torch.Tensor:
        """As ``tensor``, of ``nbytes`` > 0 bytes."""
        return self._arena.hold(self._arena.allocate(nbytes, self), nbytes, torch.uint8, nbytes)

    def set_apart(self, nbytes: int) -> torch.Tensor:
        """As ``run``, but in a segment of its own, which the arena's limit does not count: for memory that a connection needs
        even if messages fill the arena. Raises ``ArenaFull`` where the system has no more memory."""
        return self._arena.hold(self._arena.set_apart(nbytes, self), nbytes, torch.uint8, nbytes)

    def close(self) -> None:
        """End the pool of a peer that cannot reach it any more. Its segments go back to the system when nothing here uses them.
        Idempotent; takes no lock."""
        if not self.closed:
            self.closed = True
            self._arena.ended.append(self)

    # -- for the arena, with its lock held

    def take(self, size: int) -> Block | None:
        """A block of this size from the extents; ``None`` if none is large enough."""
        best = -1
        for at, (_, _, free) in enumerate(self.extents):
            if free >= size and (best < 0 or free < self.extents[best][2]):
                best = at
        if best < 0:
            return None
        index, offset, free = self.extents[best]
        self.segments[index].reserve(offset + size)
        if free == size:
            del self.extents[best]
        else:
            self.extents[best] = (index, offset + size, free - size)
        return Block(self.segments[index], offset, size)

    def add(self, segment: Segment, taken: int = 0) -> None:
        """Enter a segment. ``taken``: the bytes at its start that are in use already."""
        self._index[segment.number] = len(self.segments)
        self.segments.append(segment)
        if free := segment.nbytes // ALIGN * ALIGN - taken:
            bisect.insort(self.extents, (len(self.segments) - 1, taken, free))

    def take_segments(self) -> list[Segment]:
        """Take out all segments. Call it only when no block of the pool is in use."""
        segments, self.segments = self.segments, []
        self.bins.clear()
        self.extents.clear()
        self._index.clear()
        return segments

    def merge_bins(self) -> None:
        for blocks in self.bins.values():
            for block in blocks:
                bisect.insort(self.extents, (self._index[block.segment.number], block.offset, block.nbytes))
        self.bins.clear()
        joined: list[tuple[int, int, int]] = []
        for index, offset, free in self.extents:
            if joined and joined[-1][0] == index and joined[-1][1] + joined[-1][2] == offset:
                joined[-1] = (index, joined[-1][1], joined[-1][2] + free)
            else:
                joined.append((index, offset, free))
        self.extents = joined


class Arena:
    """The allocator over all pools of a process. Thread-safe. ``new_segment(nbytes, pool)`` makes and registers a segment of at
    least that size, ``drop_segment`` undoes that. ``limit`` (bytes) bounds the sum of all segments except those set apart
    (``Pool.set_apart``). A segment lives as long as the arena, or until its pool was closed and nothing uses it."""

    def __init__(
        self,
        new_segment: Callable[[int, Pool], Segment],
        limit: int | None = None,
        drop_segment: Callable[[Segment], None] = Segment.close,
    ) -> None:
        self.limit = default_limit() if limit is None else limit
        self.segment_bytes = SEGMENT_BYTES
        """The size in bytes of the first segment of a pool that all peers share; devices that pin whole segments lower it.
        Each following segment doubles the pool."""
        self.readable, self.writable = Pool(self, READ), Pool(self, WRITE)
        """The pool that every peer may read, and the pool that every peer may read and write."""
        self.used = 0  # bytes of live blocks in all pools, each rounded up to its size class
        self.ended: deque[Pool] = deque()
        """Closed pools whose memory may still be in use here."""
        self._new_segment, self._drop_segment = new_segment, drop_segment
        self._lock = threading.Lock()
        self._leases: dict[int, _Lease] = {}  # by address
        # Filled by weak reference callbacks, which run anywhere, even inside ``allocate``: append only, no lock.
        self._returned: deque[Block] = deque()
        self._by_address: tuple[list[int], list[Segment]] = ([], [])  # replaced, never changed
        watch(self)

    @property
    def segments(self) -> list[Segment]:
        """The segments of all pools, ordered by address."""
        return self._by_address[1]

    @property
    def capacity(self) -> int:
        return sum(segment.nbytes for segment in self.segments)

    def pool(self) -> Pool:
        """A new pool for a single peer. It takes no memory before the first allocation."""
        return Pool(self, OWN)

    def allocate(self, nbytes: int, pool: Pool | None = None) -> Block:
        """A block of at least ``nbytes``, aligned to ``ALIGN``, of this pool or (``None``) of ``readable``. Raises
        ``ArenaFull``."""
        size = size_class(nbytes)
        pool = pool or self.readable
        if self.ended:
            self.sweep()
        with self._lock:
            self._reclaim()
            ready = pool.bins.get(size)
            block = ready.pop() if ready else pool.take(size)
            if block is None:
                pool.merge_bins()
                block = pool.take(size)
            if block is None:
                self._grow(size, pool)
                block = pool.take(size)
            assert block is not None
            pool.used += size
            self.used += size
        return block

    def set_apart(self, nbytes: int, pool: Pool) -> Block:
        """See ``Pool.set_apart``."""
        size = size_class(nbytes)
        with self._lock:
            segment = self._new_segment(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE, pool)
            segment.apart = True
            self._add(segment, pool, size)
            segment.reserve(size)
            pool.used += size
            self.used += size
        return Block(segment, 0, size)

    def free(self, block: Block) -> None:
        """Give a block back. No lock is taken: safe from finalizers and from any thread."""
        self._returned.append(block)

    def hold(self, block: Block, nbytes: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        """A tensor of ``count`` elements over the first ``nbytes`` of a block, which belongs to it from now on."""
        view = block.segment.view[block.offset : block.offset + nbytes]
        lease = _Lease(view, self._expired)
        # The storage holds ``view``, so the weak reference to it fires when the storage dies.
        if torch.is_inference_mode_enabled():  # of a thread that may ask for all others
            with torch.inference_mode(False):
                tensor = torch.frombuffer(view, dtype=dtype, count=count)
        else:
            tensor = torch.frombuffer(view, dtype=dtype, count=count)
        lease.block, lease.storage, lease.purpose = block, tensor.untyped_storage()._cdata, TENSORS
        self._leases[block.segment.address + block.offset] = lease
        return tensor

    def find(self, address: int, nbytes: int) -> tuple[Segment, int] | None:
        """The segment and offset where these local bytes lie, or ``None`` if they are not (all) in the arena."""
        starts, segments = self._by_address
        at = bisect.bisect_right(starts, address) - 1
        if at >= 0 and (offset := address - starts[at]) + nbytes <= segments[at].nbytes:
            return segments[at], offset
        return None

    def refill(self, tensor: torch.Tensor) -> None:
        """Have the pages of a tensor of the arena that may have been given back (``mapping.discard``). Raises ``ArenaFull``."""
        found = self.find(tensor.data_ptr(), tensor.nbytes)
        assert found is not None
        found[0].reserve_range(found[1], tensor.nbytes)

    def sole_block(self, tensor: torch.Tensor) -> Block | None:
        """The block that lives exactly as long as the storage of this tensor, which ``travels``, if the caller's one variable
        is all that refers to the tensor and to its storage: no view, no graph, no user. ``None`` for any other storage, also
        one that another library made over our memory."""
        if sole.references(tensor) != sole.PASSED or tensor.requires_grad or tensor._use_count() != 1:  # type: ignore[attr-defined]
            return None
        storage = tensor.untyped_storage()
        if sole.storage_uses(storage._cdata) != sole.STORAGE_USES or sole.references(storage) != sole.STORAGE:
            return None
        lease = self._leases.get(storage.data_ptr())
        return lease.block if lease is not None and lease.storage == storage._cdata else None

    def sweep(self) -> None:
        """Give the segments of closed pools back, where nothing uses them any more."""
        gone: list[Segment] = []
        with self._lock:
            self._reclaim()
            for _ in range(len(self.ended)):
                pool = self.ended.popleft()
                if pool.used:
                    self.ended.append(pool)
                else:
                    gone += pool.take_segments()
            if gone:
                self._sort([segment for segment in self.segments if segment not in gone])
        for segment in gone:
            self._drop_segment(segment)

    def note(self, tensor: torch.Tensor, purpose: str) -> torch.Tensor:
        """Have ``held`` count this tensor of the arena apart. Returns it."""
        lease = self._leases.get(tensor.data_ptr())
        if lease is not None:
            lease.purpose = purpose
        return tensor

    def held(self) -> dict[str, int]:
        """Bytes of live tensors by purpose (``note``)."""
        found: dict[str, int] = {}
        for lease in list(self._leases.values()):
            found[lease.purpose] = found.get(lease.purpose, 0) + lease.block.nbytes
        return found

    def shown(self) -> list[Shown]:
        """The live tensors in shared memory that code of the user may see. Takes no lock."""
        found = []
        for address, lease in self._leases.copy().items():  # what the collector frees meanwhile goes from the table
            if lease.purpose != RINGS and lease.block.segment.shared and (view := lease()) is not None:
                found.append(Shown(address, lease.block.nbytes, view))
        return found

    def close(self) -> None:
        """Let go of the segments: each lives for as long as a tensor over it is held. Idempotent."""
        leave(self.shown())
        with self._lock:
            self._new_segment, self._drop_segment = _closed, Segment.close
            for pool in {segment.pool for segment in self.segments}:
                pool.take_segments()
            self._by_address = [], []
            self._leases.clear()
            self._returned = deque(maxlen=0)  # what is given back from now on would keep its segment
            self.ended.clear()

    def _expired(self, lease: _Lease) -> None:
        self._leases.pop(lease.block.segment.address + lease.block.offset, None)
        self._returned.append(lease.block)

    def _reclaim(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            pool, size = block.segment.pool, block.nbytes
            pool.bins.setdefault(size, []).append(block)
            pool.used -= size
            self.used -= size

    def _sort(self, segments: list[Segment]) -> None:
        segments.sort(key=lambda segment: segment.address)
        self._by_address = [segment.address for segment in segments], segments

    def _grow(self, size: int, pool: Pool) -> None:
        apart = sum(segment.nbytes for segment in self.segments if segment.apart)
        capacity, first = self.capacity - apart, POOL_BYTES if pool.access == OWN else min(self.segment_bytes, self.limit // 8)
        wanted = max(first, min(pool.capacity, _MAX_GROWTH), -(-size // _HUGE_PAGE) * _HUGE_PAGE)
        room = (self.limit - capacity) // mmap.PAGESIZE * mmap.PAGESIZE
        if room < size:
            raise ArenaFull(
                f"the arena is full: {size} bytes asked for, {self.used - apart} of {capacity} bytes in use, "
                f"limit {self.limit}",
                hint="raise arena_limit (open_device, RpcBackendOptions) or RDMARPC_ARENA_LIMIT, or drop tensors",
            )
        if wanted > room // 2:  # something is left for other pools
            wanted = max(room // 2, size)
        self._add(self._new_segment(min(-(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE, room), pool), pool)

    def _add(self, segment: Segment, pool: Pool, taken: int = 0) -> None:
        pool.add(segment, taken)
        self._sort([*self.segments, segment])
        if pool.closed and pool not in self.ended:
            self.ended.append(pool)
