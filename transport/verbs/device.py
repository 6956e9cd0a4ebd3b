"""The ``verbs`` device: InfiniBand and RoCE through libibverbs.

One reliable connected queue pair a peer; one completion queue and one shared receive queue for all of them; one memory region a
segment of the arena. A WRITE with a notification is one WRITE_WITH_IMM, a READ is a READ: the peer's processor takes no part.

Threads: one that serves the control streams (accepting, announcements, end of peers, looking after their heartbeats), one that
sleeps on the completion channel when every waiter does (``Watch``), one that beats (``peers/heartbeat``), and one
short-lived thread per incoming connection during its handshake.

How a lost peer is noticed: the control stream ends when the peer's process ends. A host or link that is gone does not
acknowledge packets, which are sent again for about two seconds; an idle queue pair sends a WRITE of no bytes every half second,
which only the peer's adapter has to acknowledge. A process that is stopped sends no heartbeat.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..device import DeviceOptions
from ..errors import NotSupported, PeerLost, RdmaError, RemoteAccessError, TransferTimeout
from ..listening import ListeningDevice, checked, prepare
from ..memory.arena import PINNED_SEGMENT_BYTES, Segment
from ..nic import packages, ports
from ..nic.libibverbs import LOSES_ALL
from ..nic.native import Context, QueuePair
from ..nic.ports import Endpoint
from ..nic.queues import Queues
from ..notify import Poller
from ..peers.address import loopback
from ..peers.guard import Guard
from ..peers.heartbeat import BROKEN, Heart, often
from ..peers.service import Service
from ..region import Array, Region, as_tensor, local_bytes
from ..tls.options import permit_rdma
from ..words import completions, kernels
from . import control
from .channel import VerbsChannel
from .control import MESSAGE, ControlStream, Message, Setup
from .registrations import Registrations

_TICK_NS = 500_000_000
_SETTLE_S, _RETRY_S, _JOIN_S = 15.0, 0.05, 5.0


class Watch:
    """The thread that sleeps on the completion channel, and takes completions, when every waiter does. It finds what failed,
    heeds asynchronous events, and twice a second has idle connections prove that their peer's adapter is still there. It runs
    from ``start`` to ``stop``. Any thread enters and drops queue pairs."""

    def __init__(self, device: VerbsDevice, context: Context, queues: Queues) -> None:
        self._device: Any
        self._device, self._context, self._queues = device, context, queues
        self._guard: Guard = device.guard
        self._by_qp: dict[int, VerbsChannel] = {}
        self._lock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._complete, name="rdmarpc-completions", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether there is no room for the completions of another queue pair."""
        return len(self._by_qp) >= self._queues.room

    def enter(self, channel: VerbsChannel) -> None:
        """Count the completions of a channel's queue pair from now on."""
        lane = channel.lane
        with self._lock:
            self._by_qp[lane.qp.qp_num] = channel
            completions.enter_lane(self._queues.port, lane.qp.qp_num, lane.address)

    def drop(self, qp_num: int) -> None:
        """Ignore the completions of a queue pair from now on."""
        with self._lock:
            completions.drop_lane(self._queues.port, qp_num)
            self._by_qp.pop(qp_num, None)

    def channels(self) -> set[VerbsChannel]:
        """The entered channels, also those that are still in their handshake."""
        with self._lock:
            return set(self._by_qp.values())

    def wake(self) -> None:
        """Have the thread look for failures now."""
        if not self._stopping:
            self._queues.wake()

    def _complete(self) -> None:
        while not self._stopping:
            try:
                self._tick()
            except BaseException as error:
                self._guard.note(error, "looking at completions")
                time.sleep(_RETRY_S)

    def _tick(self) -> None:
        device = self._device
        if self._queues.wait(_TICK_NS):
            self._look_for_failures()
            while (event := self._context.async_event()) is not None:
                device.count(f"async_{event.lower()}")
                for channel in device.opened() if event in LOSES_ALL else ():  # a device that is gone takes all with it
                    channel.lost(PeerLost(LOSES_ALL[event], peer=channel.peer, device="verbs", status=event))
        for channel in device.opened():
            try:
                channel.tend()
            except BaseException as error:
                device.break_off(channel, error, "keeping a connection alive")
        kernels.progress(self._queues.port)

    def _look_for_failures(self) -> None:
        for channel in self.channels():
            if channel.error is not None or (error := channel.lane.failure()) is None:
                continue
            if not isinstance(error, RemoteAccessError):
                channel.lost(error)
                continue
            try:
                threading.Thread(target=self._settle, args=(channel, error), name="rdmarpc-refused", daemon=True).start()
            except RuntimeError:  # no more threads
                channel.lost(error)

    def _settle(self, channel: VerbsChannel, error: RdmaError) -> None:
        """A process that ends takes its memory from the adapter before its end is heard, on a busy host long before: that is no
        refusal. So wait for the control stream to tell the two apart: it ends, or beats go on. What one look finds may be older
        than the refusal."""
        limit, alive = time.monotonic() + _SETTLE_S, channel.heard + 2
        while channel.error is None and channel.heard < alive and time.monotonic() < limit:
            time.sleep(0.005)
        channel.lost(error)

    def stop(self) -> None:
        """End the thread; nobody polls the completion queue any more."""
        self._stopping = True
        kernels.store(self._queues.port + 8 * completions.PORT_STOP, 1)
        self._queues.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=_JOIN_S)
        completions.shut(self._queues.port)
        self._device = None


