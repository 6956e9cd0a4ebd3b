"""The connection between two processes of one host: the peer's segments are mapped here, a WRITE is one memcpy.

Parts: ``transfer`` (what both ends share, and posts), ``memory`` (what of the peer is mapped).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

import torch

from ..channel import DONE, Channel, Local, Pair, Transfer, Window, Work, check_notify, sort_pair
from ..errors import NotSupported, PeerLost, RdmaError, TransferTimeout, fresh, kept
from ..listening import Questions
from ..peers.heartbeat import Beats, goodbye
from ..region import RemoteRegion
from ..words import kernels
from .memory import Attach, PeerMemory, credentials, received
from .transfer import CmaTransfer, Inboxes, ShmMapped, ShmTransfer, ShmWindow, WorkRequest

# Control messages on the Unix socket, all of one size; SEGMENT (may be read) and LANDING (and written) carry a file descriptor.
MESSAGE = struct.Struct("<BQQQQ")
SEGMENT, REGION, GONE, GONE_ACK, SYNC, SYNC_ACK, BYE = range(1, 8)
LANDING = 10  # after those of cuda_channel
# The number of a BYE says why (``heartbeat.goodbye``).
_SEND_TIMEOUT = 5.0
_LAST_WORDS = 1000
"""How many messages are read at most after the peer has stopped taking ours."""
_LAST_COPY_NS = 200_000_000
_LOOK_NS = 50_000_000


def runs(pid: int) -> bool:
    """Whether a process has not ended: it may be stopped. One that is not ours to see (0, in another PID namespace) has not."""
    if pid == 0:
        return True
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except (OSError, AttributeError):  # not every Python has it
        return _answers(pid)
    try:
        return not select.select([fd], [], [], 0)[0]
    finally:
        os.close(fd)


def _answers(pid: int) -> bool:
    """As ``runs``, where a sandbox forbids descriptors of processes. Not by /proc alone: it may be another namespace's, or hide
    processes that may not be traced."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] not in "ZX"
    return True


