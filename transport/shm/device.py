"""The ``shm`` device: processes of one host.

Segments are memfds, handed to each peer over an abstract Unix socket and mapped there: nothing has a name in a file system,
so nothing is left behind however a process ends. The socket stays open as the detector of the peer's death.

Threads: one service thread (accepting, announcements, end of peers, looking after their heartbeats), one that beats
(``peers/heartbeat``), and one short-lived thread per incoming connection during its handshake, so that a silent stranger blocks
nobody.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from ..channel import Channel
from ..device import DeviceOptions, host_id
from ..errors import NotSupported, PeerLost, RdmaError
from ..listening import MAX_HELLO, ListeningDevice
from ..memory.arena import Segment
from ..memory.mapping import mapped, memfd, why_not
from ..peers.guard import naming, processors
from ..peers.heartbeat import BROKEN, Heart
from ..peers.service import Service
from ..region import LENT, RemoteRegion, local_bytes
from ..words import kernels
from ..words.signals import BELL_BYTES, BELLS
from .channel import LANDING, REGION, SEGMENT, ShmChannel
from .memory import credentials, received
from .transfer import INBOX_BYTES, Inboxes

_PROBE = struct.Struct("<Q")  # address of the probe word
_SETUP = struct.Struct("<QIBI")  # uid, epoch, whether the peer's probe word could be read, length of the hello
_QUEUE_PAUSE_S = 0.005
_USE_TCP = "allow it in the sandbox (seccomp, systemd's RestrictAddressFamilies), or use tcp"


def _same_user(sock: socket.socket) -> bool:
    return credentials(sock)[1] == os.geteuid()


class _Offer(NamedTuple):
    inbox: mmap.mmap
    fd: int
    refused: str
    """Why the kernel does not let us copy from the peer's memory; empty if it does."""


def _try_attach(sock: socket.socket, probe: int) -> str:
    """Why the kernel does not let this process copy from the peer's memory; empty if it does. Both ends try at the same time,
    each a word of the other (``probe``: ours), and tell each other in their setups."""
    sock.sendall(_PROBE.pack(probe))
    theirs = sock.recv(_PROBE.size)
    if len(theirs) != _PROBE.size:
        raise PeerLost("the peer broke off the handshake", device="shm")
    return why_not(credentials(sock)[0], *_PROBE.unpack(theirs))


