"""The memory of a peer of this host, as the peer announced it: segments, which are mapped here, and foreign regions, which the
kernel copies (``memory/mapping``)."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ..errors import PeerLost, RdmaError, RemoteAccessError
from ..memory.mapping import Shown, address_of, mapped, transfer, watch
from ..peers.guard import broken_by, naming
from ..region import LENT, OTHERS, READ_ONLY, RemoteRegion, barrier, refusal
from ..words import kernels

_CREDENTIALS, _DESCRIPTOR = struct.Struct("3i"), struct.Struct("i")


def credentials(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel noted them when it connected, or listened. Raises ``NotSupported``."""
    with naming("SO_PEERCRED (getsockopt), which tells whose process the peer is", device="shm"):
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


@contextlib.contextmanager
def received(sock: socket.socket, nbytes: int, count: int, flags: int = 0) -> Iterator[tuple[bytes, list[int]]]:
    """One message of up to ``nbytes``, and up to ``count`` descriptors, which are closed at the end of the ``with``.
    ``OSError``, also if a descriptor was lost."""
    # Not ``socket.recv_fds``, which forgets the flags.
    data, rights, told, _ = sock.recvmsg(nbytes, socket.CMSG_LEN(4 * count), flags | socket.MSG_CMSG_CLOEXEC)
    fds = [fd for _, _, found in rights for (fd,) in _DESCRIPTOR.iter_unpack(found[: len(found) // 4 * 4])]
    try:
        if told & socket.MSG_CTRUNC and len(fds) >= count:
            raise PeerLost(f"the peer handed over more than {count} descriptors at once", device="shm", status="PROTOCOL")
        if told & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, "no descriptor is left for memory of the peer, or a sandbox (SELinux) took it away")
        yield data, fds
    finally:
        for fd in fds:
            os.close(fd)


Entry = tuple[int, int, int]
"""Address, bytes, key. The address is one of this process if the memory is mapped here, else one of the peer's process."""


Attach = tuple[str, bool]
"""What the kernel lets the two ends of a connection do: to copy from the other's memory (``memory/mapping``). Why this end may
not, empty if it may; whether the other one may."""


class PeerMemory:
    """The tables of what the peer of one channel has announced. Only the thread that hears the peer writes them. They refer to
    the channel weakly, and only to name the peer in errors."""

    def __init__(self, channel: Any, uid: int, epoch: int, attach: Attach) -> None:
        self.pid, self.uid, self.epoch = channel.pid, uid, epoch
        self._channel, self.device = weakref.ref(channel), channel.device.name
        self.no_cma, self.reaches_us = attach
        """Why the peer's memory outside of segments cannot be reached; empty if it can. And whether the peer can reach ours."""
        self.copying = threading.Lock()
        """Held during each copy by the kernel: the owner's deregistration waits for it."""
        self.segments: dict[int, Entry] = {}
        self.parts: dict[int, Entry] = {}
        """Memory that is neither mapped here nor copied by the kernel: GPU memory, which ``cuda/channel`` enters."""
        self.foreign: dict[int, Entry] = {}
        """Memory that the kernel copies."""
        self.read_only: set[int] = set()
        """Numbers of segments that are mapped for reading."""
        self.views: dict[int, memoryview] = {}
        """The bytes of segments. They stay mapped for as long as a view is held."""
        self.adoptions: dict[int, _Adoption] = {}
        self.owner = os.getpid()
        watch(self)

    @property
    def peer(self) -> str:
        """The name of the peer, for texts."""
        channel = self._channel()
        return channel.peer if channel is not None else f"process {self.pid}"

    # -- what the peer tells

    def add_segment(self, fds: list[int], number: int, key: int, nbytes: int, *, writable: bool) -> None:
        """Map a segment of the peer. Raises ``PeerLost`` if the peer handed over no file, or one that is no segment."""
        if number in self.segments:  # a segment may be told twice
            return
        if not fds:
            raise PeerLost("the peer told of memory without handing it over", peer=self.peer, device="shm", status="PROTOCOL")
        memory = mapped(fds[0], nbytes, writable=writable)
        if not writable:
            self.read_only.add(number)
        self.views[number] = memoryview(memory)
        self.segments[number] = (address_of(memory), nbytes, key)

    def remove_region(self, number: int) -> None:
        """Returns when no copy by the kernel is under way."""
        with self.copying:
            self.foreign.pop(number, None)

    # -- what is where

    def find(self, number: int) -> Entry | None:
        return self.segments.get(number) or self.parts.get(number) or self.foreign.get(number)

    def resolve(
        self, remote: RemoteRegion, *, write: bool = False, hear_of: Callable[[int], None] | None = None
    ) -> tuple[int, bool]:
        """The address of a remote range, and whether it is an address of this process (the range is mapped) or of the peer's.
        ``hear_of(region)`` asks the peer about a region that it has not announced yet. Raises ``RemoteAccessError``."""
        if remote.nbytes == 0:
            return 0, True
        if remote.owner != self.uid or remote.epoch != self.epoch:
            raise self.refuse(OTHERS)
        if remote.region == LENT:
            if write:
                raise self.refuse("memory that was lent is for reading only")
            return remote.offset, False
        entry = self.find(remote.region)
        if entry is None and hear_of is not None:
            hear_of(remote.region)
            entry = self.find(remote.region)
        right = READ_ONLY if write and remote.region in self.read_only else ""
        why = barrier(remote.region, remote.key, remote.offset, remote.nbytes, entry and entry[1:], right)
        if why or entry is None:
            raise self.refuse(why)
        return entry[0] + remote.offset, remote.region in self.segments

    def refuse(self, why: str) -> RemoteAccessError:
        return refusal(why, self.peer, self.device)

    # -- using it

    def attach(self, local: int, remote: int, nbytes: int, *, write: bool) -> None:
        """Have the kernel copy to or from an address of the peer. Raises ``RdmaError``."""
        try:
            transfer(self.pid, local, remote, nbytes, write=write)
        except RdmaError as error:  # it knows of a process, not of a peer
            raise broken_by(error, "copying", peer=self.peer, device=self.device) from None

    def adopt(self, remote: RemoteRegion, release: int) -> torch.Tensor:
        """See ``Channel.adopt``, for a range of a segment; ``release``: address of the word."""
        view = self.views[remote.region][remote.offset : remote.offset + remote.nbytes]
        adoption = _Adoption(view, _disown)
        adoption.memory, adoption.release = self, release
        self.adoptions[id(adoption)] = adoption
        # The storage holds ``view``, and that the mapping.
        return torch.frombuffer(view, dtype=torch.uint8)

    def shown(self) -> list[Shown]:
        """What was adopted and is in use. Takes no lock."""
        found = [view for adoption in list(self.adoptions.values()) if (view := adoption()) is not None]
        return [Shown(np.frombuffer(view, np.uint8).ctypes.data, view.nbytes, view) for view in found]


class _Adoption(weakref.ref):
    """Watches adopted memory: its end is told to the peer."""

    __slots__ = ("memory", "release")
    memory: PeerMemory
    release: int


def _disown(adoption: _Adoption) -> None:
    # Runs in finalizers of any thread: no lock, one store. The word is kept for it even after the channel has ended.
    adoption.memory.adoptions.pop(id(adoption), None)
    if os.getpid() == adoption.memory.owner:  # a forked child's copies mean nothing
        kernels.store(adoption.release, 0)
