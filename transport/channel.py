"""The connection to one peer over one device, and the copies made through it.

Contract, for every device:

* ``memcpy(dst, src)``: exactly one side is a ``RemoteRegion``. The other side is a contiguous tensor, an array of cupy or
  numpy, or a ``Region``, of the same number of bytes. It lies on the CPU, or on a GPU where ``Channel.gpus`` is true. A remote
  ``dst`` is a WRITE, a remote ``src`` is a READ. Dtypes and shapes are not transmitted.
* ``notify=n`` counts notification ``n`` at the peer after the data of that call has arrived. Notifications are counted and
  order-free. Copies of one call are not ordered among each other.
* A ``Work`` is done when local memory may be reused (WRITE) or holds the data (READ). Until then the caller keeps that memory
  alive and unchanged. A timeout ends the wait, not the copy.
* What a peer may touch depends on how the memory was allocated. All peers may READ tensors of ``Device.empty``, and WRITE them
  too with ``writable=True``. Only the peer of a channel may READ or WRITE tensors of ``Channel.empty``. On ``shm`` the kernel
  enforces this: nothing else can be mapped, or not for writing. On ``verbs`` the adapter enforces it: other memory has another
  key, or a key without the right to write. On ``tcp`` the owner checks every copy.
* Some limits are not enforced. Within memory that it may touch, a peer is not kept to the range of a descriptor, nor to the
  time for which the descriptor was given. A receiver that does not trust its peer therefore clones received data before it
  checks them. A descriptor for READs opens the whole segment of ``Device.empty`` on ``shm`` and ``verbs``; on ``tcp`` a
  descriptor of ``Device.lend`` opens that tensor alone, for that peer alone. Keys of ``verbs`` have 32 bits and hold for all
  queue pairs of a device: no other peer is told them, but they can be guessed. Registered GPU memory, and other memory given to
  ``Device.register``, is open to every peer for reading and writing.
* A descriptor that gives no access raises ``RemoteAccessError``: from ``prepare`` where this side can tell, else from
  ``Work.wait``. No notification is sent in that case, and the channel stays usable.
* ``abort`` returns when no copy of either side is under way and none can start. All buffers are safe to reuse from then on.
* Any number of threads may copy through one channel. After a failure ``channel.error`` is set for good, and every later call
  raises it.
* ``close`` is idempotent. Transfers that were prepared on a closed channel raise ``PeerLost``.
"""

from __future__ import annotations

import abc
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .errors import NotSupported, RdmaError, fresh
from .memory.arena import Pool
from .notify import Count, Expectation
from .region import Array, Region, RemoteRegion, as_tensor, local_bytes
from .words.signals import MAX_NOTIFY, RECORD_BYTES

FIRST_FREE_NOTIFY = 16
"""Numbers below belong to the control protocol; the others are given out by ``Channel.take_numbers``."""
Local = torch.Tensor | Array | Region
Pair = tuple[Local | RemoteRegion, Local | RemoteRegion]


class Work:
    """A copy under way, or one that has ended."""

    __slots__ = ()

    def done(self) -> bool:
        """Whether the copy has ended, successfully or not. Does not block."""
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Block until the copy has ended, and raise its error if it failed. ``timeout`` in seconds, ``None``: no limit. Raises
        ``TransferTimeout`` if the copy is still under way then."""

    def exception(self) -> RdmaError | None:
        """The error of a copy that failed, else ``None``."""
        return None

    def then(self, callback: Callable[[], None]) -> None:
        """Have ``callback()`` run once the copy has ended, successfully or not. Where a READ takes a thread at the peer
        (``Channel.reads_take_peer``), this method returns at once and the thread that hears the peers runs ``callback``,
        which must neither block nor raise. On other devices this method waits, then runs ``callback`` in the calling thread."""
        with contextlib.suppress(RdmaError):
            self.wait()
        callback()

    def block_current_stream(self) -> None:
        """Order the caller's current GPU stream after the copy: work enqueued there from now on runs when the copy has ended.
        Where a GPU copies, the calling thread goes on at once; elsewhere it waits. If the copy fails, ``wait`` raises the
        error, the stream does not."""
        self.wait()


DONE = Work()
"""A copy that was complete when the call returned."""
NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
"""Bound in place of a tensor that was let go of."""


class Transfer(abc.ABC):
    """A list of copies and one notification, prepared once, posted again and again.

    It keeps its local tensors alive. One thread at a time. A post may begin only when the previous one is done.
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
        """Release the local tensor of copy ``index``, whose last post is done. ``rebind`` this copy before the next post."""


