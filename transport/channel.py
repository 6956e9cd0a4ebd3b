"""The connection to one peer over one device, and the copies made through it.

Contract, for every device:

* ``memcpy(dst, src)``: exactly one side is a ``RemoteRegion``, the other a contiguous tensor or a ``Region`` of the same
  number of bytes: on the CPU, and for ``cuda`` (see there) also on a GPU. Remote ``dst`` is a WRITE, remote ``src`` a READ. The
  peer's processor takes no part.
* ``notify=n`` counts notification ``n`` at the peer after the data of that call is there. Notifications are counted and
  order-free; copies of one call are not ordered among each other.
* A ``Work`` is done when local memory may be reused (WRITE) or holds the data (READ). Until then the caller keeps it alive
  and unchanged. A timeout ends the wait, not the copy.
* What a peer may touch depends on how the memory was made. All peers may READ what ``Device.empty`` gives, and WRITE it too
  with ``writable=True``. Of what ``Channel.empty`` gives only the peer of that channel may do either. On ``shm`` the kernel
  enforces this (nothing else can be mapped, or not for writing), on ``verbs`` the adapter (other memory has another key, or one
  without the right to write), on ``tcp`` the owner, for every copy.
* What is not enforced. Within its own memory a peer is not kept to the range of a descriptor, nor to the time for which it
  was given: whoever does not trust a peer clones what landed before checking it. A descriptor for READing opens the whole
  segment of ``Device.empty`` on ``shm`` and ``verbs``; on ``tcp`` one of ``Device.lend`` opens that tensor, for that peer. Keys
  of ``verbs`` have 32 bits and hold for all queue pairs of a device: they are not told to others, but can be guessed.
  Registered GPU memory and what ``Device.register`` takes from elsewhere is open to every peer, for reading and writing.
* A descriptor that gives no access is a ``RemoteAccessError``, from ``prepare`` where this side can tell, else from
  ``Work.wait``. Nothing is notified then, and the channel goes on.
* ``abort`` returns when no copy of either side is under way and none can start: then all buffers are safe again.
* Any number of threads may copy through one channel. After an error ``channel.error`` is set for good and every later
  call raises it.
* ``close`` is idempotent. What was prepared on a channel fails with ``PeerLost`` afterwards, it never crashes.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from .errors import NotSupported, RdmaError, fresh
from .memory.arena import Arena, Block, Pool
from .memory.memory import Memory
from .notify import Count, Expectation
from .region import Region, RemoteRegion, local_bytes
from .words.records import MAX_NOTIFY

FIRST_FREE_NOTIFY = 16
"""Numbers below belong to the control protocol; the others are given out by ``Channel.take_numbers``."""
Local = torch.Tensor | Region
Pair = tuple[Local | RemoteRegion, Local | RemoteRegion]


class Parent(Protocol):
    """What a channel, or its user, uses of the ``Device`` that made it."""

    name: str
    pid: int
    memory: Memory
    arena: Arena
    uid: int
    epoch: int

    def export(self, tensor: torch.Tensor) -> bytes: ...

    def lend(self, tensor: torch.Tensor, channel: Channel) -> RemoteRegion: ...

    def can_lend(self, tensor: torch.Tensor, channel: Channel) -> bool: ...


class Work:
    """A copy under way."""

    __slots__ = ()

    def done(self) -> bool:
        """Whether it ended, well or badly."""
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Block until it ended; raise what went wrong. ``timeout`` in seconds (``TransferTimeout``)."""

    def exception(self) -> RdmaError | None:
        """What went wrong, if it ended badly."""
        return None

    def then(self, callback: Callable[[], None]) -> None:
        """Have ``callback()`` run once the copy has ended, well or badly. Where a peer's thread has a part in that
        (``Channel.reads_take_peer``) this returns at once, and the callback is for the thread that hears the peers: it must not
        hold that up, nor raise. Elsewhere it runs here, after a wait."""
        with contextlib.suppress(RdmaError):
            self.wait()
        callback()

    def block_current_stream(self) -> None:
        """Have what the caller's current GPU stream is given from here on run when the copy has ended; the calling thread goes
        on at once where a GPU copies, and else waits. If the copy ends badly, ``wait`` says so, not the stream."""
        self.wait()


DONE = Work()
"""A copy that was complete when the call returned."""


class Transfer(abc.ABC):
    """A list of copies and one notification, prepared once, posted again and again.

    It keeps its local tensors alive. One thread at a time; the previous post must be done.
    """

    __slots__ = ()

    @abc.abstractmethod
    def post(self) -> Work:
        """Start the copies, then the notification."""

    @abc.abstractmethod
    def rebind(self, index: int, tensor: torch.Tensor) -> None:
        """Let copy ``index`` use this local tensor (same number of bytes) from the next post on."""

    @abc.abstractmethod
    def unbind(self, index: int) -> None:
        """Let go of the local tensor of copy ``index``, whose last post is done. To be bound again before the next post."""


