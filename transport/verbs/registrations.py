"""The memory that an RDMA device has registered with its adapter: segments of the arena, memory from elsewhere, GPU memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..errors import RemoteAccessError
from ..gpu import driver
from ..gpu.arena import GpuArena
from ..listening import Questions
from ..memory.arena import READ, Pool, Segment
from ..memory.memory import Memory
from ..nic.libibverbs import LOCAL, REMOTE_READ, REMOTE_WRITE
from ..nic.native import Context, MemoryRegion
from ..region import OTHERS, READ_ONLY, RemoteRegion, barrier, refusal
from .control import LANDING, REGION, SEGMENT, SYNC, Message
from .gpu import GpuMemory

Place = tuple[int, int]
"""Address and rkey of remote memory."""


class Places:
    """The announced memory of one channel's peer. Any thread looks places up; the thread that hears the peer enters them."""

    def __init__(self, peer: str, identity: tuple[int, int], questions: Questions, send: Callable[[int, int], None]) -> None:
        """``identity``: the peer's uid and epoch. ``send(kind, number)`` sends a control message."""
        self.peer, self._identity = peer, identity
        self._questions, self._send = questions, send
        self.known: dict[int, tuple[int, int, int, int, bool]] = {}  # number -> (address, bytes, key, rkey, may be written)
        self._foreign: dict[int, weakref.WeakSet[Any]] = {}  # regions that may go, and what was prepared for them
        self._lock = threading.Lock()

    def refuse(self, why: str) -> RemoteAccessError:
        return refusal(why, self.peer, "verbs")

    def resolve(self, remote: RemoteRegion, asking: Any, *, write: bool) -> Place:
        """The place of a remote range. If the peer has not announced its region yet, the call asks for it over ``asking``, our
        end of the channel, and waits. Raises ``RemoteAccessError``."""
        if remote.nbytes == 0:
            return 0, 0
        found = remote.resolved
        if found is not None and found[0] is self and (found[2] or not write):
            return found[1]  # type: ignore[return-value]
        if (remote.owner, remote.epoch) != self._identity:
            raise self.refuse(OTHERS)
        entry = self.known.get(remote.region)
        if entry is None:
            # A peer announces a region before it exports a descriptor of it, so a missing announcement is on its way already.
            # Control messages are ordered: it has come when the answer comes.
            number = self._questions.number()
            self._questions.ask(asking, self._send, SYNC, number, lambda: remote.region in self.known)
            entry = self.known.get(remote.region)
        right = READ_ONLY if write and entry is not None and not entry[4] else ""
        why = barrier(remote.region, remote.key, remote.offset, remote.nbytes, entry and entry[1:3], right)
        if why or entry is None:
            raise self.refuse(why)
        place = entry[0] + remote.offset, entry[3]
        if remote.region not in self._foreign:  # segments stay for the channel's life, so the answer holds as long
            remote.resolved = (self, place, write)  # type: ignore[assignment]
        return place

    def stays(self, remote: RemoteRegion) -> bool:
        """Whether that region stays for the channel's life."""
        return remote.region not in self._foreign

    def use(self, user: Any, remotes: Iterable[RemoteRegion]) -> None:
        """Have ``user`` revoked if one of these regions is withdrawn. Raises ``RemoteAccessError`` if one was meanwhile."""
        with self._lock:
            for remote in remotes:
                if (users := self._foreign.get(remote.region)) is not None:
                    users.add(user)
                elif remote.nbytes and remote.region not in self.known:
                    raise self.refuse(f"region {remote.region} is not registered (any more)")

    def announce(self, message: Message) -> None:
        """The peer has registered a region."""
        writable = message.kind != SEGMENT
        with self._lock:
            self.known[message.number] = (message.address, message.nbytes, message.key, message.rkey, writable)
            if message.kind == REGION:
                self._foreign[message.number] = weakref.WeakSet()
        self._questions.news()

    def withdraw(self, number: int) -> int:
        """Take a withdrawn region out: nothing is posted for it any more. Returns the number of the last post that may still
        touch it."""
        with self._lock:
            self.known.pop(number, None)
            users = list(self._foreign.pop(number, ()))
        why = f"region {number} is not registered (any more)"
        return max((user.revoke(why) for user in users), default=0)