class Window(abc.ABC):
    """Two ranges of one size, one here and one at the peer. Parts of the local range are written to the same place of the
    other."""

    __slots__ = ()

    @abc.abstractmethod
    def put(self, offset: int, nbytes: int) -> None:
        """Copy ``local[offset:offset + nbytes]`` to the same place at the peer, then notify. Offsets are bytes. The caller
        keeps the range inside the window, and leaves the local bytes unchanged until the peer has confirmed that they
        arrived. Any thread. Blocks where the device's own queue is full."""

    @abc.abstractmethod
    def put_now(self, offset: int, nbytes: int) -> bool | None:
        """As ``put``, without blocking: true if nothing was sent because the device's own queue is full."""


class Mapped(abc.ABC):
    """Memory of the peer, mapped into this process: writing into ``memory`` needs no further copy.

    Writes stand between ``begin`` and ``end``; an abort of either side waits for ``end`` as for a copy. The peer sees them once
    it receives a notification that this thread posts afterwards. ``memory`` may be read for as long as it is held, and shows
    what the peer writes there. One thread at a time.
    """

    __slots__ = ()
    memory: memoryview
    whole: memoryview
    """All of the peer's segment that ``memory`` is a part of, as it is mapped here."""

    @abc.abstractmethod
    def begin(self) -> None:
        """Begin to write. Raises ``PeerLost`` if the channel has ended; nothing may be written after that."""

    @abc.abstractmethod
    def end(self, nbytes: int) -> None:
        """So many bytes were written."""


