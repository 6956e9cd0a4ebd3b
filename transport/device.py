"""A device: one way to reach the memory of other processes. It owns an arena, registered regions and the channels to peers."""

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
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from . import interrupts
from .channel import Channel
from .errors import AuthenticationError, NotSupported, RdmaError, RegistrationError, TransferTimeout
from .memory.arena import Pool
from .memory.memory import Listener, Memory
from .notify import Poller
from .peers.address import kernel_and_network
from .peers.auth import check_secret, uid_of, user_secret
from .peers.guard import nobody
from .peers.heartbeat import MIN_TIMEOUT_S, Looks
from .region import Array, Region, RemoteRegion, as_tensor, local_bytes
from .timeouts import limit, seconds
from .tls.options import TlsOptions
from .tls.options import check as check_tls
from .words import machine

OnConnect = Callable[[Channel], bytes]
Tell = Callable[[Channel], None]
_CLOSE_TIMEOUT_S = 1.0
_FORKED, _FORK_HINT = "a device cannot be used in a forked child", "fork first, or use spawn"
_REASONS = 100


def check_require(require: str) -> None:
    """Raise ``ValueError`` unless ``require`` is ``"rdma"`` or empty."""
    if require not in ("", "rdma"):
        raise ValueError(f"require is 'rdma' or empty, got {require!r}")


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Options that every kind of device takes.

    * ``secret``: at least 16 random bytes that both ends must share. Without it only processes of this user on this host are
      let in (``peers/auth``).
    * ``arena_limit``: bytes that tensors of the arena may take together; ``None``: a part of this host's memory.
    * ``on_connect``: called with every channel that a peer opens, before the peer can use it. It returns the hello to answer
      with. Without it use ``Device.accept``.
    * ``peer_timeout``: seconds after which a peer that shows no sign of life, or that the network cut off, is lost. 0: never.
    * ``memory``: a ``Memory`` to share with other devices. ``arena_limit`` is not given then.
    * ``require``: ``"rdma"`` forbids to reach a peer over tcp.
    * ``tls``: what leaves this host is encrypted, or refused.
    """

    secret: bytes = b""
    arena_limit: int | None = None
    on_connect: OnConnect | None = None
    peer_timeout: float = 10.0
    memory: Memory | None = None
    require: str = ""
    tls: bool | TlsOptions = False

    def __post_init__(self) -> None:
        check_require(self.require)
        check_tls(self.tls)
        if seconds(self.peer_timeout, "peer_timeout") and self.peer_timeout < MIN_TIMEOUT_S:
            raise ValueError(f"peer_timeout must be at least {MIN_TIMEOUT_S} s, or 0 for none, got {self.peer_timeout}")
        if self.secret:
            check_secret(self.secret)


class Door:
    """The peers that a device lets in, and the callbacks that hear of a peer that came or was lost. Thread-safe."""

    def __init__(self, device: str, on_connect: OnConnect | None) -> None:
        """``device``: its name, for errors."""
        self._device = device
        self.greet: OnConnect = on_connect or _no_hello
        """The answer to the hello of a peer whose channel is being made."""
        self.keep = on_connect is None
        """Whether channels that come are kept for ``accept``."""
        self._accepted: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self._whole: tuple[Tell, Tell] | None = None  # further callbacks for channels that came, and that were lost
        self._refusals: set[str] = set()
        self._lock = threading.RLock()

    def know(self, channel: Channel, uid: int, key: bytes) -> None:
        """The other end of a new channel has proved to hold this key. ``AuthenticationError`` if it gives another's uid."""
        if uid != uid_of(key):
            raise AuthenticationError("the peer shows the uid of another one", device=self._device, status="PROTOCOL")
        channel.peer_key = key

    def refused(self, sock: socket.socket, error: BaseException) -> None:
        """A peer that came was not let in: say so, once for each reason."""
        if not isinstance(error, AuthenticationError) or sock.family == socket.AF_UNIX:
            return
        if error.message in self._refusals or len(self._refusals) > _REASONS:
            return
        self._refusals.add(error.message)
        where = "a peer that has hung up"
        with contextlib.suppress(OSError):
            where = "{}:{}".format(*sock.getpeername())
        text = f"{error.message} ({error.hint})" if error.hint else error.message
        logging.getLogger("rdmarpc").warning("%s refused a connection from %s: %s", self._device, where, text)

    def welcomed(self, channel: Channel) -> None:
        """The handshake of a channel that a peer opened is complete."""
        with self._lock:
            whole = self._whole
            if whole is None:
                self.arrived(channel)
                return
        whole[0](channel)

    def arrived(self, channel: Channel) -> None:
        """A channel is there for ``accept``."""
        if self.keep:
            self._accepted.put(channel)

    def accept(self, timeout: float | None) -> Channel:
        """See ``Device.accept``."""
        try:
            return self._accepted.get(timeout=None if timeout is None else limit(timeout, "the timeout of accept"))
        except queue.Empty:
            raise TransferTimeout(f"no peer connected within {timeout} s", device=self._device) from None

    def lost(self, channel: Channel, on_lost: Tell) -> None:
        """A channel broke: tell ``on_lost`` of it, or the device of which ours is a part."""
        try:
            (on_lost if self._whole is None else self._whole[1])(channel)
        except BaseException:
            # The thread that calls serves all channels: it must survive.
            logging.getLogger("rdmarpc").exception("on_lost failed for %r", channel)

    def join(self, arrived: Tell, lost: Tell) -> None:
        """Belong to a device that is a part of another one: from now on ``arrived`` and ``lost`` are told of our channels,
        also of those that came meanwhile."""
        with self._lock:
            self._whole = arrived, lost
            while not self._accepted.empty():
                arrived(self._accepted.get())

    def close(self) -> None:
        """Drop the callbacks, which may refer to the device."""
        self.greet, self._whole = _no_hello, None


