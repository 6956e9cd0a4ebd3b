"""The connection between two processes of one host: the peer's segments are mapped here, a WRITE is one memcpy.

Each end owns an *inbox* (a memfd that the peer maps too): ``+0 closed`` (written by the owner), ``+64 inflight`` (written
by the peer), then the notification records. The invariants are those of ``kernels``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from . import cma, kernels
from .channel import DONE, Channel, Local, Mapped, Pair, Transfer, Window, Work, check_notify, sort_pair
from .errors import NotSupported, PeerLost, RdmaError, RemoteAccessError, TransferTimeout, fresh, kept
from .guard import broken_by
from .handed import credentials, received
from .heartbeat import goodbye
from .mapping import address_of, mapped
from .questions import Questions
from .records import MAX_NOTIFY, RECORD_BYTES
from .region import LENT, RemoteRegion, local_bytes

if TYPE_CHECKING:
    from .arena import Segment
    from .shm import ShmDevice

RECORDS_AT = 4096
INBOX_BYTES = RECORDS_AT + MAX_NOTIFY * RECORD_BYTES
CLOSED_AT, INFLIGHT_AT = 0, 64

# Control messages on the Unix socket, all of one size; SEGMENT (may be read) and LANDING (and written) carry a file descriptor.
MESSAGE = struct.Struct("<BQQQQ")
SEGMENT, REGION, GONE, GONE_ACK, SYNC, SYNC_ACK, BYE = range(1, 8)
LANDING = 10  # after those of cuda_channel
# The number of a BYE says why (``heartbeat.GOODBYES``).
CLOSED, SILENT, BROKEN = range(3)
_SEND_TIMEOUT = 5.0
_LAST_WORDS = 1000
"""Messages that are read at most when the peer takes none any more."""
_LAST_COPY_NS = 200_000_000
_LOOK_NS = 50_000_000


def runs(pid: int) -> bool:
    """Whether a process has not ended: it may be stopped."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:
        return os.path.exists(f"/proc/{pid}")
    try:
        return not select.select([fd], [], [], 0)[0]
    finally:
        os.close(fd)


_NOTHING = torch.empty(0, dtype=torch.uint8)


class _Armed:
    """A work request block, which the channel disarms when it ends. Does not keep the channel."""

    __slots__ = ("__weakref__", "_address", "_block")

    def __init__(self, channel: ShmChannel, imm: int | None, copies: Sequence[tuple[int, int, int]]) -> None:
        block = np.zeros(kernels.WR_HEAD + 3 * len(copies), np.int64)
        block[kernels.WR_COUNT] = len(copies)
        if imm is not None:
            block[kernels.WR_RECORD] = channel.peer_inbox + RECORDS_AT + imm * RECORD_BYTES
        block[kernels.WR_BELLS] = channel.peer_bells
        block[kernels.WR_CLOSED] = channel.peer_inbox + CLOSED_AT
        block[kernels.WR_INFLIGHT] = channel.peer_inbox + INFLIGHT_AT
        block[kernels.WR_STATS] = channel.stats.ctypes.data
        block[kernels.WR_BYTES] = sum(nbytes for _, _, nbytes in copies)
        for at, copy in enumerate(copies):
            block[kernels.WR_HEAD + 3 * at : kernels.WR_HEAD + 3 * at + 3] = copy
        self._block, self._address = block, block.ctypes.data
        channel._arm(self)

    def disarm(self) -> None:
        kernels.store(self._address + 8 * kernels.WR_INFLIGHT, 0)


class _Closable(_Armed):
    """One that somebody uses apart from its channel, whose memory it needs."""

    __slots__ = ("_channel",)

    def __init__(self, channel: ShmChannel, imm: int | None, copies: Sequence[tuple[int, int, int]]) -> None:
        self._channel = channel
        super().__init__(channel, imm, copies)