class Channel(abc.ABC):
    """A connection to one peer, made by ``Device.connect`` or ``Device.accept``. The module's docstring is its contract."""

    peer: str
    """The name of the process at the other end, for people."""
    peer_hello: bytes
    """The bytes that the peer gave to ``connect``, or that its ``on_connect`` returned."""
    peer_key: bytes
    """The public key whose private half the other end has proved to hold (``peers/auth``)."""
    records: int
    """Address of the records of ``MAX_NOTIFY`` notifications, which the peer counts in."""
    port = 0
    """Address of the port block to poll for news of this channel (``words/completions``); 0 if nothing has to be polled."""

    def __init__(self, device: Any) -> None:
        self.device = device
        """The ``Device`` that made it."""
        self.error: RdmaError | None = None
        self._counts: dict[int, Count] = {}
        self.notifiers: dict[int, Transfer] = {}
        """Prepared notifications without data. They refer to the channel, so the device clears this after the channel's end."""
        self._next_number = FIRST_FREE_NOTIFY
        self._numbers_lock = threading.Lock()
        self.own_pool: Pool | None = None
        """``pool`` once there is one, else ``None``. ``on_connect`` may set it while it is ``None``."""

    # -- memory of ours that the peer may write

    @property
    def pool(self) -> Pool:
        """Memory of this process that the channel's peer may read and write, and no other peer may touch. It returns to the
        system after the channel's end, when nothing here uses it any more."""
        with self._numbers_lock:
            if self.own_pool is None:
                self.own_pool = self.device.arena.pool()
            return self.own_pool

    def empty(self, shape: int | Sequence[int], *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An uninitialised tensor in ``pool``, as ``Device.empty`` makes one: only the channel's peer may READ and WRITE it.
        Raises ``ArenaFull``, and the channel's error once it has ended."""
        self.check()
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        return (self.own_pool or self.pool).tensor(sizes, dtype or torch.get_default_dtype())

    # -- copies

    def memcpy(self, dst: Local | RemoteRegion, src: Local | RemoteRegion, *, notify: int | None = None) -> Work:
        """Copy ``src`` to ``dst`` once. Raises ``ValueError`` for sides that do not fit each other, ``RemoteAccessError``,
        ``PeerLost``."""
        return self.prepare([(dst, src)], notify=notify).post()

    @abc.abstractmethod
    def prepare(self, pairs: Sequence[Pair], *, notify: int | None = None) -> Transfer:
        """Check and resolve everything now, so that ``Transfer.post`` only copies. ``pairs``: (dst, src) as in ``memcpy``;
        without any, a post only sends the notification. Raises as ``memcpy``."""

    def window(self, remote: RemoteRegion, local: torch.Tensor, *, notify: int) -> Window:
        """A write-through window from ``local``, an arena tensor, to a remote range of the same size. Each ``put`` sends
        ``notify``."""
        self.check()
        check_notify(notify)
        remote, local, _ = sort_pair(remote, local)
        found = self._window(remote, local, notify)
        if found is None:
            why, hint = "a window needs memory of the peer's arena", "let the peer make it by channel.empty()"
            raise NotSupported(why, peer=self.peer, device=self.device.name, hint=hint)
        return found

    @abc.abstractmethod
    def _window(self, remote: RemoteRegion, local: torch.Tensor, notify: int) -> Window | None:
        """As ``window``, for sides that fit each other; ``None`` where the remote one would have to be in the peer's arena."""

    gpus = False
    """Whether the local side of a copy may be GPU memory here."""

    registered_only = False
    """Whether the local side of a copy has to lie in the arena, or is staged there: what is made there saves a copy."""

    reads_take_peer = False
    """Whether a READ takes a thread of Python at the peer, and so as long as that is held up."""

    can_adopt = False
    """Whether ``adopt`` works here: the peer's arena is mapped into this process."""

    def adopt(self, remote: RemoteRegion, release: RemoteRegion) -> torch.Tensor:
        """Map memory that the peer has handed over for good: a uint8 tensor over ``remote``, without a copy. When the last
        tensor over this memory is freed, the word ``release`` (8 bytes in the peer's arena) becomes 0, after all reads and
        writes made here. The peer keeps both until the word is 0 or this process has ended, so the tensor stays valid after
        the channel's end."""
        why = "this device has no mapped memory of its peers"
        raise NotSupported(why, peer=self.peer, device=self.device.name, hint="open shm")

    def peer_ended(self) -> bool:
        """Whether the peer's process has ended, and with it every tensor that it adopted."""
        return self.error is not None

    def map(self, remote: RemoteRegion) -> Mapped | None:
        """The peer's arena memory mapped into this process, or ``None`` where this device cannot reach it by plain loads and
        stores. Raises ``RemoteAccessError`` as ``prepare`` does."""
        return None

    def record(self, imm: int) -> int:
        """Address of the notification record ``imm`` (``words/signals``)."""
        check_notify(imm)
        return self.records + imm * RECORD_BYTES

    def abort(self, timeout: float = 5.0) -> None:
        """Stop both directions for good. No copy touches memory of this process once it returns. Raises ``TransferTimeout``
        after ``timeout`` seconds if the peer's process is suspended in the middle of a copy: the target of that copy is then
        not safe to reuse."""
        if os.getpid() == self.device.pid:
            self._abort(timeout)

    def close(self) -> None:
        """Tell the peer, and release the connection. Idempotent."""
        if os.getpid() == self.device.pid:
            self._close()

    def _abort(self, timeout: float) -> None:
        """``abort``, in the process that opened the device."""
        raise NotImplementedError

    def _close(self) -> None:
        """``close``, likewise."""
        raise NotImplementedError

    def forked(self, error: RdmaError) -> None:
        """Make every use in a forked child raise ``error``. Sends nothing to the peer and takes no lock."""
        self.error = error

    @property
    def peer_copies(self) -> bool:
        """Whether, after the channel's end, a copy of the peer may still touch memory of this process, because the peer is
        suspended in the middle of it. Memory that the peer could reach must not be reused while this is true."""
        return False

    def take_numbers(self, count: int) -> int:
        """Reserve ``count`` consecutive numbers for notifications that arrive *here*, and return the first. They belong to the
        caller alone and are never given out twice, so recycle them yourself. Thread-safe. Raises ``ValueError`` when too few
        are left."""
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
        """The prepared transfer that ``notify`` posts."""
        found = self.notifiers.get(imm)
        if found is None:
            found = self.notifiers[imm] = self.prepare([], notify=imm)
        return found

    def notify_after(self, imm: int, device: torch.device | str) -> Work:
        """Send one notification when the work enqueued so far on the caller's current stream of that GPU is done. Returns at
        once. This tells a peer that memory which a kernel reads may be overwritten. Raises ``NotSupported`` where no GPU is
        reached."""
        why = "this channel has no GPU streams"
        raise NotSupported(why, peer=self.peer, device=self.device.name, hint="open cuda, verbs or auto")

    def _index_of(self, device: torch.device | str, kind: str) -> int:
        """The index of a GPU of this process, of the type ``kind``. Raises ``NotSupported`` for anything else."""
        place = torch.device(device)
        if not kind or place.type != kind:
            raise NotSupported(f"{place} is no GPU of this process", peer=self.peer, device=self.device.name)
        return torch.accelerator.current_device_index() if place.index is None else place.index

    def fence(self, timeout: float | None = None) -> None:
        """Return when everything posted on this channel before has arrived, including notifications without data: the peer
        finds them counted from then on. ``timeout`` in seconds. Raises ``PeerLost``, ``TransferTimeout``."""
        self.check()  # where a post is a copy of our own there is nothing to wait for

    def expect(self, imm: int, count: int = 1) -> Expectation:
        """Wait here for ``count`` notifications ``imm``, which the peer sends with ``notify=imm``."""
        return Expectation(self, imm, count, self.count(imm))

    def count(self, imm: int) -> Count:
        """The number of notifications ``imm`` that were consumed so far. All expectations on that number share it."""
        if imm not in self._counts:
            self._counts[imm] = Count(self.record(imm))
        return self._counts[imm]

    @abc.abstractmethod
    def totals(self) -> tuple[int, int]:
        """Posts and payload bytes so far."""

    def check(self) -> None:
        """Raise the error that ended this channel, if it has ended."""
        if self.error is not None:
            raise fresh(self.error)

    def __repr__(self) -> str:
        state = "open" if self.error is None else type(self.error).__name__
        return f"<{type(self).__name__} to {self.peer}, {state}>"


def check_notify(imm: int | None) -> None:
    if imm is not None and not 0 <= imm < MAX_NOTIFY:
        raise ValueError(f"a notification is a number from 0 to {MAX_NOTIFY - 1}, got {imm}")


def rebound(index: int, nbytes: int, tensor: torch.Tensor, gpu: str = "") -> int:
    """The address of the tensor that copy ``index`` of a transfer is to use, of so many bytes. Raises ``ValueError``."""
    address, found = local_bytes(tensor, gpu)
    if found != nbytes:
        raise ValueError(f"copy {index} was prepared for {nbytes} bytes, got {found}")
    return address


def sort_pair(dst: Local | RemoteRegion, src: Local | RemoteRegion, gpu: str = "") -> tuple[RemoteRegion, torch.Tensor, bool]:
    """(remote, local tensor, whether it is a WRITE) of a copy. Raises ``ValueError`` for sides that do not fit each other.
    ``gpu``: as for ``local_bytes``."""
    if isinstance(dst, RemoteRegion) == isinstance(src, RemoteRegion):
        raise ValueError("exactly one side of a copy is remote: memcpy(remote, local) writes, memcpy(local, remote) reads")
    write = isinstance(dst, RemoteRegion)
    remote, local = (dst, src) if write else (src, dst)
    assert isinstance(remote, RemoteRegion) and not isinstance(local, RemoteRegion)
    tensor = local.tensor if isinstance(local, Region) else local
    if not isinstance(tensor, torch.Tensor):
        tensor = as_tensor(tensor)
    nbytes = local_bytes(tensor, gpu)[1]
    if nbytes != remote.nbytes:
        raise ValueError(f"sizes differ: {nbytes} bytes here, {remote.nbytes} at the peer")
    return remote, tensor, write