class Window(abc.ABC):
    """Two equally large ranges, one here and one at the peer, the local one written through to the other by pieces."""

    __slots__ = ()

    @abc.abstractmethod
    def put(self, offset: int, nbytes: int) -> None:
        """Copy ``local[offset:offset + nbytes]`` to the same place at the peer, then notify. The caller keeps the range inside
        the window, and leaves the local bytes as they are until it knows from the peer that they are there. Any thread. Waits
        where the device's own queue is full."""

    @abc.abstractmethod
    def put_now(self, offset: int, nbytes: int) -> bool | None:
        """As ``put``, without waiting: true if nothing was sent because the device's own queue is full."""


class Mapped(abc.ABC):
    """Memory of the peer in place: what is written into ``memory`` needs no copy any more.

    Writing stands between ``begin`` and ``end``; an abort of either side waits for it as for a copy. What was written is
    visible to whoever receives a notification that this thread posts afterwards. Reading is good for as long as ``memory`` is
    held, and sees what the peer writes there. One thread at a time.
    """

    __slots__ = ()
    memory: memoryview
    whole: memoryview
    """All of the peer's segment that ``memory`` is a part of, as it is mapped here."""

    @abc.abstractmethod
    def begin(self) -> None:
        """Raises ``PeerLost`` when the channel has ended: then nothing may be written."""

    @abc.abstractmethod
    def end(self) -> None: ...


