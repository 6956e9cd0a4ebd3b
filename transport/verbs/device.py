"""The ``verbs`` device: InfiniBand and RoCE through libibverbs.

One reliable connected queue pair a peer; one completion queue and one shared receive queue for all of them; one memory region a
segment of the arena. A WRITE with a notification is one WRITE_WITH_IMM, a READ is a READ: the peer's processor takes no part.

Threads: one that serves the control streams (accepting, announcements, end of peers, looking after their heartbeats), one that
sleeps on the completion channel when every waiter does (``verbs/watch``), one that beats (``peers/heartbeat``), and one
short-lived thread per incoming connection during its handshake.

How a lost peer is noticed: the control stream ends when the peer's process ends. A host or link that is gone does not
acknowledge packets, which are sent again for about two seconds; an idle queue pair sends a WRITE of no bytes every half second,
which only the peer's adapter has to acknowledge. A process that is stopped sends no heartbeat.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from functools import partial

import torch

from ..channel import Channel
from ..device import DeviceOptions
from ..errors import NotSupported, PeerLost, RdmaError, TransferTimeout
from ..listening import ListeningDevice
from ..memory.arena import PINNED_SEGMENT_BYTES, Pool, Segment
from ..nic import choice, endpoint, ports
from ..nic.endpoint import Endpoint
from ..nic.provider import QueuePair
from ..nic.queues import Queues
from ..notify import Poller
from ..peers.address import loopback
from ..peers.guard import Guard
from ..peers.handshakes import EXPECTED, SETUP_S, dial
from ..peers.heartbeat import Heart
from ..region import Array, Region, as_tensor, local_bytes
from ..tls.options import permit_rdma
from ..tls.stream import prepare
from ..words import kernels
from . import control
from .channel import VerbsChannel
from .control import MESSAGE, ControlStream, Setup
from .gpu import FlushedPoller
from .pairing import Pairing
from .registrations import Announcement, Registrations
from .watch import Watch

_LINGER_S = 1.0
_BEAT_MIN_S, _BEAT_MAX_S = 0.25, 2.5


class VerbsDevice(ListeningDevice):
    """See ``Device``. ``place``: which port (``nic/ports``); empty: the best one."""

    def __init__(
        self,
        place: str,
        options: DeviceOptions,
    ) -> None:
        permit_rdma(options.tls)
        self._at = ports.choose(choice.choose(), place)
        self._context = self._at.context
        self.max_msg_sz = self._at.port.max_msg_sz
        super().__init__("verbs", options)
        self._tls = prepare(options.tls, self.secret, "verbs")
        self.arena.segment_bytes = min(self.arena.segment_bytes, PINNED_SEGMENT_BYTES)
        self.guard = Guard("rdmarpc-verbs")
        self.local = Registrations(self._context, self.memory, self._lock)
        self.gpu_kind = self.local.gpu_kind
        with contextlib.ExitStack() as undo:
            undo.callback(self._give_back)
            undo.callback(self._context.close)
            undo.callback(self.local.close)
            self._queues = Queues(self._context, self._at.device, self.bells)
            undo.callback(self._queues.close)
            self.port, self.post_send = self._queues.port, self._queues.post_send
            self._watch = Watch(self._context, self._queues, self.guard, opened=self._opened, count=self.count)
            self._pairing = Pairing(self._at, self._queues, self._watch)
            for segment in self.memory.attach(self):
                self.announce_segment(segment)
            host = self._at.address if self.given else loopback()
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = undo.enter_context(socket.create_server((host, 0), family=family, backlog=128))
            shown, port = f"[{host}]" if ":" in host else host, listener.getsockname()[1]
            self._address = f"verbs:{shown}:{port}:{self.uid:016x}:{self._at.endpoint}".encode()
            self._heart = Heart(frame=MESSAGE.pack(control.BEAT, 0, 0, 0, 0, 0))
            undo.callback(self._heart.stop)
            self._watch.start()
            undo.callback(self._watch.stop)
            self._listen_on(listener, self.guard)
            self._service.start()
            undo.pop_all()

    @property
    def address(self) -> bytes:
        return self._address

    def explain(self) -> str:
        limits, limit, queues = self._at.device, f"{self.arena.limit / 2**30:.1f} GiB", self._queues
        return "\n".join(
            (
                f"verbs: reliable connected queue pairs over {self._at.name}",
                *(f"  {line}" for line in self._at.lines),
                f"  control        {self._tls.explain() if self._tls is not None else 'not encrypted (option tls)'}",
                "  payload        not encrypted: it goes past the processor",
                f"  messages       of up to {self.max_msg_sz} bytes; {queues.sends} a queue pair, {queues.receives} receives",
                f"  adapter        firmware {limits.fw_ver or 'unknown'}; at most {limits.max_mr} memory regions",
                f"  arena          {self.arena.used} of {self.arena.capacity} bytes used, limit {limit}",
                *self.local.explain(),
                f"  death          a process at once, a host or link in 2 s, a stopped one after {self._looks.timeout:g} s",
                "  waiting        whoever waits polls the completion queue, then sleeps on its channel",
            )
        )

    # -- memory

    def announce_segment(self, segment: Segment) -> None:
        with self._lock:
            told = self.local.segment(segment)
            channels = [channel for channel in self._opened() if segment.pool.admits(channel.own_pool, write=False)]
        if told is not None:
            self._tell(channels, told)

    def pin(self) -> None:
        self.arena.free(self.arena.allocate(1))

    def forget_segment(self, segment: Segment) -> None:
        self.local.forget(segment.number)

    def announce(self, number: int, key: int, address: int, nbytes: int) -> None:
        if nbytes:
            told = self.local.foreign(number, key, address, nbytes)
            self._tell(self._opened(), told)
            return
        for channel in self._opened():
            try:
                channel.withdraw(number)
            except (PeerLost, TransferTimeout) as error:
                # Deregistering makes it certain: the adapter refuses what still comes. But a GPU's segment stays registered.
                if self.local.is_gpu(number):
                    self.lost(channel, error)
        self.local.forget(number)

    def empty(
        self,
        shape: int | Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        writable: bool = False,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """As for any device; with ``device`` an ordinary tensor on that GPU, which ``register`` shares."""
        if device is None or torch.device(device).type == "cpu":
            return super().empty(shape, dtype=dtype, writable=writable)
        self.check()
        return torch.empty(shape, dtype=dtype, device=device)

    def register(self, tensor: torch.Tensor | Array) -> Region:
        """As ``Device.register``; also registers GPU memory, for the peers of this device. It returns when the work that the
        current stream was given before the call is done. Raises ``RegistrationError``, with the reasons, where the adapter
        cannot reach the GPU memory."""
        if not isinstance(tensor, torch.Tensor):
            tensor = as_tensor(tensor)
        if tensor.is_cpu:
            return super().register(tensor)
        self.check()
        nbytes = local_bytes(tensor, self.gpu_kind)[1]
        if not nbytes:
            return Region(self, tensor, 0, 0, 0, foreign=False)
        region = self.local.on_gpu(tensor)
        with self._lock:  # a peer that connects now is told once
            told, channels = self.local.share(tensor, region), self._opened()
        self._tell(channels, told)
        self.count("registrations")
        return Region(self, tensor, told[1], told[2], 0, foreign=True)

    def deregister(self, region: Region) -> None:
        """Withdraw a region of GPU memory from the peers. Returns when none of their copies is under way there."""
        if os.getpid() != self.pid:
            return
        number = region.remote.region
        self.announce(number, 0, 0, 0)
        self.local.forget_gpu(number)

    def poller(self) -> Poller:
        return FlushedPoller(self.memory, self.port, self.local.arrived)

    def _opened(self) -> list[VerbsChannel]:
        with self._lock:
            return [channel for channel in self._channels if isinstance(channel, VerbsChannel) and channel.error is None]

    def _tell(self, channels: Sequence[VerbsChannel], message: Announcement) -> None:
        for channel in channels:
            try:
                channel.stream.send(*message)
            except PeerLost as error:
                self.lost(channel, error)

    # -- connections

    def why_not(self, peer: bytes) -> str:
        fields = peer.decode("ascii", "replace").split(":")
        if fields[0] != "verbs" or len(fields) < 5 or not fields[-3].isdigit():
            return "an address looks like verbs:HOST:PORT:ID:ENDPOINT"
        try:
            return endpoint.why_not(self._at.endpoint, Endpoint.parse(fields[-1])) or ""
        except RdmaError as error:
            return error.message

    def connect(self, peer: bytes, *, hello: bytes = b"", timeout: float = 5.0, pool: Pool | None = None) -> Channel:
        self.check()
        if why := self.why_not(peer):
            raise NotSupported(f"verbs cannot reach {peer!r}: {why}", device="verbs")
        where, uid, _ = peer.decode("ascii", "replace").removeprefix("verbs:").rsplit(":", 2)
        return self._reach(partial(dial, where, device="verbs"), where, uid, hello=hello, timeout=timeout, pool=pool)

    def _meet(self, sock: socket.socket, key: bytes, hello: bytes, deadline: float, pool: Pool | None) -> VerbsChannel:
        """The initiator's side of the handshake, from the setups on."""
        qp: QueuePair | None = None
        try:
            with self._service.handshakes.limited(sock, deadline):
                qp, ours = self._pairing.offer(self.uid, self.epoch, self._looks.timeout)
                control.send_setup(sock, ours)
                theirs = control.receive_setup(sock)
                self._pairing.connect(qp, ours, theirs)
                channel = self._channel(sock, qp, theirs)
                self.door.know(channel, theirs.uid, key)
                channel.own_pool = pool
                channel.probe.prove(max(deadline - time.monotonic(), 0.001), channel.ended)
                control.send_hello(sock, hello)
                channel.peer_hello = control.receive_hello(sock)
            self._adopt(channel)
        except BaseException:
            sock.close()
            if qp is not None:
                self._watch.drop(qp.qp_num)
                qp.close()
            raise
        return channel

    def _welcome(self, came: socket.socket) -> None:
        """Acceptor's side of the handshake, on its own thread. A bad peer costs only this connection."""
        sock, channel, handshakes = came, None, self._service.handshakes
        qp: QueuePair | None = None
        try:
            sock, key = self._admit(came)
            with handshakes.limited(sock, time.monotonic() + SETUP_S):
                theirs = control.receive_setup(sock)
                try:
                    qp, ours = self._pairing.offer(self.uid, self.epoch, self._looks.timeout)
                except RdmaError as error:
                    control.send_refusal(sock, error.message)
                    raise
                self._pairing.connect(qp, ours, theirs)
                channel = self._channel(sock, qp, theirs)
                self.door.know(channel, theirs.uid, key)
                control.send_setup(sock, ours)
                channel.peer_hello = control.receive_hello(sock)
            channel.known = True
            # on_connect may publish the channel: what other threads send waits until the answer is out.
            with channel.stream.lock:
                control.send_hello(sock, self.door.greet(channel))
            self._adopt(channel)
            self.door.welcomed(channel)
        except BaseException as error:
            self.door.refused(sock, error)
            if channel is not None:
                broken = PeerLost(f"the connection broke as it was made: {error}", peer=channel.peer, device="verbs")
                if channel.end(broken) and channel.known:
                    self.door.lost(channel, self.on_lost)
            elif qp is not None:
                qp.close()
            sock.close()
            if not isinstance(error, (*EXPECTED, ValueError)):
                raise

    def _channel(self, sock: socket.socket, qp: QueuePair, theirs: Setup) -> VerbsChannel:
        host, port = sock.getpeername()[:2]
        channel = VerbsChannel(self, self, self._watch, self.local, ControlStream(sock, f"{host}:{port}"), qp, theirs)
        self._watch.enter(channel)
        return channel

    def _adopt(self, channel: VerbsChannel) -> None:
        """Tell the peer of all our memory, then watch the connection."""
        stream = channel.stream
        stream.sock.settimeout(None)
        stream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        every = min(max(channel.patience_ms / 4000, _BEAT_MIN_S), _BEAT_MAX_S)
        with self._lock:
            if self.closed:  # ``close`` did not see this one
                raise self._closed(channel.peer)
            self._channels.add(channel)
            channel.known = True
            for message in self.local.announcements(channel.own_pool):
                stream.send(*message)
            stream.pulse = self._heart.pulse(stream.sock.fileno(), every)
            self._service.watch(stream.sock, channel)

    # -- for the channels

    def lost(self, channel: VerbsChannel, error: RdmaError) -> None:
        """End a channel that broke, and tell the listener once. The peer is told too, as it may not know yet."""
        if channel.error is None and channel.known:
            channel.stream.goodbye(control.BROKEN, 0.0)
        if channel.end(error) and channel.known:
            self.door.lost(channel, self.on_lost)

    def forget(self, channel: VerbsChannel) -> None:
        """Stop watching a channel that has ended."""
        with self._lock:
            if self._service.forget(channel.stream.sock):
                self._retire(channel)

    # -- on the service thread

    def _hear(self, channel: VerbsChannel) -> None:
        if channel.error is not None:
            return
        try:
            for message in channel.stream.receive():
                channel.hear(message)
        except PeerLost as error:
            # What came by the queue pair before the goodbye counts: it is on the completion queue.
            kernels.progress(self.port)
            self.lost(channel, error if error.status == "EOF" else channel.lane.failure() or error)

    def _look(self, channel: VerbsChannel, seconds: float) -> None:
        """Give the peer up if it has not been heard for too long. Should it ever run again, it finds our goodbye."""
        if channel.error is None and self._looks.too_long(channel.look(seconds)):
            channel.stream.goodbye(control.SILENT, 0.0)
            self.lost(channel, PeerLost(self._looks.text(), peer=channel.peer, device="verbs", status="SILENT"))

    # -- the end

    def _forked(self) -> None:
        for channel in list(self._channels):
            if isinstance(channel, VerbsChannel):
                channel.stream.sock.close()
        self._service.drop()

    def _shut(self) -> None:
        for channel in self._watch.channels():  # still in their handshake
            channel.end(PeerLost("the device was closed meanwhile", peer=channel.peer, device="verbs", status="CLOSED"))
        self._service.stop()
        self._watch.stop()
        if self._tls is not None:
            self._tls.close(_LINGER_S)
        self._heart.stop()
        self._queues.close()
        self.local.close()
        self._context.close()