# A packet is sent 4.096 us * 2 ** 16 = 0.27 s apart, seven times. Not 7 retries: Soft-RoCE takes that for endless ones.
_TIMEOUT, _RETRY_CNT = 16, 6


@dataclass
class _Offer:
    """Our part of a handshake."""

    until: float
    """When it has to be over (``time.monotonic``)."""
    hello: bytes | None = None
    """That of the end that connects."""
    pair: tuple[QueuePair, Setup] | None = None
    """Our queue pair, and what the peer is told of it."""
    channel: VerbsChannel | None = None
    answered: bool = False
    """Whether ``on_connect`` may know the channel."""


class VerbsDevice(ListeningDevice):
    """See ``Device``. ``place``: which port (``nic/ports``); empty: the best one."""

    def __init__(self, place: str, options: DeviceOptions) -> None:
        permit_rdma(options.tls)
        self._at = ports.choose(packages.choose(), place)
        self._context = self._at.context
        self.max_msg_sz = self._at.port.max_msg_sz
        super().__init__("verbs", options)
        self._tls = prepare(options.tls, self.secret, "verbs")
        self.arena.segment_bytes = min(self.arena.segment_bytes, PINNED_SEGMENT_BYTES)
        self.local = Registrations(self._context, self.memory, self._lock)
        self.gpu_kind = self.local.gpu_kind
        with contextlib.ExitStack() as undo:
            undo.callback(self._give_back)
            undo.callback(self._context.close)
            undo.callback(self.local.close)
            self._queues = Queues(self._context, self._at.device, self.bells)
            undo.callback(self._queues.close)
            self.port, self.post_send = self._queues.port, self._queues.post_send
            self.watch = Watch(self, self._context, self._queues)
            for segment in self.memory.attach(self):
                self.announce_segment(segment)
            host = self._at.address if self.given else loopback()
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = undo.enter_context(socket.create_server((host, 0), family=family, backlog=128))
            shown, port = f"[{host}]" if ":" in host else host, listener.getsockname()[1]
            self._address = f"verbs:{shown}:{port}:{self.uid:016x}:{self._at.endpoint}".encode()
            self._heart = Heart(frame=MESSAGE.pack(*Message(control.BEAT)), listener=listener.fileno())
            undo.callback(self._heart.stop)
            self.watch.start()
            undo.callback(self.watch.stop)
            self._service = Service(self, listener)
            self._service.start()
            undo.pop_all()

    @property
    def address(self) -> bytes:
        return self._address

    def explain(self) -> str:
        limits, queues = self._at.device, self._queues
        return "\n".join(
            (
                f"verbs: reliable connected queue pairs over {self._at.name}",
                *(f"  {line}" for line in self._at.lines),
                f"  control        {self._tls.explain() if self._tls is not None else 'not encrypted (option tls)'}",
                "  payload        not encrypted: it goes past the processor",
                f"  messages       of up to {self.max_msg_sz} bytes; {queues.sends} a queue pair, {queues.receives} receives",
                f"  adapter        firmware {limits.fw_ver or 'unknown'}; at most {limits.max_mr} memory regions",
                *(self.memory.explain() if self._own_memory else ()),
                *self.local.explain(),
                f"  death          a process at once, a host or link in 2 s, a stopped one after {self._looks.timeout:g} s",
                "  waiting        whoever waits polls the completion queue, then sleeps on its channel",
            )
        )

    # -- memory

    def announce_segment(self, segment: Segment) -> None:
        with self._lock:
            told = self.local.segment(segment)
            channels = [channel for channel in self.opened() if segment.pool.admits(channel.own_pool, write=False)]
        if told is not None:
            self._tell(channels, told)

    def pin(self) -> None:
        self.arena.free(self.arena.allocate(1))

    def forget_segment(self, segment: Segment) -> None:
        self.local.forget(segment.number)

    def announce(self, number: int, key: int, address: int, nbytes: int) -> None:
        if nbytes:
            told = self.local.foreign(number, key, address, nbytes)
            self._tell(self.opened(), told)
            return
        for channel in self.opened():
            try:
                channel.withdraw(number)
            except (PeerLost, TransferTimeout) as error:
                # Deregistering makes it certain: the adapter refuses what still comes. But a GPU's segment stays registered.
                if number in self.local.shared:
                    self.lost(channel, error)
        self.local.forget(number)

    def _on_gpu(self, sizes: tuple[int, ...], dtype: torch.dtype, place: torch.device) -> torch.Tensor:
        """An ordinary tensor, which ``register`` shares."""
        return torch.empty(sizes, dtype=dtype, device=place)

    def register(self, tensor: torch.Tensor | Array) -> Region:
        """As ``Device.register``; also registers GPU memory, for the peers of this device. It returns when the work that the
        current stream was given before the call is done. Raises ``RegistrationError``, with the reasons, where the adapter
        cannot reach the GPU memory."""
        tensor = as_tensor(tensor)
        if tensor.is_cpu:
            return super().register(tensor)
        self.check()
        nbytes = local_bytes(tensor, self.gpu_kind)[1]
        if not nbytes:
            return Region(self, tensor, 0, 0, 0, foreign=False)
        region = self.local.gpu.share(tensor)
        self.local.gpu.wait([tensor.device.index])
        with self._lock:  # a peer that connects now is told once
            told, channels = self.local.share(tensor, region), self.opened()
        self._tell(channels, told)
        self.count("registrations")
        return Region(self, tensor, told.number, told.key, 0, foreign=True)

    def deregister(self, region: Region) -> None:
        """Withdraw a region of GPU memory from the peers. Returns when none of their copies is under way there."""
        if os.getpid() != self.pid:
            return
        number = region.remote.region
        self.announce(number, 0, 0, 0)
        with self._lock:
            self.local.shared.pop(number, None)

    def poller(self) -> Poller:
        return Poller(self.memory, self.port, self.local.arrived)

    def _tell(self, channels: Sequence[VerbsChannel], message: Message) -> None:
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
            return ports.why_not(self._at.endpoint, Endpoint.parse(fields[-1])) or ""
        except RdmaError as error:
            return error.message

    def _where(self, peer: str) -> tuple[str, str]:
        where, uid, _ = peer.removeprefix("verbs:").rsplit(":", 2)
        return where, uid

    @contextlib.contextmanager
    def _offer(self, sock: socket.socket) -> Iterator[_Offer]:
        ours = _Offer(time.monotonic() + (sock.gettimeout() or 0.0))
        try:
            yield ours
        except BaseException as error:
            if ours.channel is None and ours.pair is not None:
                ours.pair[0].close()
            elif ours.channel is not None and not ours.answered:
                why = f"the connection broke as it was made: {error}"
                ours.channel.end(PeerLost(why, peer=ours.channel.peer, device="verbs"))
            raise

    def _pair(self) -> tuple[QueuePair, Setup]:
        """A new queue pair, and the setup to send to the peer. Raises ``NotSupported`` if the completion queue has no room for
        another one."""
        if self.watch.full:
            why = f"the completion queue of {self._at.name} has room for {self._queues.room} queue pairs"
            raise NotSupported(why, device="verbs")
        qp, there, psn = self._queues.pair(self._at.number), self._at.endpoint.dump(), secrets.randbits(24)
        patience_ms = int(self._looks.timeout * 1000)
        return qp, Setup(self.uid, self.epoch, patience_ms, self.max_msg_sz, there, qp.qp_num, psn)

    def _send_setup(self, sock: socket.socket, ours: _Offer, hello: bytes) -> None:
        ours.hello, ours.pair = hello, self._pair()
        control.send_setup(sock, ours.pair[1])

    def _receive_setup(self, sock: socket.socket, ours: _Offer) -> VerbsChannel:
        theirs = control.receive_setup(sock)
        if ours.pair is None:
            try:
                ours.pair = self._pair()
            except RdmaError as error:
                control.send_setup(sock, control.REFUSAL)
                control.send_hello(sock, error.message.encode())
                raise
        qp, setup = ours.pair
        route = ports.route(
            self._at.endpoint,
            Endpoint.load(theirs.endpoint),
            port=self._at.number,
            sgid_index=self._at.gid.index,
            dest_qp_num=theirs.qp_num,
            rq_psn=theirs.psn,
            sq_psn=setup.psn,
            timeout=_TIMEOUT,
            retry_cnt=_RETRY_CNT,
        )
        qp.connect(route)
        host, port = sock.getpeername()[:2]
        channel = ours.channel = VerbsChannel(self, ControlStream(sock, f"{host}:{port}"), qp, theirs)
        self.watch.enter(channel)
        if ours.hello is None:
            control.send_setup(sock, setup)
        else:
            channel.lane.prove(max(ours.until - time.monotonic(), 0.001), channel.ended)
            control.send_hello(sock, ours.hello)
        channel.peer_hello = control.receive_hello(sock)
        return channel

    def _answer(self, sock: socket.socket, ours: _Offer, channel: VerbsChannel) -> None:
        channel.known = ours.answered = True
        # on_connect may publish the channel: what other threads send waits until the answer is out.
        with channel.stream.lock:
            control.send_hello(sock, checked(self.door.greet(channel)))

    def _adopt(self, channel: VerbsChannel) -> None:
        """Tell the peer of all our memory, then watch the connection."""
        stream = channel.stream
        stream.sock.settimeout(None)
        stream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            if self.closed:  # ``close`` did not see this one
                raise self._closed(channel.peer)
            channel.check()  # nor is it watched if it has ended since
            self._channels.add(channel)
            channel.known = True
            for message in self.local.announcements(channel.own_pool):
                stream.send(*message)
            stream.pulse = self._heart.pulse(stream.sock.fileno(), often(channel.patience_ms / 1000))
            self._service.watch(stream.sock, channel)

    # -- for the channels

    def lost(self, channel: VerbsChannel, error: RdmaError, why: int = BROKEN) -> None:
        if channel.error is None and channel.known:
            channel.stream.goodbye(why, 0.0)
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

    # -- the end

    def _shut(self) -> None:
        for channel in self.watch.channels():  # still in their handshake
            channel.end(PeerLost("the device was closed meanwhile", peer=channel.peer, device="verbs", status="CLOSED"))
        super()._shut()
        self.watch.stop()
        self._queues.close()
        self.local.close()
        self._context.close()
