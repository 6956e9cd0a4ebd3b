"""The ``tcp`` device: processes of any host that can reach each other by TCP.

A memory of its own is private; payload travels between the two tensors and the sockets without a copy in between.

Threads: one I/O thread (``peers/service``), which never blocks (a thread that waits reads small frames itself,
``tcp/reader``), one that beats (``peers/heartbeat``), and one short-lived thread per incoming connection during its handshake,
so that a silent stranger blocks nobody.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import struct
from typing import Any

import torch

from ..channel import Channel
from ..device import DeviceOptions
from ..errors import NotSupported, PeerLost, RdmaError
from ..listening import MAX_HELLO, ListeningDevice, prepare
from ..peers.address import interface_address, interfaces, loopback, split_place, where_to_listen
from ..peers.auth import receive_exactly
from ..peers.heartbeat import BROKEN, Heart
from ..peers.service import Service
from ..region import RemoteRegion, local_bytes
from ..words import kernels
from .channel import TcpChannel
from .outbox import BEAT, HEADER

_SETUP = struct.Struct("<QIIQ")  # uid, epoch, length of the hello that follows, peer_timeout in ms


class TcpDevice(ListeningDevice):
    """See ``Device``.

    ``place`` says where to listen: an address or interface name, with or without ``:PORT``. Without it the device listens on
    loopback only if there is no ``secret``, and with a secret on the address by which other hosts reach this one. A device
    without a secret cannot listen anywhere else than on loopback.
    """

    linger_s = 1.0

    def __init__(self, place: str, options: DeviceOptions) -> None:
        super().__init__("tcp", options)
        self._tls = prepare(options.tls, self.secret, "tcp")
        with contextlib.ExitStack() as undo:
            undo.callback(self._give_back)
            listener = undo.enter_context(self._listen(place))
            self._heart = Heart(frame=HEADER.pack(BEAT, 0, 0, 0, 0, 0, 0, 0, 0), listener=listener.fileno())
            undo.callback(self._heart.stop)
            self._service = Service(self, listener)
            self.memory.attach(self)
            self._service.start()
            undo.pop_all()

    def _listen(self, place: str) -> socket.socket:
        host, port = split_place(place)
        self._chosen = "asked for"
        if not host and self.given:
            host, self._chosen = where_to_listen()
            if self._chosen.startswith("?"):
                self._chosen = self._chosen[1:]
                logging.getLogger("rdmarpc").warning("other hosts reach this one at %s, %s", host, self._chosen)
        elif not host:
            host, self._chosen = loopback(), "loopback, because no secret was given"
        host = interface_address(host) or host
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            there = ", ".join(f"{name} ({address})" for name, address in interfaces().items())
            hint = f"interfaces with an address that other hosts reach: {there or 'none'}"
            raise NotSupported(f"no address, or interface with one, {host!r} here: {error}", device="tcp", hint=hint) from None
        why = f"{host!r} has no address"
        for family, _, _, _, where in found:
            try:
                return self._bound(family, where)
            except OSError as error:
                why = f"cannot listen on {where[0]}:{port}: {error}"
        raise NotSupported(why, device="tcp")

    def _bound(self, family: int, where: Any) -> socket.socket:
        at = ipaddress.ip_address(where[0])
        self._loopback = at.is_loopback
        if at.version == 6 and at.is_link_local:
            why = f"tcp on {where[0]}: to other hosts a link-local IPv6 address has a meaning on one of their cables alone"
            raise NotSupported(why, device="tcp", hint="give the interface another address, such as fd00::1, at every worker")
        if not self.given and not self._loopback:
            why = f"tcp on {where[0]} without a secret: nobody elsewhere could know the one that is used then"
            hint = "give every worker the same secret (option secret, or RDMARPC_SECRET), or use tcp://127.0.0.1"
            raise NotSupported(why, device="tcp", hint=hint)
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listener = socket.create_server(where, family=family, backlog=128, dualstack_ipv6=both)
        bound, self._port = listener.getsockname()[:2]
        everywhere = ipaddress.ip_address(bound).is_unspecified
        self._host = where_to_listen(family if family == socket.AF_INET else socket.AF_UNSPEC)[0] if everywhere else bound
        return listener

    @property
    def address(self) -> bytes:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"tcp:{host}:{self._port}:{self.uid:016x}".encode()

    def explain(self) -> str:
        limits = []
        for name in ("tcp_wmem", "tcp_rmem"):
            with contextlib.suppress(OSError), open(f"/proc/sys/net/ipv4/{name}") as file:
                limits.append(f"{name} up to {int(file.read().split()[2]) >> 10} KiB")
        known = "every peer proves the job secret" if self.given else "this user's processes on this host only"
        hidden = self._tls.explain() if self._tls is not None else "none: what travels is not encrypted (option tls)"
        lines = [
            f"tcp: one stream per peer, listening on {self._host}:{self._port} ({self._chosen})",
            f"  authentication {known}",
            f"  encryption     {hidden}",
            f"  buffers        {', '.join(limits) or 'unknown'}",
            f"  death          an ended process at once, a stopped or cut-off one after {self._looks.timeout:g} s",
            *(self.memory.explain() if self._own_memory else ()),
            f"  waiting        spins {kernels.SPIN_MIN_NS // 1000} us, reads the socket; one I/O thread for the rest",
        ]
        return "\n".join(lines)

    # -- connections

    def why_not(self, peer: bytes) -> str:
        fields = peer.decode("ascii", "replace").split(":")
        good = len(fields) >= 4 and fields[0] == "tcp" and fields[-2].isdigit()
        return "" if good else "an address looks like tcp:HOST:PORT:ID"

    def _where(self, peer: str) -> tuple[str, str]:
        where, _, uid = peer.removeprefix("tcp:").rpartition(":")
        return where, uid

    def _send_setup(self, sock: socket.socket, ours: None, hello: bytes) -> None:
        sock.sendall(_SETUP.pack(self.uid, self.epoch, len(hello), int(self._looks.timeout * 1000)) + hello)

    def _receive_setup(self, sock: socket.socket, ours: None) -> TcpChannel:
        uid, epoch, length, patience = _SETUP.unpack(receive_exactly(sock, _SETUP.size))
        if length > MAX_HELLO:
            raise PeerLost("the peer sent an overlong hello", device="tcp", status="PROTOCOL")
        return TcpChannel(self, self._service, sock, (uid, epoch), receive_exactly(sock, length), patience / 1000)

    def _adopt(self, channel: TcpChannel) -> None:
        sock = channel.sock
        sock.setblocking(False)
        # No limits of the system's own (keepalive, TCP_USER_TIMEOUT): they would give up a peer that runs and does not read.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            if self.closed or channel.error is not None:
                raise self._closed(channel.peer)
            self._channels.add(channel)
            self._service.watch(sock, channel)
        channel.start(self._heart)

    # -- memory

    def lend(self, tensor: torch.Tensor, channel: Channel) -> RemoteRegion:
        assert isinstance(channel, TcpChannel)
        return channel.access.lend(tensor)

    def can_lend(self, tensor: torch.Tensor, channel: Channel) -> bool:
        # What this peer may read is looked up when it asks, so it does not matter what the rest of the pool is for.
        address, nbytes = local_bytes(tensor)
        return not nbytes or self.arena.find(address, nbytes) is not None

    def announce(self, number: int, key: int, address: int, nbytes: int) -> None:
        """New memory is told to nobody: every frame is checked against our regions when it comes."""
        if nbytes == 0:
            with self._lock:
                channels = list(self._channels)
            for channel in channels:
                channel.revoke(number)

    # -- on the I/O thread

    def _hear(self, channel: TcpChannel) -> None:
        if (error := channel.reader.receive()) is not None:
            self._finish(channel, channel.end(error))

    def _flush(self, channel: TcpChannel) -> None:
        channel.outbox.flush()

    def _look(self, channel: TcpChannel, seconds: float) -> None:
        self._hear(channel)  # what a waiting thread was to read; the I/O thread itself has received all that came
        super()._look(channel, seconds)

    def lost(self, channel: TcpChannel, error: RdmaError, why: int = BROKEN) -> None:
        self._finish(channel, channel.end(error, goodbye=why))

    def _finish(self, channel: TcpChannel, broke: bool) -> None:
        """Stop watching a channel that has ended, and tell its loss if it ``broke``, so was not closed here."""
        try:
            with self._lock:
                if not self._service.forget(channel.sock):
                    return
                self._retire(channel)
            channel.release()
        finally:
            if broke:
                self.door.lost(channel, self.on_lost)