class Device(AbstractContextManager["Device"], Listener, abc.ABC):
    """Owns its channels. ``close`` ends them in the right order and is idempotent. A device stands on a ``Memory``: one that it
    was given, or one of its own, which ends with the device.

    Thread-safe. Not usable in a forked child (``RdmaError``): fork before opening, or spawn.
    """

    name: str
    port = 0
    """Address of the port that a thread which waits on this device has to poll (``words/completions``); 0: there is none."""

    def __init__(self, name: str, options: DeviceOptions, *, shared: bool = False) -> None:
        """``shared``: whether a memory of our own is such as other processes can map. The device attaches itself to the memory
        (``Memory.attach``) before it lets peers in."""
        if why := machine.why_not():
            hint = "MemoryDenyWriteExecute of systemd, SELinux's execmem and seccomp forbid it; kernels are machine code"
            raise NotSupported(why, device=name, hint=hint)
        self.name = name
        self._looks = Looks(options.peer_timeout)
        self.given = bool(options.secret)
        """Whether peers elsewhere can have our secret. Else it is that of this user on this host."""
        self.secret = options.secret or user_secret()[0]
        self._own_memory = options.memory is None
        self.memory = options.memory or Memory(options.arena_limit, shared=shared)
        # The memory's, at hand for what is hot.
        self.uid, self.epoch, self.arena = self.memory.uid, self.memory.epoch, self.memory.arena
        self.bells, self.regions = self.memory.bells, self.memory.regions
        self.on_lost: Tell = nobody
        """Called once for every channel that broke, from a thread of the device. Must not block."""
        self.on_staged: Callable[[int], None] | None = None
        """Called with the bytes of every ``count_staged``, from its thread."""
        self.door = Door(name, options.on_connect)
        self._channels: weakref.WeakSet[Any] = weakref.WeakSet()  # of the device's own class
        self._lock = threading.RLock()
        self._past = (0, 0)  # posts and bytes of channels that ended
        self.pid = os.getpid()
        """The process that opened it: in another one it is of no use."""
        self.closed, self.why_closed, self._close_by = False, "the device is closed", 0.0
        interrupts.protect()
        _devices.add(self)

    # -- memory

    def empty(
        self,
        shape: int | Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        writable: bool = False,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """An uninitialised tensor in the arena: registered from the start, contiguous, of torch's default dtype unless
        ``dtype`` is given. Every peer may READ it, and WRITE it too if ``writable``. ``Channel.empty`` makes tensors for one
        peer alone. The memory is free for others when the last tensor over it dies. Raises ``ArenaFull``. ``device``: on that
        GPU instead; ``NotSupported`` where this device reaches none."""
        self.check()
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if device is not None and torch.device(device).type != "cpu":
            return self._on_gpu(sizes, dtype or torch.get_default_dtype(), torch.device(device))
        pool = self.arena.writable if writable else self.arena.readable
        return pool.tensor(sizes, dtype or torch.get_default_dtype())

    def _on_gpu(self, sizes: tuple[int, ...], dtype: torch.dtype, place: torch.device) -> torch.Tensor:
        raise NotSupported(f"{self.name} reaches no memory of {place}", device=self.name, hint="open cuda, verbs or auto")

    def pool(self) -> Pool:
        """Memory that the peer of one channel may read and write, and no other peer. It is for a channel that does not exist
        yet: pass it to ``connect``. An existing channel has ``Channel.pool``."""
        self.check()
        return self.arena.pool()

    def register(self, tensor: torch.Tensor | Array) -> Region:
        """Describe the memory of a contiguous tensor, or of an array of cupy or numpy, to peers. For arena tensors this is free
        and gives peers no additional rights. Other memory is announced to every peer, who may read and write it until
        ``Region.close``; the counter ``registrations`` counts that. The region keeps the memory alive. Raises ``ValueError``
        for what is not contiguous or cannot be shared with torch, ``RegistrationError``."""
        self.check()
        return self.memory.register(as_tensor(tensor))

    def export(self, tensor: torch.Tensor) -> bytes:
        """The descriptor of an arena tensor, as bytes. Raises ``RegistrationError`` for other memory, which a ``Region`` of
        ``register`` describes."""
        address, nbytes = local_bytes(tensor)
        if nbytes and self.arena.find(address, nbytes) is None:
            why = "this tensor is not in the arena"
            raise RegistrationError(why, device=self.name, hint="make it with device.empty(), or keep device.register(tensor)")
        return self.register(tensor).export()

    def lend(self, tensor: torch.Tensor, channel: Channel) -> RemoteRegion:
        """A descriptor by which the peer of ``channel`` may READ this tensor while the caller keeps it alive and unchanged. It
        is free of cost and need not be withdrawn. Only where ``can_lend`` is true."""
        return self.register(tensor).remote

    def can_lend(self, tensor: torch.Tensor, channel: Channel) -> bool:
        """Whether ``lend`` works for this tensor towards the peer of ``channel``. Always true for tensors of ``empty``, and for
        arena tensors that only this peer may touch."""
        address, nbytes = local_bytes(tensor)
        found = self.arena.find(address, nbytes)
        return not nbytes or (found is not None and found[0].pool.admits(channel.own_pool, write=False))

    # -- peers

    @property
    @abc.abstractmethod
    def address(self) -> bytes:
        """The bytes that a peer needs to ``connect`` to us. Printable, no code, no secret."""

    @abc.abstractmethod
    def connect(self, peer: bytes, *, hello: bytes = b"", timeout: float = 5.0, pool: Pool | None = None) -> Channel:
        """Connect to the device whose ``address`` is ``peer``, and authenticate both ends. ``timeout`` in seconds.

        ``hello`` (at most 64 KiB) reaches the peer's ``on_connect`` as ``channel.peer_hello``. It may describe memory of
        ``pool``, which becomes ``Channel.pool``; if ``connect`` raises, the pool still belongs to the caller.

        Raises ``PeerLost``, ``TransferTimeout``, ``AuthenticationError``, and ``NotSupported`` where this device cannot reach
        that peer; the peer's ``on_connect`` has not been called in that last case.
        """

    def why_not(self, peer: bytes) -> str:
        """The reason why ``connect`` to that address would be ``NotSupported``, as far as it is known without asking the peer.
        Empty: it may work."""
        return "" if peer.startswith(self.name.encode() + b":") else f"that is no address of {self.name}"

    def accept(self, *, timeout: float | None = None) -> Channel:
        """The next channel that a peer opened; for devices without ``on_connect``. ``timeout`` in seconds. Raises
        ``TransferTimeout``."""
        return self.door.accept(timeout)

    def poller(self) -> Poller:
        """A new poller for notifications of this device's channels."""
        return Poller(self.memory, self.port)

    @abc.abstractmethod
    def explain(self) -> str:
        """A text for people: what was chosen, what this host allows, and what it does not allow."""

    def counters(self) -> dict[str, int]:
        """Totals since ``open_device``: ``posts``, ``bytes_direct``, ``channels`` (open now). Totals of the memory, hence of
        all devices on it: ``bytes_staged``, ``registrations`` (segments and foreign regions), ``segments``, ``arena_bytes``,
        ``arena_used``, and the names given to ``count``."""
        totals = self.memory.counters()
        with self._lock:
            totals["posts"], totals["bytes_direct"] = self._past
            for channel in self._channels:
                posts, nbytes = channel.totals()
                totals["posts"] += posts
                totals["bytes_direct"] += nbytes
            totals["channels"] = sum(channel.error is None for channel in self._channels)
        return totals

    def opened(self) -> list[Any]:
        """The channels that have not ended."""
        with self._lock:
            return [channel for channel in self._channels if channel.error is None]

    def count_staged(self, nbytes: int) -> None:
        """Count payload bytes that a layer above copied besides the transfer itself."""
        self.memory.count("bytes_staged", nbytes)
        if self.on_staged is not None:
            self.on_staged(nbytes)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter of a layer above. The counter exists from the first call on."""
        self.memory.count(name, amount)

    def close(self) -> None:
        """Close the channels, then stop listening. Tensors of the arena stay valid for as long as they are held. Idempotent."""
        with self._lock:
            if self.closed or os.getpid() != self.pid:
                return
            self.closed = True
            channels = list(self._channels)
        for channel in channels:
            channel.close()
        self._shut()
        self._give_back()
        # These are not called any more. Their owners refer to us, so keeping them would be a circle.
        self.on_lost = nobody
        self.door.close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- for the devices themselves

    def close_deadline(self) -> float:
        """The time (``time.monotonic``) until which a channel that is being closed may wait for its posts. The channels of a
        device that is being closed share one deadline."""
        if not self.closed:
            return time.monotonic() + _CLOSE_TIMEOUT_S
        self._close_by = self._close_by or time.monotonic() + _CLOSE_TIMEOUT_S
        return self._close_by

    @abc.abstractmethod
    def _shut(self) -> None: ...

    def pin(self) -> None:
        """Register the first memory that all peers may read now, where that takes long, rather than with the first tensor.
        Raises ``RegistrationError`` where nothing can be registered."""

    def _give_back(self) -> None:
        """Undo the base class's constructor: at the end, and in the constructor of a device that cannot be opened."""
        self.closed = True
        self.memory.detach(self)
        if self._own_memory:
            self.memory.close()

    def _retire(self, channel: Channel) -> None:
        """An ended channel lives on in the totals only."""
        if channel.own_pool is not None:
            channel.own_pool.close()
        channel.notifiers.clear()
        with self._lock:
            if channel in self._channels:
                self._channels.discard(channel)
                posts, nbytes = channel.totals()
                self._past = (self._past[0] + posts, self._past[1] + nbytes)

    @abc.abstractmethod
    def _forked(self) -> None:
        """In a forked child, close our copies of the sockets, or the peers would not notice the parent's death. Takes no lock,
        as a thread that does not exist here may hold it for ever."""

    def check(self) -> None:
        """Raises ``RdmaError`` if this device is closed, or another process's."""
        if self.closed:
            raise RdmaError(self.why_closed, device=self.name)
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
    return hashlib.sha256(kernel_and_network().encode()).hexdigest()[:16]