class Channel(abc.ABC):
    """See the module's contract. Made by ``Device.connect`` or ``Device.accept``."""

    peer: str
    """Who is at the other end, for people."""
    peer_hello: bytes
    """What the peer gave to ``connect``, or its ``on_connect`` returned."""
    peer_key: bytes
    """The public key whose private half the other end has proved to hold (``peers/identity``)."""
    port = 0
    """Address of what has to be polled for news of this channel (``words/completions``); 0: nothing."""

    def __init__(self, device: Parent) -> None:
        self.device = device
        """The one that made it."""
        self.error: RdmaError | None = None
        self._counts: dict[int, Count] = {}
        self.notifiers: dict[int, Transfer] = {}
        """Bare notifications, as they were prepared. After the end the device clears this: they refer to us."""
        self._next_number = FIRST_FREE_NOTIFY
        self._numbers_lock = threading.Lock()
        self.own_pool: Pool | None = None
        """``pool``, if there is one. May be set as long as there is none: in ``on_connect``."""

    # -- memory of ours that the peer may write

    @property
    def pool(self) -> Pool:
        """Memory of ours that the peer may read and write, and no other peer may touch. It is given back to the system after
        the channel's end, when nothing here uses it any more."""
        with self._numbers_lock:
            if self.own_pool is None:
                self.own_pool = self.device.memory.pool()
            return self.own_pool

    def empty(self, shape: int | Sequence[int], *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As ``Device.empty``, in ``pool``."""
        self.check()
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        return (self.own_pool or self.pool).tensor(sizes, dtype or torch.get_default_dtype())

    def landing(self, nbytes: int) -> tuple[Block, bytes]:
        """Fresh memory of ``pool`` (``nbytes`` > 0) and its descriptor. Whoever has the block gives it to
        ``arena.free`` or ``arena.hold``, once."""
        self.check()
        block, device = (self.own_pool or self.pool).allocate(nbytes), self.device
        segment = block.segment
        return block, RemoteRegion(device.uid, device.epoch, segment.number, segment.key, block.offset, nbytes).dump()

    # -- copies

    def memcpy(self, dst: Local | RemoteRegion, src: Local | RemoteRegion, *, notify: int | None = None) -> Work:
        """Copy ``src`` to ``dst`` once. Raises ``ValueError`` for sides that do not fit, ``RemoteAccessError``,
        ``PeerLost``."""
        return self.prepare([(dst, src)], notify=notify).post()

    @abc.abstractmethod
    def prepare(self, pairs: Sequence[Pair], *, notify: int | None = None) -> Transfer:
        """Check and resolve everything now, so that ``Transfer.post`` only copies. ``pairs`` of (dst, src) may be empty:
        then only the notification is sent."""

    @abc.abstractmethod
    def window(self, remote: RemoteRegion, local: torch.Tensor, *, notify: int) -> Window:
        """A write-through window from an arena tensor to a remote range of the same size."""

    gpus = False
    """Whether the local side of a copy may be GPU memory here."""

    maps_gpus = False
    """Whether a peer that writes into our GPU memory has to map it, for which it needs a GPU's driver itself."""

    registered_only = False
    """Whether the local side of a copy has to lie in the arena, or is staged there: what is made there saves a copy."""

    reads_take_peer = False
    """Whether a READ takes a thread of Python at the peer, and so as long as that is held up."""

    can_adopt = False
    """Whether ``adopt`` works here: the peer's arena is mapped into this process."""

    def adopt(self, remote: RemoteRegion, release: RemoteRegion) -> torch.Tensor:
        """The peer's arena memory in place: a uint8 tensor over ``remote``, which the peer has handed over for good. When the
        last tensor over it dies, the word ``release`` (8 bytes of the peer's arena) becomes 0, after all that was read and
        written here. Both are valid for as long as they are held, whatever becomes of the channel: the peer keeps them until
        the word is 0 or our process has ended."""
        raise NotSupported("this device has no mapped memory of its peers", peer=self.peer, device=self.device.name)

    def peer_ended(self) -> bool:
        """Whether the peer's process, and with it every tensor that it adopted, has ended."""
        return self.error is not None

    def map(self, remote: RemoteRegion) -> Mapped | None:
        """The peer's arena memory in place, or ``None`` where this device cannot reach it by plain loads and stores. Raises
        ``RemoteAccessError`` as ``prepare``."""
        return None

    @abc.abstractmethod
    def record(self, imm: int) -> int:
        """Address of the notification record ``imm`` (``words/records``)."""

    @abc.abstractmethod
    def abort(self, timeout: float = 5.0) -> None:
        """Stop both directions for good. Afterwards no copy touches our memory. ``TransferTimeout`` if the peer is
        stopped in the middle of one: its target is then not safe to reuse."""

    @abc.abstractmethod
    def close(self) -> None:
        """Say goodbye and release the connection. Idempotent."""

    def forked(self, error: RdmaError) -> None:
        """In a forked child: fail every use with ``error``, without a word to the peer. Takes no lock."""
        self.error = error

    @property
    def peer_copies(self) -> bool:
        """After the end: whether a copy of the peer may still touch our memory, because the peer stopped in the middle of it.
        Until this is false, what the peer could reach must not be used again."""
        return False

    def take_numbers(self, count: int) -> int:
        """The first of ``count`` consecutive notification numbers that arrive *here* and belong to the caller alone from now
        on. Thread-safe. They are never given out twice: recycle them yourself. ``ValueError`` when there are none left."""
        with self._numbers_lock:
            first = self._next_number
            if count < 0 or first + count > MAX_NOTIFY:
                raise ValueError(f"{count} notification numbers asked for, {MAX_NOTIFY - first} of this channel are left")
            self._next_number = first + count
        return first

    def notify(self, imm: int) -> None:
        """Send one notification without data."""
        self.notifier(imm).post()

    def notifier(self, imm: int) -> Transfer:
        """What ``notify`` posts."""
        found = self.notifiers.get(imm)
        if found is None:
            found = self.notifiers[imm] = self.prepare([], notify=imm)
        return found

    def notify_after(self, imm: int, device: torch.device | str) -> Work:
        """Send one notification when what the caller's current stream of that GPU has been given so far is done; returns at
        once. So it is told that what a kernel reads may be written again. ``NotSupported`` where no GPU is reached."""
        raise NotSupported(
            "this channel has no GPU streams", peer=self.peer, device=self.device.name, hint="open cuda, verbs or auto"
        )

    def fence(self, timeout: float | None = None) -> None:
        """Return when everything that was posted here before has arrived, bare notifications too: the peer that looks
        afterwards sees them counted. ``PeerLost``, ``TransferTimeout``."""
        self.check()  # where a post is a copy of our own there is nothing to wait for

    def expect(self, imm: int, count: int = 1) -> Expectation:
        """The receiving side of ``notify=imm``."""
        return Expectation(self, imm, count, self.count(imm))

    def count(self, imm: int) -> Count:
        """How far notification ``imm`` has been consumed."""
        if imm not in self._counts:
            self._counts[imm] = Count(self.record(imm))
        return self._counts[imm]

    @abc.abstractmethod
    def totals(self) -> tuple[int, int]:
        """Posts and payload bytes so far."""

    def check(self) -> None:
        """Raises what ended this channel, if anything has."""
        if self.error is not None:
            raise fresh(self.error)

    def __repr__(self) -> str:
        state = "open" if self.error is None else type(self.error).__name__
        return f"<{type(self).__name__} to {self.peer}, {state}>"


def check_notify(imm: int | None) -> None:
    if imm is not None and not 0 <= imm < MAX_NOTIFY:
        raise ValueError(f"a notification is a number from 0 to {MAX_NOTIFY - 1}, got {imm}")


def sort_pair(dst: Local | RemoteRegion, src: Local | RemoteRegion, gpu: str = "") -> tuple[RemoteRegion, torch.Tensor, bool]:
    """(remote, local tensor, is it a WRITE), or ``ValueError``. ``gpu``: as for ``local_bytes``."""
    if isinstance(dst, RemoteRegion) == isinstance(src, RemoteRegion):
        raise ValueError("exactly one side of a copy is remote: memcpy(remote, local) writes, memcpy(local, remote) reads")
    write = isinstance(dst, RemoteRegion)
    remote, local = (dst, src) if write else (src, dst)
    tensor = local.tensor if isinstance(local, Region) else local
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"the local side is a tensor or a Region, got {type(tensor).__name__}")
    assert isinstance(remote, RemoteRegion)
    nbytes = local_bytes(tensor, gpu)[1]
    if nbytes != remote.nbytes:
        raise ValueError(f"sizes differ: {nbytes} bytes here, {remote.nbytes} at the peer")
    return remote, tensor, write
