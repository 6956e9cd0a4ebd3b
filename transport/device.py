"""A way to reach memory: the arena, the registered regions, the connections."""

from __future__ import annotations

import abc
import hashlib
import logging
import mmap
import os
import queue
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from .arena import Arena, Block, Segment
from .channel import Channel
from .errors import RdmaError, RegistrationError, TransferTimeout
from .heartbeat import MIN_TIMEOUT_S, Looks
from .notify import BELL_BYTES, BELLS, Poller
from .region import Region, RemoteRegion, local_bytes

OnConnect = Callable[[Channel], bytes]


class Device(abc.ABC):
    """Owns its arena, its regions and its channels; ``close`` ends them in the right order and is idempotent.

    Thread-safe. Not usable in a forked child (``RdmaError``): fork before opening, or spawn.
    """

    name: str
    uid: int
    """64 random bits: this device's life."""
    bells: int
    """Address of ``BELLS`` bells in memory that this device's signallers can reach."""
    port = 0
    """Address of what whoever waits on this device has to poll (``verbs_kernels``); 0: nothing."""

    def __init__(
        self, name: str, *, secret: bytes, arena_limit: int | None, on_connect: OnConnect | None, peer_timeout: float
    ) -> None:
        if peer_timeout and peer_timeout < MIN_TIMEOUT_S:
            raise ValueError(f"peer_timeout must be at least {MIN_TIMEOUT_S} s, or 0 for none, got {peer_timeout}")
        self.name = name
        self._looks = Looks(peer_timeout)
        self.uid = secrets.randbits(64)
        self.epoch = secrets.randbits(32)
        self.secret = secret
        self.arena = Arena(self._new_segment, arena_limit)
        self.on_lost: Callable[[Channel], None] = lambda channel: None
        """Called once for every channel that broke, from a thread of the device. Must not block."""
        self._on_connect: OnConnect = on_connect or (lambda channel: b"")
        self._keep_accepted = on_connect is None
        self._accepted: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self._channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._regions: dict[int, tuple[int, int, int]] = {}  # number -> (address, bytes, key): what peers may touch
        self._pinned: dict[int, torch.Tensor] = {}  # foreign memory stays alive for as long as peers may touch it
        self._numbers = iter(range(1, 1 << 32))
        self._bells_free = list(range(BELLS - 1, 0, -1))
        self._lock = threading.RLock()
        self._counters = {"registrations": 0, "bytes_staged": 0, "posts": 0, "bytes_direct": 0}
        self._pid = os.getpid()
        self.closed = False
        _devices.add(self)

    # -- memory

    def empty(self, shape: int | Sequence[int], *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An uninitialised tensor in the arena: born registered. Raises ``ArenaFull``."""
        self._check()
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        return self.arena.tensor(sizes, dtype or torch.get_default_dtype())

    def register(self, tensor: torch.Tensor) -> Region:
        """Let peers touch this tensor's memory. Free for arena tensors; other memory is announced to every peer (counted
        as a registration) and stays accessible until ``Region.close``. The tensor must be contiguous."""
        self._check()
        address, nbytes = local_bytes(tensor)
        found = self.arena.find(address, nbytes)
        if found is not None:
            segment, offset = found
            return Region(self, tensor, segment.number, segment.key, offset, foreign=False)
        if nbytes == 0:
            return Region(self, tensor, 0, 0, 0, foreign=False)
        with self._lock:
            number, key = next(self._numbers), secrets.randbits(64)
            self._regions[number] = (address, nbytes, key)
            self._pinned[number] = tensor
            self._counters["registrations"] += 1
        self._announce(number, key, address, nbytes)
        return Region(self, tensor, number, key, 0, foreign=True)

    def export(self, tensor: torch.Tensor) -> bytes:
        """The descriptor of an arena tensor. For other memory hold on to a ``Region`` instead."""
        address, nbytes = local_bytes(tensor)
        if nbytes and self.arena.find(address, nbytes) is None:
            raise RegistrationError(
                "this tensor is not in the arena",
                device=self.name,
                hint="make it with device.empty(), or keep device.register(tensor)",
            )
        return self.register(tensor).export()

    def landing(self, nbytes: int) -> tuple[Block, bytes]:
        """Fresh arena memory (``nbytes`` > 0) and its descriptor. Whoever has the block frees it (``arena.free``) or makes a
        tensor of it (``arena.hold``)."""
        self._check()
        block = self.arena.allocate(nbytes)
        segment = block.segment
        return block, RemoteRegion(self.uid, self.epoch, segment.number, segment.key, block.offset, nbytes).dump()

    def lend(self, tensor: torch.Tensor) -> RemoteRegion:
        """A descriptor by which peers may READ this tensor while the caller keeps it alive and unchanged. Costs nothing and
        needs no taking back; only where ``can_lend``."""
        return self.register(tensor).remote

    def can_lend(self, tensor: torch.Tensor, channel: Channel) -> bool:
        """Whether ``lend`` works for this tensor towards this peer. Arena tensors always can be lent."""
        return self.arena.find(*local_bytes(tensor)) is not None

    # -- peers

    @property
    @abc.abstractmethod
    def address(self) -> bytes:
        """What a peer needs to ``connect`` to us. Printable, no code, no secret."""

    @abc.abstractmethod
    def connect(self, peer: bytes, *, hello: bytes = b"", timeout: float = 5.0) -> Channel:
        """Connect to the device behind ``peer`` and authenticate both ends. ``hello`` (at most 64 KiB) reaches the peer's
        ``on_connect`` as ``channel.peer_hello``. Raises ``PeerLost``, ``TransferTimeout``, ``AuthenticationError``,
        ``NotSupported``."""

    def accept(self, *, timeout: float | None = None) -> Channel:
        """The next channel that a peer opened; for devices without ``on_connect``."""
        try:
            return self._accepted.get(timeout=timeout)
        except queue.Empty:
            raise TransferTimeout(f"no peer connected within {timeout} s", device=self.name) from None

    def poller(self) -> Poller:
        """A new poller for notifications of this device's channels."""
        return Poller(self)

    @abc.abstractmethod
    def explain(self) -> str:
        """What was chosen, what this host allows, and what it does not, for people."""

    def counters(self) -> dict[str, int]:
        """Totals since ``open_device``: ``posts``, ``bytes_direct``, ``bytes_staged``, ``registrations`` (segments and foreign
        regions), ``segments``, ``arena_bytes``, ``arena_used``, ``channels``; and what was counted with ``count``."""
        with self._lock:
            totals = dict(self._counters)
            for channel in self._channels:
                posts, nbytes = channel._stats()
                totals["posts"] += posts
                totals["bytes_direct"] += nbytes
            totals["channels"] = sum(channel.error is None for channel in self._channels)
        totals["segments"] = len(self.arena.segments)
        totals["arena_bytes"] = self.arena.capacity
        totals["arena_used"] = self.arena.used
        return totals

    def count_staged(self, nbytes: int) -> None:
        """Count payload bytes that somebody above had to copy besides the transfer itself."""
        with self._lock:
            self._counters["bytes_staged"] += nbytes

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter of somebody above; it exists from then on."""
        with self._lock:
            self._counters[name] = self._counters.get(name, 0) + amount

    def close(self) -> None:
        """Close the channels, then stop listening. Tensors of the arena stay valid for as long as they are held."""
        with self._lock:
            if self.closed or os.getpid() != self._pid:
                return
            self.closed = True
            channels = list(self._channels)
        for channel in channels:
            channel.close()
        self._shut()

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- for the devices themselves

    @abc.abstractmethod
    def _shut(self) -> None: ...

    @abc.abstractmethod
    def _allocate_segment(self, nbytes: int) -> tuple[mmap.mmap, int]:
        """Memory for a segment and its file descriptor (-1: private)."""

    @abc.abstractmethod
    def _announce(self, number: int, key: int, address: int, nbytes: int) -> None:
        """Tell every connected peer of a region (0 bytes: it is gone; returns when no copy on it is under way)."""

    def _new_segment(self, nbytes: int) -> Segment:
        memory, fd = self._allocate_segment(nbytes)
        with self._lock:
            segment = Segment(next(self._numbers), secrets.randbits(64), memory, fd)
            self._regions[segment.number] = (segment.address, segment.nbytes, segment.key)
            self._counters["registrations"] += 1
        self._announce_segment(segment)
        return segment

    @abc.abstractmethod
    def _announce_segment(self, segment: Segment) -> None: ...

    def _deregister(self, region: Region) -> None:
        if os.getpid() != self._pid:
            return
        number = region.remote.region
        with self._lock:
            known = self._regions.pop(number, None)
        try:
            if known is not None and not self.closed:
                self._announce(number, 0, 0, 0)
        finally:
            self._pinned.pop(number, None)

    def _welcomed(self, channel: Channel) -> None:
        """The handshake of a channel that a peer opened is complete."""
        if self._keep_accepted:
            self._accepted.put(channel)

    def _tell_lost(self, channel: Channel) -> None:
        try:
            self.on_lost(channel)
        except Exception:
            # The thread that calls serves all channels: it must survive.
            logging.getLogger("rdmarpc").exception("on_lost failed for %r", channel)

    def _retire(self, channel: Channel) -> None:
        """An ended channel lives on in the totals only."""
        with self._lock:
            if channel in self._channels:
                self._channels.discard(channel)
                posts, nbytes = channel._stats()
                self._counters["posts"] += posts
                self._counters["bytes_direct"] += nbytes

    @abc.abstractmethod
    def _forked(self) -> None:
        """In a forked child: close our copies of the sockets, or the peers would not notice the parent's death. Other
        threads' locks may be held for ever here: take none."""

    def _take_bell(self) -> int:
        with self._lock:
            if not self._bells_free:
                raise RdmaError(f"all {BELLS - 1} bells of this device are in use", device=self.name)
            return self._bells_free.pop()

    def _return_bell(self, bell: int) -> None:
        with self._lock:
            self._bells_free.append(bell)

    def _check(self) -> None:
        if self.closed:
            raise RdmaError("the device is closed", device=self.name)
        if os.getpid() != self._pid:
            raise RdmaError("a device cannot be used in a forked child", device=self.name, hint="fork first, or use spawn")


_devices: weakref.WeakSet[Device] = weakref.WeakSet()


def _after_fork() -> None:
    for device in list(_devices):
        device._forked()


os.register_at_fork(after_in_child=_after_fork)


def host_id() -> str:
    """The same text for two processes exactly if they share a kernel and a network namespace (so also Unix sockets)."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    namespace = os.stat("/proc/self/ns/net").st_ino
    return hashlib.sha256(f"{boot}/{namespace}".encode()).hexdigest()[:16]


def anonymous(nbytes: int) -> mmap.mmap:
    """Private memory of this process."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


__all__ = ["BELLS", "BELL_BYTES", "Device", "OnConnect", "anonymous", "host_id"]