class ShmDevice(ListeningDevice):
    """Reaches processes of this host. As ``Device``. Peers reach memory outside the arena that was given to ``register`` by
    cross-memory attach (``process_vm_readv`` and ``process_vm_writev``), where the system allows that."""

    kind = "shm"
    channel_type: type[ShmChannel] = ShmChannel
    _others = "use auto, verbs or tcp"

    def __init__(self, options: DeviceOptions) -> None:
        if options.memory is not None and not options.memory.shared:
            raise ValueError("shm needs memory that peers can map: Memory(shared=True)")
        super().__init__(self.kind, options, shared=True)
        self._probe = np.ones(1, np.int64)
        with contextlib.ExitStack() as undo:
            undo.callback(self._give_back)
            with naming("Unix sockets (socket with AF_UNIX)", device=self.kind, hint=_USE_TCP):
                listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                listener.bind(f"\0rdmarpc-{self.uid:016x}")
                listener.listen(128)
            credentials(listener)
            self._heart = Heart(self.bells, listener=listener.fileno())  # bell 0 is no bell: its line is the heartbeat
            undo.callback(self._heart.stop)
            self._attach()
            self._service = Service(self, listener)
            self._service.start()
            undo.pop_all()

    def _attach(self) -> None:
        """Attach the device to its memory, before peers are let in."""
        self.memory.attach(self)  # mapped segments need nothing of ours: peers are told as they come

    @property
    def address(self) -> bytes:
        return f"shm:{host_id()}:{self.uid:016x}".encode()

    def explain(self) -> str:
        cores = len(processors())
        reasons = sorted({channel.peer_memory.no_cma for channel in self.opened()} - {""})
        cma = f"refused ({'; '.join(reasons)})" if reasons else "allowed by every peer so far"
        if refused := [channel.peer for channel in self.opened() if not channel.peer_memory.reaches_us]:
            cma += f"; refused towards us to {', '.join(refused)}: what they read is staged"
        lines = [
            f"shm: memfd segments mapped by peers of this host ({host_id()}), one memcpy a WRITE",
            *(self.memory.explain() if self._own_memory else ()),
            f"  other memory   cross-memory attach: {cma}",
            f"  death          an ended process at once, a stopped one after {self._looks.timeout:g} s",
            f"  waiting        spins up to {kernels.SPIN_MAX_NS // 1000} us, then a futex; {cores} core(s) usable",
        ]
        return "\n".join(lines)

    def lend(self, tensor: torch.Tensor, channel: Channel) -> RemoteRegion:
        if super().can_lend(tensor, channel):
            return super().lend(tensor, channel)
        return RemoteRegion(self.uid, self.epoch, LENT, 0, *local_bytes(tensor))

    def can_lend(self, tensor: torch.Tensor, channel: Channel) -> bool:
        return (isinstance(channel, ShmChannel) and channel.peer_memory.reaches_us) or super().can_lend(tensor, channel)

    # -- connections

    def why_not(self, peer: bytes) -> str:
        fields = peer.decode("ascii", "replace").split(":")
        if len(fields) != 3 or fields[0] != "shm":
            return "an address looks like shm:HOST:ID"
        return "" if fields[1] == host_id() else "the peer is on another host, or in another network namespace"

    def _where(self, peer: str) -> tuple[str, str]:
        uid = peer.split(":")[2]
        return uid, uid

    def _dial(self, where: str, timeout: float) -> socket.socket:
        """Connect to the device with the uid ``where``. Raises ``NotSupported`` if another user listens there."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        deadline = time.monotonic() + timeout
        try:
            while True:
                try:
                    sock.connect(f"\0rdmarpc-{where}")
                    break
                except BlockingIOError:  # too many are waiting to be accepted
                    if time.monotonic() > deadline:
                        raise TimeoutError from None
                    time.sleep(_QUEUE_PAUSE_S)
            if not _same_user(sock):
                why = f"the peer belongs to user {credentials(sock)[1]}, this process to {os.geteuid()}"
                raise NotSupported(why, device="shm", hint="run all workers of a host as one user, or use tcp")
            return sock
        except BaseException as error:
            sock.close()
            if isinstance(error, PermissionError):
                why = f"this system does not let a process connect to another's abstract Unix socket: {error}"
                hint = "SELinux, AppArmor or Landlock forbids it; tcp needs no such socket"
                raise NotSupported(why, peer=where, device="shm", hint=hint) from None
            if isinstance(error, ConnectionRefusedError):
                raise PeerLost("nobody listens there", peer=where, device="shm", status="NOBODY") from None
            raise

    @contextlib.contextmanager
    def _offer(self, sock: socket.socket) -> Iterator[_Offer]:
        refused = _try_attach(sock, self._probe.ctypes.data)
        inbox, fd = memfd("rdmarpc-inbox", INBOX_BYTES)
        try:
            yield _Offer(inbox, fd, refused)
        finally:
            os.close(fd)  # the peer has one

    def _answer(self, sock: socket.socket, ours: _Offer, channel: ShmChannel) -> None:
        with channel.sending:
            super()._answer(sock, ours, channel)

    def _send_setup(self, sock: socket.socket, ours: _Offer, hello: bytes) -> None:
        setup = _SETUP.pack(self.uid, self.epoch, not ours.refused, len(hello))
        socket.send_fds(sock, [setup + hello], [ours.fd, self.memory.bells_fd])

    def _receive_setup(self, sock: socket.socket, ours: _Offer) -> ShmChannel:
        with received(sock, _SETUP.size + MAX_HELLO, 2) as (data, fds):
            if len(data) < _SETUP.size or len(fds) != 2:
                raise PeerLost("the peer broke off the handshake", device="shm")
            uid, epoch, peer_may, _ = _SETUP.unpack_from(data)
            peer_inbox, peer_bells = mapped(fds[0], INBOX_BYTES), mapped(fds[1], BELLS * BELL_BYTES)
        inboxes = Inboxes(ours.inbox, peer_inbox, peer_bells)
        attach = ours.refused, bool(peer_may)
        return self.channel_type(self, sock, inboxes, (uid, epoch), attach, data[_SETUP.size :])

    def _adopt(self, channel: ShmChannel) -> None:
        """Tell the peer of all our memory, then watch the connection."""
        channel.sock.settimeout(None)
        with self._lock:
            if self.closed:  # ``close`` did not see this one
                raise self._closed(channel.peer)
            self._channels.add(channel)
            segments, foreign = self.memory.registered(channel.own_pool)
            for segment in segments.values():
                _admit(channel, segment)
            for number, region in foreign.items():
                channel.send(REGION, number, region.key, region.address, region.nbytes)
            self._introduce(channel)
            self._service.watch(channel.sock, channel)

    # -- announcements

    def _introduce(self, channel: ShmChannel) -> None:
        """Send a new peer the announcements of a subclass. Called with the device's lock held."""

    def announce_segment(self, segment: Segment) -> None:
        for channel in self.opened():
            if segment.pool.admits(channel.own_pool, write=False):
                try:
                    _admit(channel, segment)
                except PeerLost as error:
                    channel.lose(error)

    def announce(self, number: int, key: int, address: int, nbytes: int) -> None:
        for channel in self.opened():
            try:
                if nbytes:
                    channel.send(REGION, number, key, address, nbytes)
                else:
                    channel.withdraw(number)
            except PeerLost as error:
                if nbytes:
                    channel.lose(error)

    # -- on the service thread

    def _look(self, channel: ShmChannel, seconds: float) -> None:
        super()._look(channel, seconds)
        if channel.broke:  # just now, or as somebody sent
            self._finish(channel)

    def _admits(self, sock: socket.socket) -> bool:
        return _same_user(sock)

    def _hear(self, channel: ShmChannel) -> None:
        if not channel.receive():
            self._finish(channel)

    def lost(self, channel: ShmChannel, error: RdmaError, why: int = BROKEN) -> None:
        channel.give_up(error, why)
        self._finish(channel)

    def _finish(self, channel: ShmChannel) -> None:
        """Finish a channel that has ended: stop watching it, and tell ``on_lost`` once if it broke."""
        self.forget(channel)
        with self._lock:
            told, channel.told = channel.told, True
        if channel.broke and not told:
            self.door.lost(channel, self.on_lost)

    def forget(self, channel: ShmChannel) -> None:
        """Stop watching a channel that has ended, and close its socket."""
        with self._lock:
            if not self._service.forget(channel.sock):
                return
            channel.socket_open = False
            channel.sock.close()
            self._retire(channel)


def _admit(channel: ShmChannel, segment: Segment) -> None:
    """Tell the peer of a segment that it may reach."""
    kind = LANDING if segment.pool.admits(channel.own_pool, write=True) else SEGMENT
    channel.send(kind, segment.number, segment.key, 0, segment.nbytes, segment.fd)