class ShmTransfer(_Closable, Transfer):
    """All remote sides are mapped: posting is one kernel call, complete when it returns."""

    __slots__ = ("_sides",)

    def __init__(self, channel: ShmChannel, sides: list[tuple[int, torch.Tensor, bool]], imm: int | None) -> None:
        self._sides = sides
        copies = []
        for address, tensor, write in sides:
            local, nbytes = local_bytes(tensor)
            copies.append((address, local, nbytes) if write else (local, address, nbytes))
        super().__init__(channel, imm, copies)

    def post(self) -> Work:
        if kernels.post(self._address) != kernels.OK:
            raise self._channel._ended()
        return DONE

    def rebind(self, index: int, tensor: torch.Tensor) -> None:
        address, nbytes = local_bytes(tensor)
        remote, _, write = self._sides[index]
        at = kernels.WR_HEAD + 3 * index
        if nbytes != self._block[at + 2]:
            raise ValueError(f"copy {index} was prepared for {self._block[at + 2]} bytes, got {nbytes}")
        self._sides[index] = (remote, tensor, write)
        self._block[at + (1 if write else 0)] = address

    def unbind(self, index: int) -> None:
        remote, _, write = self._sides[index]
        self._sides[index] = (remote, _NOTHING, write)


class CmaTransfer(Transfer):
    """Some remote side is memory of the peer that cannot be mapped: copied by the kernel, one call a pair."""

    __slots__ = ("__weakref__", "_channel", "_imm", "_pairs")

    def __init__(self, channel: ShmChannel, pairs: list[tuple[RemoteRegion, torch.Tensor, bool]], imm: int | None) -> None:
        self._channel, self._pairs, self._imm = channel, pairs, imm

    def post(self) -> Work:
        channel = self._channel
        channel.check()
        for remote, tensor, write in self._pairs:
            local, nbytes = local_bytes(tensor)
            # The lock keeps the owner's deregistration waiting until the copy is over; the count, its abort. Within, nothing
            # waits for the peer: the thread that hears its answer may itself wait for this lock.
            with channel.cma_lock:
                address, mapped = channel.resolve(remote, write=write, heard=True)
                kernels.add(channel.peer_inbox + INFLIGHT_AT, 1)
                try:
                    if kernels.load(channel.peer_inbox + CLOSED_AT):
                        raise channel._ended()
                    if mapped:
                        kernels.copy(*((address, local) if write else (local, address)), nbytes)
                    elif nbytes:
                        self._attached(local, address, nbytes, write=write)
                finally:
                    kernels.add(channel.peer_inbox + INFLIGHT_AT, -1)
            kernels.add(channel.stats.ctypes.data, 1)
            kernels.add(channel.stats.ctypes.data + 8, nbytes)
        if self._imm is not None:
            channel.notify(self._imm)
        return DONE

    def _attached(self, local: int, remote: int, nbytes: int, *, write: bool) -> None:
        channel = self._channel
        try:
            cma.transfer(channel.pid, local, remote, nbytes, write=write)
        except RdmaError as error:  # it knows of a process, not of a peer
            raise broken_by(error, "copying", peer=channel.peer, device=channel.device.name) from None

    def rebind(self, index: int, tensor: torch.Tensor) -> None:
        remote, _, write = self._pairs[index]
        if local_bytes(tensor)[1] != remote.nbytes:
            raise ValueError(f"copy {index} was prepared for {remote.nbytes} bytes")
        self._pairs[index] = (remote, tensor, write)

    def unbind(self, index: int) -> None:
        remote, _, write = self._pairs[index]
        self._pairs[index] = (remote, _NOTHING, write)


class ShmWindow(_Closable, Window):
    __slots__ = ("_local", "_remote", "_tensor")

    def __init__(self, channel: ShmChannel, remote: int, local: torch.Tensor, imm: int) -> None:
        super().__init__(channel, imm, ())
        self._remote, self._local, self._tensor = remote, local.data_ptr(), local

    def put(self, offset: int, nbytes: int) -> None:
        if kernels.put(self._address, self._remote + offset, self._local + offset, nbytes) != kernels.OK:
            raise self._channel._ended()

    put_now = put  # nothing is queued here


