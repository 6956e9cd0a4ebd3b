"""A way to reach memory: the arena, the registered regions, the connections."""

from __future__ import annotations

import abc
import contextlib
import hashlib
import logging
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch

from .arena import Pool, Segment
from .auth import check_secret
from .channel import Channel
from .ended import nobody
from .errors import AuthenticationError, RdmaError, RegistrationError, TransferTimeout
from .heartbeat import MIN_TIMEOUT_S, Looks
from .identity import uid_of
from .memory import Memory
from .notify import Poller
from .region import Region, RemoteRegion, local_bytes
from .user_secret import user_secret

OnConnect = Callable[[Channel], bytes]
_CLOSE_TIMEOUT_S = 1.0
_FORKED, _FORK_HINT = "a device cannot be used in a forked child", "fork first, or use spawn"
_REASONS = 100


class Device(abc.ABC):
    """Owns its channels; ``close`` ends them in the right order and is idempotent. Stands on a ``Memory``: one that it was
    given, or one of its own, which ends with it.

    Thread-safe. Not usable in a forked child (``RdmaError``): fork before opening, or spawn.
    """

    name: str
    port = 0
    """Address of what whoever waits on this device has to poll (``verbs_kernels``); 0: nothing."""

    def __init__(
        self,
        name: str,
        *,
        secret: bytes,
        arena_limit: int | None,
        on_connect: OnConnect | None,
        peer_timeout: float,
        memory: Memory | None,
        shared: bool = False,
    ) -> None:
        """``arena_limit`` and ``shared`` are those of a memory of our own, where no ``memory`` is given. The device attaches
        itself to it (``Memory.attach``) before it lets peers in."""
        if peer_timeout and peer_timeout < MIN_TIMEOUT_S:
            raise ValueError(f"peer_timeout must be at least {MIN_TIMEOUT_S} s, or 0 for none, got {peer_timeout}")
        self.name = name
        self._looks = Looks(peer_timeout)
        if secret:
            check_secret(secret)
        self.given = bool(secret)
        """Whether peers elsewhere can have our secret. Else it is that of this user on this host."""
        self.secret = secret or user_secret()[0]
        self._own_memory = memory is None
        self.memory = memory or Memory(arena_limit, shared=shared)
        # The memory's, at hand for what is hot.
        self.uid, self.epoch, self.arena = self.memory.uid, self.memory.epoch, self.memory.arena
        self.bells, self.regions = self.memory.bells, self.memory.regions
        self.on_lost: Callable[[Channel], None] = nobody
        """Called once for every channel that broke, from a thread of the device. Must not block."""
        self._on_connect: OnConnect = on_connect or _no_hello
        self._keep_accepted = on_connect is None
        self._whole: Device | None = None
        """The device that this one is a part of."""
        self._accepted: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self._channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._refusals: set[str] = set()
        self._past = (0, 0)  # posts and bytes of channels that ended
        self.pid = os.getpid()
        """The process that opened it: in another one it is of no use."""
        self.closed, self._close_by = False, 0.0
        _devices.add(self)

    # -- memory

    def empty(self, shape: int | Sequence[int], *, dtype: torch.dtype | None = None, writable: bool = False) -> torch.Tensor:
        """An uninitialised tensor in the arena: born registered. Every peer may read it; ``writable``: and write it. What one
        peer alone may write: ``Channel.empty``. Raises ``ArenaFull``."""
        self.check()
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        pool = self.arena.writable if writable else self.arena.readable
        return pool.tensor(sizes, dtype or torch.get_default_dtype())

    def pool(self) -> Pool:
        """The memory that the peer of one channel may read and write, and no other: for a channel that is still to be made,
        ``connect`` it with this. ``Channel.pool`` of one that there is."""
        self.check()
        return self.memory.pool()

    def register(self, tensor: torch.Tensor) -> Region:
        """Describe this tensor's memory to peers. Free for arena tensors, and gives no rights that peers do not have there;
        other memory is announced to every peer (counted as a registration), who may read and write it until
        ``Region.close``. The tensor must be contiguous."""
        self.check()
        return self.memory.register(tensor)

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

    def lend(self, tensor: torch.Tensor, channel: Channel) -> RemoteRegion:
        """A descriptor by which this peer may READ this tensor while the caller keeps it alive and unchanged. Costs nothing and
        needs no taking back; only where ``can_lend``."""
        return self.register(tensor).remote

    def can_lend(self, tensor: torch.Tensor, channel: Channel) -> bool:
        """Whether ``lend`` works for this tensor towards this peer: always for tensors of ``empty``, and for arena tensors of
        which it is the one peer that may touch them."""
        address, nbytes = local_bytes(tensor)
        found = self.arena.find(address, nbytes)
        return not nbytes or (found is not None and found[0].pool.admits(channel.own_pool, write=False))

    # -- peers

    @property
    @abc.abstractmethod
    def address(self) -> bytes:
        """What a peer needs to ``connect`` to us. Printable, no code, no secret."""

    @abc.abstractmethod
    def connect(self, peer: bytes, *, hello: bytes = b"", timeout: float = 5.0, pool: Pool | None = None) -> Channel:
        """Connect to the device behind ``peer`` and authenticate both ends. ``hello`` (at most 64 KiB) reaches the peer's
        ``on_connect`` as ``channel.peer_hello``; it may describe memory of ``pool``, which becomes ``Channel.pool`` (if this
        raises, it is still the caller's). Raises ``PeerLost``, ``TransferTimeout``, ``AuthenticationError``; and
        ``NotSupported`` where this device cannot reach that peer, whose ``on_connect`` has not been called then."""

    def why_not(self, peer: bytes) -> str:
        """Why ``connect`` to that address is ``NotSupported``, as far as can be told without asking the peer; empty: it may
        work."""
        return "" if peer.startswith(self.name.encode() + b":") else f"that is no address of {self.name}"

    def accept(self, *, timeout: float | None = None) -> Channel:
        """The next channel that a peer opened; for devices without ``on_connect``."""
        try:
            return self._accepted.get(timeout=timeout)
        except queue.Empty:
            raise TransferTimeout(f"no peer connected within {timeout} s", device=self.name) from None

    def poller(self) -> Poller:
        """A new poller for notifications of this device's channels."""
        return Poller(self.memory, self.port)

    @abc.abstractmethod
    def explain(self) -> str:
        """What was chosen, what this host allows, and what it does not, for people."""

    def counters(self) -> dict[str, int]:
        """Totals since ``open_device``: ``posts``, ``bytes_direct``, ``channels``; and of the memory, so of all devices on it:
        ``bytes_staged``, ``registrations`` (segments and foreign regions), ``segments``, ``arena_bytes``, ``arena_used``, and
        what was counted with ``count``."""
        totals = self.memory.counters()
        with self._lock:
            totals["posts"], totals["bytes_direct"] = self._past
            for channel in self._channels:
                posts, nbytes = channel.totals()
                totals["posts"] += posts
                totals["bytes_direct"] += nbytes
            totals["channels"] = sum(channel.error is None for channel in self._channels)
        return totals

    def count_staged(self, nbytes: int) -> None:
        """Count payload bytes that somebody above had to copy besides the transfer itself."""
        self.memory.count("bytes_staged", nbytes)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter of somebody above; it exists from then on."""
        self.memory.count(name, amount)

    def close(self) -> None:
        """Close the channels, then stop listening. Tensors of the arena stay valid for as long as they are held."""
        with self._lock:
            if self.closed or os.getpid() != self.pid:
                return
            self.closed = True
            channels = list(self._channels)
        for channel in channels:
            channel.close()
        self._shut()
        self.memory.detach(self)
        if self._own_memory:
            self.memory.close()
        # Nobody calls these any more. Whoever they belong to refers to us.
        self._on_connect, self.on_lost, self._whole = _no_hello, nobody, None

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- for the devices themselves

    def close_deadline(self) -> float:
        """Until when (``time.monotonic``) a channel that is being closed may wait for what was posted on it; all channels of a
        device that is being closed have that time together."""
        if not self.closed:
            return time.monotonic() + _CLOSE_TIMEOUT_S
        self._close_by = self._close_by or time.monotonic() + _CLOSE_TIMEOUT_S
        return self._close_by

    @abc.abstractmethod
    def _shut(self) -> None: ...

    def announce(self, number: int, key: int, address: int, nbytes: int) -> None:  # noqa: B027
        """Tell every connected peer of a foreign region (0 bytes: it is gone; returns when no copy on it is under way).
        Raises ``RegistrationError`` where it cannot be."""

    def pin(self) -> None:  # noqa: B027
        """Register the first memory that all peers may read now, where that takes long, rather than with the first tensor.
        Raises ``RegistrationError`` where nothing can be registered."""

    def forget_segment(self, segment: Segment) -> None:  # noqa: B027
        """A segment is about to be unmapped. The channel of the one peer that could reach it has ended."""

    def announce_segment(self, segment: Segment) -> None:  # noqa: B027
        """Tell the connected peers that ``segment.pool`` admits of a segment, from the thread that allocates. Raises
        ``RegistrationError`` where it cannot be: then there is no such segment. May name one that ``Memory.attach`` or
        ``registered`` has named already."""

    def _know(self, channel: Channel, uid: int, key: bytes) -> None:
        """The other end of a new channel has proved to hold this key. ``AuthenticationError`` if it gives another's uid."""
        if uid != uid_of(key):
            raise AuthenticationError("the peer shows the uid of another one", device=self.name, status="PROTOCOL")
        channel.peer_key = key

    def _refused(self, sock: socket.socket, error: BaseException) -> None:
        """A peer that came was not let in: say so, once for each reason."""
        if not isinstance(error, AuthenticationError) or error.message in self._refusals or len(self._refusals) > _REASONS:
            return
        self._refusals.add(error.message)
        where = "a peer that has hung up"
        with contextlib.suppress(OSError):
            where = "{}:{}".format(*sock.getpeername())
        text = f"{error.message} ({error.hint})" if error.hint else error.message
        logging.getLogger("rdmarpc").warning("%s refused a connection from %s: %s", self.name, where, text)

    def _welcomed(self, channel: Channel) -> None:
        """The handshake of a channel that a peer opened is complete."""
        with self._lock:
            whole = self._whole
            if whole is None:
                self._arrived(channel)
                return
        whole._arrived(channel)

    def _arrived(self, channel: Channel) -> None:
        if self._keep_accepted:
            self._accepted.put(channel)

    def _join(self, whole: Device) -> None:
        """Be a part of another device: from now on it tells of our channels, also of those that came meanwhile."""
        with self._lock:
            self._whole = whole
            while not self._accepted.empty():
                whole._arrived(self._accepted.get())

    def _give_back(self) -> None:
        """In the constructor of a device that does not open: let go of what ours has set up."""
        self.closed = True
        self.memory.detach(self)
        if self._own_memory:
            self.memory.close()

    def _tell_lost(self, channel: Channel) -> None:
        try:
            (self._whole or self)._gone(channel)
        except BaseException:
            # The thread that calls serves all channels: it must survive.
            logging.getLogger("rdmarpc").exception("on_lost failed for %r", channel)

    def _gone(self, channel: Channel) -> None:
        self.on_lost(channel)

    def _retire(self, channel: Channel) -> None:
        """An ended channel lives on in the totals only."""
        if channel.own_pool is not None:
            channel.own_pool.close()
        channel.forget_notifiers()
        with self._lock:
            if channel in self._channels:
                self._channels.discard(channel)
                posts, nbytes = channel.totals()
                self._past = (self._past[0] + posts, self._past[1] + nbytes)

    @abc.abstractmethod
    def _forked(self) -> None:
        """In a forked child: close our copies of the sockets, or the peers would not notice the parent's death. Other
        threads' locks may be held for ever here: take none."""

    def check(self) -> None:
        """Raises ``RdmaError`` if this device is closed, or another process's."""
        if self.closed:
            raise RdmaError("the device is closed", device=self.name)
        if os.getpid() != self.pid:
            raise RdmaError(_FORKED, device=self.name, hint=_FORK_HINT)


def _no_hello(channel: Channel) -> bytes:
    return b""


_devices: weakref.WeakSet[Device] = weakref.WeakSet()


def _after_fork() -> None:
    for device in list(_devices):
        error = RdmaError(_FORKED, device=device.name, hint=_FORK_HINT)
        for channel in list(device._channels):
            channel.forked(error)
        device._forked()


os.register_at_fork(after_in_child=_after_fork)


def host_id() -> str:
    """The same text for two processes exactly if they share a kernel and a network namespace (so also Unix sockets)."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    namespace = os.stat("/proc/self/ns/net").st_ino
    return hashlib.sha256(f"{boot}/{namespace}".encode()).hexdigest()[:16]


__all__ = ["Device", "OnConnect", "host_id"]
