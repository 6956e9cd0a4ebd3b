"""The memory of a process that peers may touch, whatever devices they reach it by: one arena, one table of regions.

Any number of devices stand on one memory; descriptors name the memory, not a device, so what was exported once is good for
peers of each of them. Locks: a device may take ours while it holds its own, never the other way round.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import ArenaFull, RdmaError
from ..peers.auth import Identity, uid_of
from ..peers.guard import hint_for
from ..region import Region, local_bytes
from ..words.signals import BELL_BYTES, BELLS
from .arena import READ, Arena, Pool, Segment
from .mapping import address_of, anonymous, memfd


class Registered(NamedTuple):
    """Memory of this process that peers may touch. ``pool`` gives their rights; ``None``: it is foreign memory, which all peers
    may read and write."""

    address: int
    nbytes: int
    key: int
    pool: Pool | None


NOWHERE = Registered(0, 0, 0, None)


class Listener:
    """The calls by which a memory tells a device on it of changes. A device overrides those that it has to act on."""

    closed: bool

    def announce(self, number: int, key: int, address: int, nbytes: int) -> None:
        """Tell every connected peer of a foreign region (0 bytes: it is gone; returns when no copy on it is under way).
        Raises ``RegistrationError`` where it cannot be."""

    def announce_segment(self, segment: Segment) -> None:
        """Tell the connected peers that ``segment.pool`` admits of a segment, from the thread that allocates. Raises
        ``RegistrationError`` where it cannot be: then there is no such segment. May name one that ``Memory.attach`` or
        ``registered`` has named already."""

    def forget_segment(self, segment: Segment) -> None:
        """A segment is about to be unmapped. The channel of the one peer that could reach it has ended."""


class Memory:
    """The arena and what else is registered. Thread-safe. ``close`` it after the devices on it.

    ``limit``: bytes of the arena (default: see ``arena.default_limit``). ``shared``: segments and bells are memfds, which peers
    of this host can map (the ``shm`` device needs that); else private memory.
    """

    def __init__(self, limit: int | None = None, *, shared: bool) -> None:
        self.shared = shared
        self.identity = Identity()
        """The key pair by which peers know this process, over all of its devices."""
        self.uid = uid_of(self.identity.public)
        """The 64 bits, with the 32 bits of ``epoch``, by which descriptors name this life of our memory."""
        self.epoch = secrets.randbits(32)
        self.arena = Arena(self._new_segment, limit, self._drop_segment)
        self.regions: dict[int, Registered] = {}
        """The registered memory, by number. Devices look things up here, and never change it."""
        self.gpu: Any = None
        """The ``GpuArena``, if a device on this memory reaches GPUs. It is not in ``regions``."""
        self.lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        self._pinned: dict[int, torch.Tensor] = {}  # foreign memory stays alive for as long as peers may touch it
        self._numbers = iter(range(1, 1 << 32))
        self._devices: list[Listener] = []
        self._bells_memory, self.bells_fd = self._allocate("rdmarpc-bells", BELLS * BELL_BYTES)
        self.bells = address_of(self._bells_memory)
        """Address of ``BELLS`` bells; ``bells_fd`` is their file where they are shared."""
        self._bells_free = list(range(BELLS - 1, 0, -1))
        self._counters = {"registrations": 0, "bytes_staged": 0}
        self._pid = os.getpid()

    def _allocate(self, name: str, nbytes: int, *, read_only: bool = False) -> tuple[mmap.mmap, int]:
        return memfd(name, nbytes, read_only=read_only) if self.shared else (anonymous(nbytes), -1)

    # -- the devices on it

    def attach(self, device: Listener) -> list[Segment]:
        """Tell ``device`` of each new segment and foreign region from now on. Returns the segments that there are; one that is
        just being made may be returned and announced too. A device calls this before it lets peers in."""
        with self.lock:
            self._devices.append(device)
            return list(self._segments.values())

    def detach(self, device: Listener) -> None:
        """Tell ``device`` nothing any more. Idempotent."""
        with self.lock:
            if device in self._devices:
                self._devices.remove(device)

    def registered(self, own: Pool | None) -> tuple[dict[int, Segment], dict[int, Registered]]:
        """The segments that a peer may reach whose own pool is ``own``, and all foreign regions, by their numbers: what a new
        peer has to be told, by a device that was attached before."""
        with self.lock:
            foreign = {number: entry for number, entry in self.regions.items() if entry.pool is None}
            segments = {n: segment for n, segment in self._segments.items() if segment.pool.admits(own, write=False)}
        return segments, foreign

    # -- what peers may touch

    def take_number(self) -> tuple[int, int]:
        """A region's number, never given again, and a key for it."""
        with self.lock:
            return next(self._numbers), secrets.randbits(64)

    def register(self, tensor: torch.Tensor) -> Region:
        """See ``Device.register``."""
        address, nbytes = local_bytes(tensor)
        found = self.arena.find(address, nbytes)
        if found is not None:
            segment, offset = found
            return Region(self, tensor, segment.number, segment.key, offset, foreign=False)
        if nbytes == 0:
            return Region(self, tensor, 0, 0, 0, foreign=False)
        with self.lock:
            number, key = next(self._numbers), secrets.randbits(64)
            self.regions[number] = Registered(address, nbytes, key, None)
            self._pinned[number] = tensor
        region = Region(self, tensor, number, key, 0, foreign=True)
        try:
            for device in self._newest_first():
                device.announce(number, key, address, nbytes)
        except BaseException:
            region.close()
            raise
        self.count("registrations")
        return region

    def deregister(self, region: Region) -> None:
        """Returns when no peer's copy on it is under way; raises what a device raised (``TransferTimeout``)."""
        if os.getpid() != self._pid:
            return
        number = region.remote.region
        with self.lock:
            known = self.regions.pop(number, None)
        try:
            withdraw(self._newest_first() if known is not None else (), [number])
        finally:
            self._pinned.pop(number, None)

    def _new_segment(self, nbytes: int, pool: Pool) -> Segment:
        try:
            memory, fd = self._allocate("rdmarpc-arena", nbytes, read_only=pool.access == READ)
        except OSError as error:
            why = f"the system gives no {nbytes} bytes more for the arena: {error.strerror}"
            raise ArenaFull(why, status=errno.errorcode.get(error.errno or 0, ""), hint=hint_for(error)) from error
        with self.lock:
            segment = Segment(next(self._numbers), secrets.randbits(64), memory, pool, fd)
            self._segments[segment.number] = segment
            self.regions[segment.number] = Registered(segment.address, segment.nbytes, segment.key, pool)
        try:
            for device in self._newest_first():
                device.announce_segment(segment)
        except BaseException:
            with self.lock:
                del self._segments[segment.number], self.regions[segment.number]
            segment.close()
            raise
        self.count("registrations")
        return segment

    def _drop_segment(self, segment: Segment) -> None:
        """Give a segment back that nothing uses any more, here or at a peer."""
        with self.lock:
            self._segments.pop(segment.number, None)
            self.regions.pop(segment.number, None)
            devices = list(self._devices)
        for device in devices:
            device.forget_segment(segment)
        if self.gpu is not None:
            self.gpu.pins.let_go(segment.address)
        segment.close()

    def _newest_first(self) -> list[Listener]:
        """A device that may refuse, because it pins memory, comes after ``shm`` and is asked before it: so nobody has to be
        told that what was announced is not there."""
        with self.lock:
            return [device for device in reversed(self._devices) if not device.closed]

    # -- bells and counters

    def take_bell(self) -> int:
        """A bell of our own, until ``return_bell``. ``RdmaError`` when there are none left."""
        with self.lock:
            if not self._bells_free:
                raise RdmaError(f"all {BELLS - 1} bells of this device are in use")
            return self._bells_free.pop()

    def return_bell(self, bell: int) -> None:
        with self.lock:
            self._bells_free.append(bell)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter; it exists from then on."""
        with self.lock:
            self._counters[name] = self._counters.get(name, 0) + amount

    def counters(self) -> dict[str, int]:
        """See ``Device.counters``."""
        with self.lock:
            totals = dict(self._counters)
        totals["segments"] = len(self.arena.segments)
        totals["arena_bytes"] = self.arena.capacity
        totals["arena_used"] = self.arena.used
        return totals

    def explain(self) -> list[str]:
        """Lines for people: what pages there are, and how much is used."""
        setting = "shmem_enabled" if self.shared else "enabled"
        mode = "unknown"
        with contextlib.suppress(OSError, IndexError), open(f"/sys/kernel/mm/transparent_hugepage/{setting}") as file:
            mode = file.read().split("[")[1].split("]")[0]
        huge = mode in (("advise", "always", "within_size", "force") if self.shared else ("always",))
        pages = "2 MiB where possible" if huge else "4 KiB only"
        return [
            f"  pages          {pages} (transparent_hugepage/{setting} is {mode})",
            f"  arena          {self.arena.used} of {self.arena.capacity} bytes used, limit {self.arena.limit / 2**30:.1f} GiB",
        ]

    def close(self) -> None:
        """Close the files, and let go of what is mapped. Idempotent. Tensors of the arena are valid for as long as they are
        held."""
        with self.lock:
            segments = list(self._segments.values())
            fd, self.bells_fd = self.bells_fd, -1
            self._segments.clear()
            self.regions.clear()
            self._pinned.clear()
        if fd >= 0:
            os.close(fd)
        for segment in segments:
            segment.close()
        self.arena.close()


def withdraw(devices: Iterable[Listener], numbers: Sequence[int]) -> None:
    """Tell all devices that these regions are gone. Raises the first error, when all were told."""
    failed: RdmaError | None = None
    for device in devices:
        for number in numbers:
            try:
                device.announce(number, 0, 0, 0)
            except RdmaError as error:
                failed = failed or error
    if failed is not None:
        raise failed