class ShmMapped(_Closable, Mapped):
    """A piece of the peer's arena, which is mapped here anyway."""

    __slots__ = ("_inflight", "memory", "whole")

    def __init__(self, channel: ShmChannel, whole: memoryview, start: int, nbytes: int) -> None:
        super().__init__(channel, None, ())
        self.whole, self.memory, self._inflight = whole, whole[start : start + nbytes], 0

    def begin(self) -> None:
        self._inflight = kernels.enter(self._address)
        if self._inflight == 0:
            raise self._channel._ended()

    def end(self) -> None:
        kernels.add(self._inflight, -1)


class _Adoption(weakref.ref):
    """Watches adopted memory: its end is told to the peer."""

    __slots__ = ("channel", "release")
    channel: ShmChannel
    release: int


def _disown(adoption: _Adoption) -> None:
    # Runs in finalizers of any thread: no lock, one store. The word is kept for it even after the channel has ended.
    channel = adoption.channel
    channel._adoptions.pop(id(adoption), None)
    if os.getpid() == channel.device.pid:  # a forked child's copies mean nothing
        kernels.store(adoption.release, 0)


class ShmChannel(Channel):
    device: ShmDevice
    can_adopt = True

    def __init__(
        self,
        device: ShmDevice,
        sock: socket.socket,
        inbox: mmap.mmap,
        peer_inbox: mmap.mmap,
        peer_bells: mmap.mmap,
        identity: tuple[int, int, int],
        hello: bytes,
    ) -> None:
        super().__init__(device)
        self.sock = sock
        self.pid, _ = credentials(sock)
        self.peer, self.peer_hello = f"process {self.pid}", hello
        self.peer_uid, self.peer_epoch, probe = identity
        self.no_cma = cma.why_not(self.pid, probe)
        self._keep = (inbox, peer_inbox, peer_bells)
        self.inbox, self.peer_inbox, self.peer_bells = map(address_of, self._keep)
        self.stats = np.zeros(3, np.int64)  # posts, bytes, and the advice of kernels._move
        self.cma_lock = threading.Lock()
        self._mapped: dict[int, tuple[int, int, int]] = {}  # number -> (our address, bytes, key)
        self._foreign: dict[int, tuple[int, int, int]] = {}  # number -> (their address, bytes, key)
        self._read_only: set[int] = set()  # numbers of what is mapped for reading
        self._maps: dict[int, memoryview] = {}
        self._adoptions: dict[int, _Adoption] = {}
        self._users: weakref.WeakSet[_Armed] = weakref.WeakSet()
        self._send_lock = threading.Lock()
        self._questions = Questions()
        self._end_lock = threading.Lock()
        self.socket_open = True
        self.broke = self.told = False
        self._beats, self._silence = -1, 0.0
        self._single = _Armed(self, None, ())

    def admit(self, segment: Segment) -> None:
        """Tell the peer of a segment that it may reach."""
        kind = LANDING if segment.pool.admits(self.own_pool, write=True) else SEGMENT
        self.send(kind, segment.number, segment.key, 0, segment.nbytes, segment.fd)

    # -- copies

    def prepare(self, pairs: Sequence[Pair], *, notify: int | None = None) -> Transfer:
        self.check()
        check_notify(notify)
        sides, sorted_pairs, all_mapped = [], [], True
        for dst, src in pairs:
            remote, tensor, write = sort_pair(dst, src)
            address, mapped = self.resolve(remote, write=write)
            if not mapped and self.no_cma:
                raise NotSupported(f"the remote memory is not in an arena, and: {self.no_cma}", peer=self.peer)
            all_mapped &= mapped
            sorted_pairs.append((remote, tensor, write))
            sides.append((address, tensor, write))
        return ShmTransfer(self, sides, notify) if all_mapped else CmaTransfer(self, sorted_pairs, notify)

    def memcpy(self, dst: Local | RemoteRegion, src: Local | RemoteRegion, *, notify: int | None = None) -> Work:
        remote, tensor, write = sort_pair(dst, src)
        known = remote.resolved
        if known is not None and known[0] is self and (known[2] or not write):
            address = known[1]
        else:
            address, mapped = self.resolve(remote, write=write)
            if not mapped:
                return self.prepare([(dst, src)], notify=notify).post()
            # Segments stay mapped for the channel's life, so the answer holds as long.
            remote.resolved = (self, address, write)
        if notify is not None:
            return self.prepare([(dst, src)], notify=notify).post()
        local = tensor.data_ptr()
        if kernels.put(self._single._address, *((address, local) if write else (local, address)), remote.nbytes):
            raise self._ended()
        return DONE

    def window(self, remote: RemoteRegion, local: torch.Tensor, *, notify: int) -> Window:
        self.check()
        check_notify(notify)
        remote, local, _ = sort_pair(remote, local)
        address, mapped = self.resolve(remote, write=True)
        if not mapped:
            raise NotSupported("a window needs memory of the peer's arena", peer=self.peer, device=self.device.name)
        return ShmWindow(self, address, local, notify)

    def adopt(self, remote: RemoteRegion, release: RemoteRegion) -> torch.Tensor:
        known = remote.resolved
        if known is None or known[0] is not self or release.resolved is None:
            (address, mapped), (word, word_mapped) = (self.resolve(place, write=True) for place in (remote, release))
            if not mapped or not word_mapped or release.nbytes != 8 or word % 8:
                raise self._refuse("only arena memory can be handed over")
            remote.resolved, release.resolved = (self, address, True), (self, word, True)
        assert release.resolved is not None
        view = self._maps[remote.region][remote.offset : remote.offset + remote.nbytes]
        adoption = _Adoption(view, _disown)
        adoption.channel, adoption.release = self, release.resolved[1]
        self._adoptions[id(adoption)] = adoption
        # The storage holds ``view``, and that the mapping.
        return torch.frombuffer(view, dtype=torch.uint8)

    def map(self, remote: RemoteRegion) -> ShmMapped | None:
        _, mapped = self.resolve(remote, write=True)
        if not mapped or remote.nbytes == 0:
            return None
        return ShmMapped(self, self._maps[remote.region], remote.offset, remote.nbytes)

    def peer_ended(self) -> bool:
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True

    def record(self, imm: int) -> int:
        check_notify(imm)
        return self.inbox + RECORDS_AT + imm * RECORD_BYTES

    def resolve(self, remote: RemoteRegion, *, write: bool = False, heard: bool = False) -> tuple[int, bool]:
        """Address of a remote range and whether it is one of ours (mapped) or one of the peer's. ``RemoteAccessError``. May
        wait for the peer, unless the region was ``heard`` of before."""
        if remote.nbytes == 0:
            return 0, True
        if remote.owner != self.peer_uid or remote.epoch != self.peer_epoch:
            raise self._refuse("the descriptor was exported by another device, or in an earlier life of this one")
        if remote.region == LENT:
            if write:
                raise self._refuse("memory that was lent is for reading only")
            return remote.offset, False
        table, entry = self._look_up(remote.region)
        if entry is None and not heard:
            self._hear_of(remote.region)
            table, entry = self._look_up(remote.region)
        if entry is None:
            raise self._refuse(f"region {remote.region} is not registered (any more)")
        if write and remote.region in self._read_only:
            raise self._refuse(f"region {remote.region} may only be read")
        return self._inside(remote, entry) + remote.offset, table is self._mapped

    def _inside(self, remote: RemoteRegion, entry: tuple[int, int, int]) -> int:
        """The address of the region that ``remote`` has the key for and lies in."""
        address, nbytes, key = entry
        if key != remote.key:
            raise self._refuse(f"wrong key for region {remote.region}")
        if remote.offset + remote.nbytes > nbytes:
            raise self._refuse(f"bytes {remote.offset}:{remote.offset + remote.nbytes} of a region of {nbytes} bytes")
        return address

    def _look_up(self, number: int) -> tuple[dict[int, tuple[int, int, int]], tuple[int, int, int] | None]:
        table = self._mapped if number in self._mapped else self._foreign
        return table, table.get(number)

    def _refuse(self, why: str) -> RemoteAccessError:
        return RemoteAccessError(why, peer=self.peer, device=self.device.name, status="REM_ACCESS_ERR")

    def totals(self) -> tuple[int, int]:
        return int(self.stats[0]), int(self.stats[1])

    # -- control messages

    def send(self, kind: int, number: int = 0, key: int = 0, address: int = 0, nbytes: int = 0, fd: int = -1) -> None:
        """One control message. Raises ``PeerLost`` if the peer is gone or has not read for seconds."""
        payload = MESSAGE.pack(kind, number, key, address, nbytes)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))] if fd >= 0 else []
        with self._send_lock:
            while True:
                try:
                    self.sock.sendmsg([payload], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                    return
                except BlockingIOError:
                    if not select.select([], [self.sock], [], _SEND_TIMEOUT)[1]:
                        raise PeerLost("the peer does not read its control messages", peer=self.peer) from None
                except OSError as error:
                    broken = PeerLost(f"the connection broke: {error}", peer=self.peer, device="shm", status="BROKEN")
                    break
        # Perhaps the peer has said why it takes nothing any more, and nobody has heard it yet.
        with contextlib.suppress(OSError, RdmaError):
            for _ in range(_LAST_WORDS):
                if self.error is not None or not self.receive():
                    break
        raise fresh(self.error) if isinstance(self.error, PeerLost) else broken

    def _hear_of(self, region: int) -> None:
        """Wait until that region has been announced, or never will be. Announcements leave before any descriptor that names
        them, so one that is missing is on its way, and needs nothing of the peer any more. They are ordered: after the peer's
        answer we know all that it knew."""
        questions = self._questions
        questions.ask(self, self.send, SYNC, questions.number(), lambda: self._look_up(region)[1] is not None)

    def withdraw(self, number: int) -> None:
        """Tell the peer that a region is gone; returns when no copy of theirs on it is under way."""
        self._questions.ask(self, self.send, GONE, number)

    def receive(self) -> bool:
        """Handle one control message (device's service thread). ``False`` when the connection has ended."""
        try:
            with received(self.sock, MESSAGE.size, 1, socket.MSG_DONTWAIT) as (data, fds):
                if len(data) == MESSAGE.size:
                    return self._heed(data, fds)
        except BlockingIOError:
            return True
        except ConnectionError:
            return True  # told once, and before what the peer said last
        except OSError:
            if self.socket_open:
                raise
            return False  # another thread has just closed it
        self.lose(PeerLost("the peer's process ended", peer=self.peer, device="shm", status="EOF"))
        return False

    def _heed(self, data: bytes, fds: list[int]) -> bool:
        kind, number, key, address, nbytes = MESSAGE.unpack(data)
        if kind in (SEGMENT, LANDING):
            self._map(fds, number, key, nbytes, writable=kind == LANDING)
            self._questions.news()
        elif kind == REGION:
            self._foreign[number] = (address, nbytes, key)
            self._questions.news()
        elif kind == GONE:
            self._gone(number)
        elif kind == SYNC:
            self.send(SYNC_ACK, number)
        elif kind in (GONE_ACK, SYNC_ACK):
            self._questions.answer(kind, number)
        elif kind == BYE:
            status, why = goodbye(number)
            self.lose(PeerLost(why, peer=self.peer, device="shm", status=status))
            return False
        else:
            self._hear_more(kind, number, key, address, nbytes, fds)
        return True

    def _map(self, fds: list[int], number: int, key: int, nbytes: int, *, writable: bool) -> None:
        if number in self._mapped:  # a segment may be told twice
            return
        if not fds:
            raise PeerLost("the peer told of memory without handing it over", peer=self.peer, device="shm", status="PROTOCOL")
        memory = mapped(fds[0], nbytes, writable=writable)
        if not writable:
            self._read_only.add(number)
        self._maps[number] = memoryview(memory)
        self._mapped[number] = (address_of(memory), nbytes, key)

    def _gone(self, number: int) -> None:
        """A region of the peer is to be used no more: answer when no copy of ours on it is under way."""
        with self.cma_lock:
            self._foreign.pop(number, None)
        self.send(GONE_ACK, number)

    def _hear_more(self, kind: int, number: int, key: int, address: int, nbytes: int, fds: list[int]) -> None:
        """What a peer with GPUs tells besides, and is not for us (``cuda_channel``)."""

    # -- the end

    def _arm(self, user: _Armed) -> None:
        with self._end_lock:
            if self.error is not None:
                user.disarm()
            self._users.add(user)

    def _ended(self) -> RdmaError:
        # The peer closes its inbox a moment before its goodbye reaches us.
        if self.error is not None:
            return fresh(self.error)
        return PeerLost("the peer closed the channel", peer=self.peer, device="shm", status="CLOSED")

    def end(self, error: RdmaError) -> bool:
        """Make every use of this channel fail with ``error`` from now on. ``False`` if it had ended before."""
        with self._end_lock:
            if self.error is not None:
                return False
            self.error = kept(error)
            users = list(self._users)
        for user in users:
            user.disarm()
        self._questions.news()
        return True

    def forked(self, error: RdmaError) -> None:
        super().forked(error)
        for user in list(self._users):
            user.disarm()

    def lose(self, error: RdmaError) -> None:
        """``end``, not because somebody here wanted it."""
        if self.end(error):
            self.broke = True
            kernels.store(self.inbox + CLOSED_AT, 1)

    def look(self, seconds: float) -> float:
        """How long (s) the peer's heart has stood still, as far as looks tell; this one counts for ``seconds``."""
        beats = kernels.load(self.peer_bells)
        self._silence = self._silence + seconds if beats == self._beats else 0.0
        self._beats = beats
        return self._silence

    def give_up(self, error: RdmaError, why: int) -> None:
        """End a channel, and say goodbye for that reason: a peer that does not run finds it when it runs again."""
        self.lose(error)
        try:
            self.sock.send(MESSAGE.pack(BYE, why, 0, 0, 0), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            pass  # it finds the end of the stream

    @property
    def peer_copies(self) -> bool:
        return kernels.load(self.inbox + INFLIGHT_AT) > 0 and runs(self.pid)

    def abort(self, timeout: float = 5.0) -> None:
        if os.getpid() != self.device.pid:
            return
        self.end(PeerLost("the channel was aborted", peer=self.peer, device="shm", status="ABORTED"))
        kernels.store(self.inbox + CLOSED_AT, 1)
        limit = int(timeout * 1e9)
        with self.cma_lock:
            done = kernels.quiesce(self.peer_inbox + INFLIGHT_AT, limit), self._quiesce_peer(limit)
        alive = os.path.exists(f"/proc/{self.pid}")
        self.close()
        if any(result != kernels.OK for result in done) and alive:
            raise TransferTimeout("the peer is stopped in the middle of a copy into our memory", peer=self.peer, device="shm")

    def _quiesce_peer(self, limit_ns: int) -> int:
        """As ``kernels.quiesce``, of the peer's copies: one that has ended in the middle of a copy makes none."""
        for _ in range(limit_ns // _LOOK_NS):
            if kernels.quiesce(self.inbox + INFLIGHT_AT, _LOOK_NS) == kernels.OK or not runs(self.pid):
                return kernels.OK
        return kernels.quiesce(self.inbox + INFLIGHT_AT, limit_ns % _LOOK_NS)

    def close(self) -> None:
        if os.getpid() != self.device.pid:
            return
        self.end(PeerLost("the channel was closed here", peer=self.peer, device="shm", status="CLOSED"))
        kernels.store(self.inbox + CLOSED_AT, 1)
        with self._end_lock:
            if not self.socket_open:
                return
            self.socket_open = False
        # A copy of the peer that is just running may finish: the memory it goes to is ours to reuse after this.
        kernels.quiesce(self.inbox + INFLIGHT_AT, _LAST_COPY_NS)
        try:
            self.send(BYE)
        except PeerLost:
            pass
        self.device.forget(self)