class Registrations:
    """The memory regions of one device. Any thread. Close it before its context."""

    def __init__(self, context: Context, memory: Memory, lock: threading.RLock) -> None:
        """``lock``: the device's lock. The device enters new channels under it too, so that each channel is told of every
        region: when it connects, or when the region is registered."""
        self._context, self.memory, self._lock = context, memory, lock
        self.arena = memory.arena
        self.gpu_kind = driver.kind()
        """The type of the GPUs whose memory can be copied; empty: there are none."""
        self._regions: dict[int, MemoryRegion] = {}
        self._gpu: GpuMemory | None = None
        self.shared: dict[int, tuple[torch.Tensor, int]] = {}
        """The GPU memory, by number: what peers may touch, and the key."""

    # -- for peers

    def segment(self, segment: Segment) -> Message | None:
        """Register a segment of the arena. Returns ``None`` if it is registered already."""
        with self._lock:
            if segment.number in self._regions:
                return None
            access = REMOTE_READ if segment.pool.access == READ else REMOTE_WRITE
            region = self._regions[segment.number] = self._context.register(segment.address, segment.nbytes, access)
            return _of_segment(segment, region)

    def foreign(self, number: int, key: int, address: int, nbytes: int) -> Message:
        """Register memory from elsewhere."""
        region = self._regions[number] = self._context.register(address, nbytes, REMOTE_WRITE)
        return Message(REGION, number, key, address, nbytes, region.rkey)

    def share(self, tensor: torch.Tensor, region: MemoryRegion) -> Message:
        """Open GPU memory that is registered to peers. Call it with the lock held."""
        number, key = self.memory.take_number()
        self._regions[number], self.shared[number] = region, (tensor, key)
        return Message(REGION, number, key, region.address, tensor.nbytes, region.rkey)

    def forget(self, number: int) -> None:
        """Deregister it."""
        with self._lock:
            region = self._regions.pop(number, None)
        if region is not None:
            region.close()

    def announcements(self, own: Pool | None) -> Iterator[Message]:
        """The announcements for a new peer whose own pool is ``own``. Call it with the lock held."""
        segments, foreign = self.memory.registered(own)
        for number, region in self._regions.items():
            if (segment := segments.get(number)) is not None:
                yield _of_segment(segment, region)
            elif (entry := foreign.get(number)) is not None:
                yield Message(REGION, number, entry.key, entry.address, entry.nbytes, region.rkey)
            elif (shared := self.shared.get(number)) is not None:
                tensor, key = shared
                yield Message(REGION, number, key, region.address, tensor.nbytes, region.rkey)

    # -- for ourselves

    def lkey(self, address: int, nbytes: int) -> int | None:
        """The key of local memory that is registered for as long as it is held: the arena's."""
        found = self.arena.find(address, nbytes)
        return self._regions[found[0].number].lkey if found is not None else None

    def local(self, address: int, nbytes: int) -> MemoryRegion:
        """Register memory for our own posts only; the caller closes it."""
        self.memory.count("registrations")
        return self._context.register(address, nbytes, LOCAL)

    # -- GPUs

    @property
    def gpu(self) -> GpuMemory:
        """The registered GPU memory. Raises ``NotSupported`` where no GPU driver is installed."""
        with self._lock:
            if self._gpu is None:
                arena = self.memory.gpu
                self._gpu = GpuMemory(self._context, self.memory.count, arena.pins if isinstance(arena, GpuArena) else None)
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


def _of_segment(segment: Segment, region: MemoryRegion) -> Message:
    kind = SEGMENT if segment.pool.access == READ else LANDING
    return Message(kind, segment.number, segment.key, segment.address, segment.nbytes, region.rkey)