class ShmChannel(Channel):
    """See the contract in ``channel``. Copies of what is mapped are done when the call returns."""

    device: Any
    """The ``ShmDevice``."""
    can_adopt = True

    def __init__(
        self, device: Any, sock: socket.socket, inboxes: Inboxes, identity: tuple[int, int], attach: Attach, hello: bytes
    ) -> None:
        """``identity``: the peer's uid and epoch."""
        super().__init__(device)
        self.sock, self.inboxes, self.records = sock, inboxes, inboxes.records
        self.pid, _ = credentials(sock)
        self.peer, self.peer_hello = f"process {self.pid or '(of another PID namespace)'}", hello
        self.peer_uid, self.peer_memory = identity[0], PeerMemory(self, *identity, attach)
        self.questions = Questions()
        self.look = Beats(inboxes.peer_bells).look
        self.sending = threading.Lock()
        """Held while a control message is sent, so that messages go out one at a time."""
        self._end_lock = threading.Lock()
        self.socket_open = True
        self.broke = self.told = False
        self._single = WorkRequest(inboxes, None, ())

    # -- copies

    def prepare(self, pairs: Sequence[Pair], *, notify: int | None = None) -> Transfer:
        self.check()
        check_notify(notify)
        sides, sorted_pairs, all_mapped = [], [], True
        for dst, src in pairs:
            remote, tensor, write = sort_pair(dst, src)
            address, mapped = self.resolve(remote, write=write)
            if not mapped and self.peer_memory.no_cma:
                raise NotSupported(f"the remote memory is not in an arena, and: {self.peer_memory.no_cma}", peer=self.peer)
            all_mapped &= mapped
            sorted_pairs.append((remote, tensor, write))
            sides.append((address, tensor, write))
        return ShmTransfer(self, sides, notify) if all_mapped else CmaTransfer(self, sorted_pairs, notify)

    def memcpy(self, dst: Local | RemoteRegion, src: Local | RemoteRegion, *, notify: int | None = None) -> Work:
        if notify is not None:
            return self.prepare([(dst, src)], notify=notify).post()
        remote, tensor, write = sort_pair(dst, src)
        known = remote.resolved
        if known is not None and known[0] is self and (known[2] or not write):
            address = known[1]
        else:
            address, mapped = self.resolve(remote, write=write)
            if not mapped:
                return self.prepare([(dst, src)]).post()
            # Segments stay mapped for the channel's life, so the answer holds as long.
            remote.resolved = (self, address, write)
        local = tensor.data_ptr()
        if kernels.put(self._single.address, *((address, local) if write else (local, address)), remote.nbytes):
            raise self.ended()
        return DONE

    def _window(self, remote: RemoteRegion, local: torch.Tensor, notify: int) -> Window | None:
        address, mapped = self.resolve(remote, write=True)
        return ShmWindow(self, address, local, notify) if mapped else None

    def adopt(self, remote: RemoteRegion, release: RemoteRegion) -> torch.Tensor:
        known = remote.resolved
        if known is None or known[0] is not self or release.resolved is None:
            (address, mapped), (word, word_mapped) = (self.resolve(place, write=True) for place in (remote, release))
            if not mapped or not word_mapped or release.nbytes != 8 or word % 8:
                raise self.peer_memory.refuse("only arena memory can be handed over")
            remote.resolved, release.resolved = (self, address, True), (self, word, True)
        assert release.resolved is not None
        return self.peer_memory.adopt(remote, release.resolved[1])

    def map(self, remote: RemoteRegion) -> ShmMapped | None:
        _, mapped = self.resolve(remote, write=True)
        if not mapped or remote.nbytes == 0:
            return None
        return ShmMapped(self, self.peer_memory.views[remote.region], remote.offset, remote.nbytes)

    def peer_ended(self) -> bool:
        return not runs(self.pid)

    def resolve(self, remote: RemoteRegion, *, write: bool = False) -> tuple[int, bool]:
        """As ``PeerMemory.resolve``; may wait for the peer."""
        return self.peer_memory.resolve(remote, write=write, hear_of=self._hear_of)

    def totals(self) -> tuple[int, int]:
        return self.inboxes.totals()

    # -- control messages

    def send(self, kind: int, number: int = 0, key: int = 0, address: int = 0, nbytes: int = 0, fd: int = -1) -> None:
        """Send a control message. Raises ``PeerLost`` if the peer is gone or has not read for seconds."""
        payload = MESSAGE.pack(kind, number, key, address, nbytes)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))] if fd >= 0 else []
        with self.sending:
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
        known = self.peer_memory.find
        self.questions.ask(self, self.send, SYNC, self.questions.number(), lambda: known(region) is not None)

    def withdraw(self, number: int) -> None:
        """Tell the peer that a region is gone; returns when no copy of theirs on it is under way."""
        self.questions.ask(self, self.send, GONE, number)

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
            self.peer_memory.add_segment(fds, number, key, nbytes, writable=kind == LANDING)
            self.questions.news()
        elif kind == REGION:
            self.peer_memory.foreign[number] = (address, nbytes, key)
            self.questions.news()
        elif kind == GONE:
            self._gone(number)
        elif kind == SYNC:
            self.send(SYNC_ACK, number)
        elif kind in (GONE_ACK, SYNC_ACK):
            self.questions.answer(kind, number)
        elif kind == BYE:
            self.lose(goodbye(number, self.peer, "shm"))
            return False
        else:
            self._hear_more(kind, number, key, address, nbytes, fds)
        return True

    def _gone(self, number: int) -> None:
        """A region of the peer is to be used no more: answer when no copy of ours on it is under way."""
        self.peer_memory.remove_region(number)
        self.send(GONE_ACK, number)

    def _hear_more(self, kind: int, number: int, key: int, address: int, nbytes: int, fds: list[int]) -> None:
        """Handle the announcements of a peer with GPUs, which this device ignores (``cuda/channel`` overrides it)."""

    # -- the end

    def ended(self) -> RdmaError:
        """The reason why the channel has ended. Call it only after the end was found."""
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
        self.inboxes.end()
        self.questions.news()
        return True

    def forked(self, error: RdmaError) -> None:
        super().forked(error)
        self.inboxes.end()

    def lose(self, error: RdmaError) -> None:
        """``end`` a channel that broke, so was not closed here."""
        if self.end(error):
            self.broke = True
            self.inboxes.close()

    def give_up(self, error: RdmaError, why: int) -> None:
        """End a channel, and send a goodbye with the reason ``why``. A peer that is stopped finds it when it runs again."""
        self.lose(error)
        with contextlib.suppress(OSError):  # it finds the end of the stream
            self.sock.send(MESSAGE.pack(BYE, why, 0, 0, 0), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    @property
    def peer_copies(self) -> bool:
        return self.inboxes.peer_copies and runs(self.pid)

    def _abort(self, timeout: float) -> None:
        self.end(PeerLost("the channel was aborted", peer=self.peer, device="shm", status="ABORTED"))
        self.inboxes.close()
        limit = int(timeout * 1e9)
        with self.peer_memory.copying:
            done = self.inboxes.quiesce(limit), _quiesce(self.inboxes, self.pid, limit)
        alive = runs(self.pid)
        self.close()
        if any(result != kernels.OK for result in done) and alive:
            raise TransferTimeout("the peer is stopped in the middle of a copy into our memory", peer=self.peer, device="shm")

    def _close(self) -> None:
        self.end(PeerLost("the channel was closed here", peer=self.peer, device="shm", status="CLOSED"))
        self.inboxes.close()
        with self._end_lock:
            if not self.socket_open:
                return
            self.socket_open = False
        # A copy of the peer that is just running may finish: the memory it goes to is ours to reuse after this.
        self.inboxes.quiesce_peer(_LAST_COPY_NS)
        with contextlib.suppress(PeerLost):
            self.send(BYE)
        self.device.forget(self)


def _quiesce(inboxes: Inboxes, pid: int, limit_ns: int) -> int:
    """As ``Inboxes.quiesce_peer``: a peer that has ended in the middle of a copy makes none."""
    for _ in range(limit_ns // _LOOK_NS):
        if inboxes.quiesce_peer(_LOOK_NS) == kernels.OK or not runs(pid):
            return kernels.OK
    return inboxes.quiesce_peer(limit_ns % _LOOK_NS)
