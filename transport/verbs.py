"""The ``verbs`` device: InfiniBand and RoCE through libibverbs.

One reliable connected queue pair a peer; one completion queue and one shared receive queue for all of them; one memory region a
segment of the arena. A WRITE with a notification is one WRITE_WITH_IMM, a READ is a READ: the peer's processor takes no part.

Threads: one that serves the control streams (accepting, announcements, end of peers, looking after their heartbeats), one that
sleeps on the completion channel when every waiter does (``verbs_kernels``), one that beats (``heartbeat``), and one short-lived
thread per incoming connection during its handshake.

Who is dead: a process that ended ends its control stream; a host or link that is gone does not acknowledge packets, which are
sent again for about two seconds (an idle queue pair sends a WRITE of no bytes every half second, which only the peer's device
has to acknowledge); a process that is stopped does not beat.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial

import torch

from . import cuda_driver, kernels, verbs_choice, verbs_control, verbs_endpoint, verbs_kernels, verbs_ports
from .arena import PINNED_SEGMENT_BYTES, READ, Pool, Segment
from .channel import Channel
from .cuda_arena import GpuArena
from .device import Device, DeviceOptions
from .errors import NotSupported, PeerLost, RdmaError, RemoteAccessError, TransferTimeout
from .guard import Guard, broken_by
from .handshakes import EXPECTED, HANDSHAKE_S, dial, reach
from .heartbeat import Heart
from .notify import Poller
from .region import Region, local_bytes
from .service import Service
from .tls import authenticated, prepare
from .tls_options import permit_rdma
from .verbs_block import LANES, PortBlock
from .verbs_channel import VerbsChannel
from .verbs_control import MESSAGE, ControlStream, Setup
from .verbs_endpoint import Endpoint
from .verbs_gpu import FlushedPoller, GpuMemory
from .verbs_provider import LOCAL, REMOTE_READ, REMOTE_WRITE, MemoryRegion, QueuePair
from .verbs_status import EVENT_MEANINGS

_LINGER_S = 1.0
_TICK_NS = 500_000_000
_SETTLE_S = 3.0
_RETRY_S = 0.05
_BEAT_MIN_S, _BEAT_MAX_S = 0.25, 2.5
_RECEIVES, _SENDS, _COMPLETIONS, _INLINE = 4096, 256, 1 << 16, 220
# A packet is sent 4.096 us * 2 ** 16 = 0.27 s apart, seven times. Not 7 retries: Soft-RoCE takes that for endless ones.
_TIMEOUT, _RETRY_CNT = 16, 6


class VerbsDevice(Device):
    """See ``Device``. ``place``: which port (``verbs_ports``); empty: the best one. ``qps``: queue pairs to each peer that we
    connect to, 1 to 16; from two on large copies do not hold up small ones (``verbs_channel``)."""

    def __init__(
        self,
        place: str,
        options: DeviceOptions,
        *,
        qps: int = 1,
    ) -> None:
        if not 1 <= qps <= verbs_control.MAX_QPS:
            raise ValueError(f"qps is from 1 to {verbs_control.MAX_QPS}, got {qps}")
        permit_rdma(options.tls)
        self._at = verbs_ports.choose(verbs_choice.choose(), place)
        self._context = self._at.context
        self.max_msg_sz = self._at.port.max_msg_sz
        super().__init__("verbs", options)
        self._tls = prepare(options.tls, self.secret, "verbs")
        self.arena.segment_bytes = min(self.arena.segment_bytes, PINNED_SEGMENT_BYTES)
        self._mrs: dict[int, MemoryRegion] = {}
        self.gpu_kind = cuda_driver.kind()
        """The type of the GPUs whose memory can be copied; empty: there are none."""
        self._gpu: GpuMemory | None = None
        self._gpu_regions: dict[int, tuple[torch.Tensor, int]] = {}  # number -> (what peers may touch, key)
        self._by_qp: dict[int, VerbsChannel] = {}
        self._stopping = False
        self._guard = Guard("rdmarpc-verbs")
        with contextlib.ExitStack() as undo:
            undo.callback(self._give_back)
            undo.callback(self._context.close)
            undo.callback(self._close_regions)
            self._open_queues(undo, qps)
            for segment in self.memory.attach(self):
                self.announce_segment(segment)
            host = self._at.address if self.given else "127.0.0.1"
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = undo.enter_context(socket.create_server((host, 0), family=family, backlog=128))
            shown, port = f"[{host}]" if ":" in host else host, listener.getsockname()[1]
            self._address = f"verbs:{shown}:{port}:{self.uid:016x}:{self._at.endpoint}".encode()
            self._heart = Heart(frame=MESSAGE.pack(verbs_control.BEAT, 0, 0, 0, 0, 0))
            undo.callback(self._heart.stop)
            self._completions = threading.Thread(target=self._complete, name="rdmarpc-completions", daemon=True)
            self._completions.start()
            undo.callback(self._end_completions)
            self._service = Service(
                "verbs",
                listener,
                self._looks,
                welcome=self._welcome,
                hear=self._hear,
                look=self._look,
                lost=self.lost,
                guard=self._guard,
            )
            undo.pop_all()

    def _open_queues(self, undo: contextlib.ExitStack, qps: int) -> None:
        limits = self._at.device
        self._cq = self._context.completion_queue(min(_COMPLETIONS, limits.max_cqe))
        undo.callback(self._cq.close)
        self._srq = self._context.shared_receive_queue(min(_RECEIVES, limits.max_srq_wr))
        undo.callback(self._srq.close)
        self._sends, self._qps = min(_SENDS, limits.max_qp_wr), qps
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        undo.callback(os.close, self._woken)
        self._block = PortBlock(self._context, self._cq, self._srq, bells=self.bells, woken=self._woken)
        self.port, self.post_send = self._block.address, self._block.post_send
        kernels.progress(self.port)

    @property
    def address(self) -> bytes:
        return self._address

    def explain(self) -> str:
        limits, limit = self._at.device, f"{self.arena.limit / 2**30:.1f} GiB"
        return "\n".join(
            (
                f"verbs: reliable connected queue pairs over {self._at.name}",
                *(f"  {line}" for line in self._at.lines),
                f"  control        {self._tls.explain() if self._tls is not None else 'not encrypted (option tls)'}",
                "  payload        not encrypted: it goes past the processor",
                f"  messages       of up to {self.max_msg_sz} bytes; {self._sends} a queue pair, {self._srq.depth} receives",
                f"  adapter        firmware {limits.fw_ver or 'unknown'}; at most {limits.max_mr} memory regions",
                f"  arena          {self.arena.used} of {self.arena.capacity} bytes used, limit {limit}",
                *(self._gpu.explain() if self._gpu is not None else ()),
                f"  death          a process at once, a host or link in 2 s, a stopped one after {self._looks.timeout:g} s",
                "  waiting        whoever waits polls the completion queue, then sleeps on its channel",
            )
        )

    # -- memory

    def announce_segment(self, segment: Segment) -> None:
        with self._lock:
            if segment.number in self._mrs:
                return
            access = REMOTE_READ if segment.pool.access == READ else REMOTE_WRITE
            mr = self._mrs[segment.number] = self._context.register(segment.address, segment.nbytes, access)
            channels = [channel for channel in self._open_channels() if segment.pool.admits(channel.own_pool, write=False)]
        for channel in channels:
            self._tell(channel, *_announcement(segment, mr))

    def pin(self) -> None:
        self.arena.free(self.arena.allocate(1))

    def forget_segment(self, segment: Segment) -> None:
        with self._lock:
            mr = self._mrs.pop(segment.number, None)
        if mr is not None:
            mr.close()

    def announce(self, number: int, key: int, address: int, nbytes: int) -> None:
        if nbytes:
            mr = self._mrs[number] = self._context.register(address, nbytes, REMOTE_WRITE)
            for channel in self._open_channels():
                self._tell(channel, verbs_control.REGION, number, key, address, nbytes, mr.rkey)
            return
        for channel in self._open_channels():
            try:
                channel.withdraw(number)
            except (PeerLost, TransferTimeout) as error:
                # Deregistering makes it certain: the adapter refuses what still comes. But a GPU's segment stays registered.
                if number in self._gpu_regions:
                    self.lost(channel, error)
        if (gone := self._mrs.pop(number, None)) is not None:
            gone.close()

    @property
    def gpu(self) -> GpuMemory:
        """What of the GPUs' memory the adapter has. ``NotSupported`` where there is no GPU's driver."""
        with self._lock:
            if self._gpu is None:
                arena = self.memory.gpu
                self._gpu = GpuMemory(self._context, self.count, arena.pins if isinstance(arena, GpuArena) else None)
            return self._gpu

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

    def register(self, tensor: torch.Tensor) -> Region:
        """As ``Device.register``; also GPU memory, for the peers of this device. It holds then what the current stream has been
        given to do until now. ``RegistrationError`` where the adapter cannot reach it, with the reasons."""
        if tensor.is_cpu:
            return super().register(tensor)
        self.check()
        nbytes = local_bytes(tensor, self.gpu_kind)[1]
        if not nbytes:
            return Region(self, tensor, 0, 0, 0, foreign=False)
        mr = self.gpu.share(tensor)
        self.gpu.wait([tensor.device.index])
        number, key = self.memory.take_number()
        with self._lock:
            self._mrs[number], self._gpu_regions[number] = mr, (tensor, key)
            channels = self._open_channels()
        for channel in channels:
            self._tell(channel, verbs_control.REGION, number, key, mr.address, nbytes, mr.rkey)
        self.count("registrations")
        return Region(self, tensor, number, key, 0, foreign=True)

    def deregister(self, region: Region) -> None:
        """Of GPU memory: peers may not touch it any more. Returns when no copy of theirs is under way."""
        if os.getpid() != self.pid:
            return
        number = region.remote.region
        self.announce(number, 0, 0, 0)
        with self._lock:
            self._gpu_regions.pop(number, None)

    def arrived(self) -> None:
        """Something came: have GPUs see it, where they have to be made to."""
        if self._gpu is not None and self._gpu.flushes:
            self._gpu.flush()

    def poller(self) -> Poller:
        return FlushedPoller(self.memory, self.port, self.arrived)

    def lkey(self, address: int, nbytes: int) -> int | None:
        """The key of local memory that is registered for as long as it is held: the arena's."""
        found = self.arena.find(address, nbytes)
        return self._mrs[found[0].number].lkey if found is not None else None

    def register_local(self, address: int, nbytes: int) -> MemoryRegion:
        """Register memory for our own posts only; the caller closes it."""
        self.count("registrations")
        return self._context.register(address, nbytes, LOCAL)

    def _open_channels(self) -> list[VerbsChannel]:
        with self._lock:
            return [channel for channel in self._channels if isinstance(channel, VerbsChannel) and channel.error is None]

    def _tell(self, channel: VerbsChannel, *message: int) -> None:
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
            return verbs_endpoint.why_not(self._at.endpoint, Endpoint.parse(fields[-1])) or ""
        except RdmaError as error:
            return error.message

    def connect(self, peer: bytes, *, hello: bytes = b"", timeout: float = 5.0, pool: Pool | None = None) -> Channel:
        self.check()
        if why := self.why_not(peer):
            raise NotSupported(f"verbs cannot reach {peer!r}: {why}", device="verbs")
        where, uid, _ = peer.decode("ascii", "replace").removeprefix("verbs:").rsplit(":", 2)
        deadline = time.monotonic() + timeout
        try:
            sock, key = reach(partial(dial, where, device="verbs"), partial(self._prove, uid=uid, deadline=deadline), deadline)
            return self._meet(sock, key, hello, deadline, pool)
        except (OSError, RdmaError, ValueError) as error:
            if self.closed:
                raise PeerLost("the device was closed meanwhile", peer=where, device="verbs", status="CLOSED") from None
            late = time.monotonic() >= deadline and not isinstance(error, NotSupported)
            if late or isinstance(error, TimeoutError):
                raise TransferTimeout(f"the peer did not answer within {timeout} s", peer=where, device="verbs") from None
            if isinstance(error, OSError):
                raise broken_by(error, "connecting", peer=where, device="verbs") from error
            raise

    def _prove(self, sock: socket.socket, *, uid: str, deadline: float) -> tuple[socket.socket, bytes]:
        with self._service.handshakes.limited(sock, deadline):
            return authenticated(
                sock, self._tls, self.secret, self.memory.identity, initiator=True, expect=uid, deadline=deadline
            )

    def _meet(self, sock: socket.socket, key: bytes, hello: bytes, deadline: float, pool: Pool | None) -> VerbsChannel:
        """The initiator's side of the handshake, from the setups on."""
        qps: list[QueuePair] = []
        try:
            with self._service.handshakes.limited(sock, deadline):
                qps, ours = self._queue_pairs(self._qps)
                verbs_control.send_setup(sock, ours)
                theirs = verbs_control.receive_setup(sock)
                channel = self._channel(sock, qps, ours, theirs)
                self.door.know(channel, theirs.uid, key)
                channel.own_pool = pool
                channel.prove(max(deadline - time.monotonic(), 0.001))
                verbs_control.send_hello(sock, hello)
                channel.peer_hello = verbs_control.receive_hello(sock)
            self._adopt(channel, theirs)
        except BaseException:
            sock.close()
            for qp in qps:
                self.drop_lane(qp.qp_num)
                qp.close()
            raise
        return channel

    def _welcome(self, came: socket.socket) -> None:
        """Acceptor's side of the handshake, on its own thread. A bad peer costs only this connection."""
        sock, channel, handshakes = came, None, self._service.handshakes
        deadline = time.monotonic() + HANDSHAKE_S
        qps: list[QueuePair] = []
        try:
            with handshakes.limited(came, deadline):
                sock, key = authenticated(
                    came, self._tls, self.secret, self.memory.identity, initiator=False, deadline=deadline
                )
            handshakes.proven(came)
            with handshakes.limited(sock, deadline):
                theirs = verbs_control.receive_setup(sock)
                try:
                    qps, ours = self._queue_pairs(len(theirs.queue_pairs))
                except RdmaError as error:
                    verbs_control.send_refusal(sock, error.message)
                    raise
                channel = self._channel(sock, qps, ours, theirs)
                self.door.know(channel, theirs.uid, key)
                verbs_control.send_setup(sock, ours)
                channel.peer_hello = verbs_control.receive_hello(sock)
            channel.known = True
            # on_connect may publish the channel: what other threads send waits until the answer is out.
            with channel.stream.lock:
                verbs_control.send_hello(sock, self.door.greet(channel))
            self._adopt(channel, theirs)
            self.door.welcomed(channel)
        except BaseException as error:
            self.door.refused(sock, error)
            if channel is not None:
                broken = PeerLost(f"the connection broke as it was made: {error}", peer=channel.peer, device="verbs")
                if channel.lose(broken) and channel.known:
                    self.door.lost(channel, self.on_lost)
            else:
                for qp in qps:
                    qp.close()
            sock.close()
            if not isinstance(error, (*EXPECTED, ValueError)):
                raise

    def _queue_pairs(self, count: int) -> tuple[list[QueuePair], Setup]:
        with self._lock:
            room = min((self._cq.depth - self._srq.depth) // self._sends, LANES)
            if len(self._by_qp) + count > room:
                raise NotSupported(f"the completion queue of {self._at.name} has room for {room} queue pairs", device="verbs")
        qps: list[QueuePair] = []
        try:
            for _ in range(count):
                qps.append(
                    self._context.queue_pair(
                        self._cq, self._srq, port=self._at.number, depth=self._sends, max_sge=1, max_inline=_INLINE
                    )
                )
        except RdmaError:
            for qp in qps:
                qp.close()
            raise
        pairs = tuple((qp.qp_num, secrets.randbits(24)) for qp in qps)
        patience = int(self._looks.timeout * 1000)
        return qps, Setup(self.uid, self.epoch, patience, self.max_msg_sz, self._at.endpoint.dump(), pairs)

    def _channel(self, sock: socket.socket, qps: list[QueuePair], ours: Setup, theirs: Setup) -> VerbsChannel:
        """Both ends are known: connect the queue pairs, and have their completions counted."""
        if len(theirs.queue_pairs) != len(qps):
            raise PeerLost("the peer answered with another number of queue pairs", device="verbs", status="PROTOCOL")
        there = Endpoint.load(theirs.endpoint)
        for qp, (_, sq_psn), (dest_qp_num, rq_psn) in zip(qps, ours.queue_pairs, theirs.queue_pairs):
            route = verbs_endpoint.route(
                self._at.endpoint,
                there,
                port=self._at.number,
                sgid_index=self._at.gid.index,
                dest_qp_num=dest_qp_num,
                rq_psn=rq_psn,
                sq_psn=sq_psn,
                timeout=_TIMEOUT,
                retry_cnt=_RETRY_CNT,
            )
            qp.connect(route)
        host, port = sock.getpeername()[:2]
        channel = VerbsChannel(self, self, self, ControlStream(sock, f"{host}:{port}"), qps, theirs)
        with self._lock:
            for lane in channel.lanes:
                self._by_qp[lane.qp.qp_num] = channel
                verbs_kernels.enter_lane(self.port, lane.qp.qp_num, lane.address)
        return channel

    def _adopt(self, channel: VerbsChannel, peer: Setup) -> None:
        """Tell the peer of all our memory, then watch the connection."""
        stream = channel.stream
        stream.sock.settimeout(None)
        stream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        every = min(max(peer.patience_ms / 4000, _BEAT_MIN_S), _BEAT_MAX_S)
        with self._lock:
            if self.closed:  # ``close`` did not see this one
                raise PeerLost("the device was closed meanwhile", peer=channel.peer, device="verbs", status="CLOSED")
            self._channels.add(channel)
            channel.known = True
            segments, foreign = self.memory.registered(channel.own_pool)
            for number, mr in self._mrs.items():
                if (segment := segments.get(number)) is not None:
                    stream.send(*_announcement(segment, mr))
                elif (region := foreign.get(number)) is not None:
                    stream.send(verbs_control.REGION, number, region.key, region.address, region.nbytes, mr.rkey)
                elif (shared := self._gpu_regions.get(number)) is not None:
                    tensor, key = shared
                    stream.send(verbs_control.REGION, number, key, mr.address, tensor.nbytes, mr.rkey)
            stream.pulse = self._heart.pulse(stream.sock.fileno(), every)
            self._service.watch(stream.sock, channel)

    def drop_lane(self, qp_num: int) -> None:
        """Completions of this queue pair concern nobody any more."""
        with self._lock:
            verbs_kernels.drop_lane(self.port, qp_num)
            self._by_qp.pop(qp_num, None)

    # -- the completion thread

    def _complete(self) -> None:
        while not self._stopping:
            try:
                self._tick()
            except BaseException as error:
                self._guard.note(error, "looking at completions")
                time.sleep(_RETRY_S)

    def _tick(self) -> None:
        if verbs_kernels.serve(self.port, _TICK_NS):
            try:
                os.eventfd_read(self._woken)
            except BlockingIOError:
                pass
            self._look_for_failures()
            while (event := self._context.async_event()) is not None:
                self._heed(event)
        for channel in self._open_channels():
            try:
                channel.sweep()
                channel.keep_alive()
            except BaseException as error:
                self.break_off(channel, error, "keeping a connection alive")
        kernels.progress(self.port)

    def wake(self) -> None:
        """Have the completion thread look for failures now."""
        if not self._stopping:
            os.eventfd_write(self._woken, 1)

    def _look_for_failures(self) -> None:
        with self._lock:
            channels = set(self._by_qp.values())
        for channel in channels:
            if channel.error is not None or (error := channel.failure()) is None:
                continue
            if not isinstance(error, RemoteAccessError):
                self.lost(channel, error)
                continue
            try:
                threading.Thread(target=self._settle, args=(channel, error), name="rdmarpc-refused", daemon=True).start()
            except RuntimeError:  # no more threads
                self.lost(channel, error)

    def _settle(self, channel: VerbsChannel, error: RdmaError) -> None:
        """A process that ends takes its memory from the adapter before its end is heard: that is no refusal. So wait a moment
        for the control stream, which tells the two apart."""
        limit = time.monotonic() + _SETTLE_S
        while channel.error is None and time.monotonic() < limit:
            time.sleep(0.005)
        self.lost(channel, error)

    def _heed(self, event: str) -> None:
        """Asynchronous events are counted. Those of a queue pair show in its completions too; a device that is gone takes all
        with it."""
        self.count(f"async_{event.lower()}")
        concerns, what = EVENT_MEANINGS.get(event, ("", ""))
        if concerns != "device":
            return
        for channel in self._open_channels():
            self.lost(channel, PeerLost(what, peer=channel.peer, device="verbs", status=event))

    def lost(self, channel: VerbsChannel, error: RdmaError) -> None:
        """A channel broke: end it, and tell whoever listens, once. The peer is told too: it may not know yet."""
        if channel.error is None and channel.known:
            channel.say_broken()
        if channel.lose(error) and channel.known:
            self.door.lost(channel, self.on_lost)

    def break_off(self, channel: VerbsChannel, error: BaseException, doing: str) -> None:
        """Something that nobody expected went wrong with this channel: it ends, with a named error, and nothing else does."""
        if not isinstance(error, RdmaError):
            self._guard.note(error, doing)
        self.lost(channel, broken_by(error, doing, peer=channel.peer, device="verbs"))

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
            self.lost(channel, error if error.status == "EOF" else channel.failure() or error)

    def _look(self, channel: VerbsChannel, seconds: float) -> None:
        """Give the peer up if it has not been heard for too long."""
        if channel.error is not None:
            return
        channel.silence = 0.0 if channel.stream.heard else channel.silence + seconds
        channel.stream.heard = False
        if self._looks.too_long(channel.silence):
            channel.say_given_up()
            self.lost(channel, PeerLost(self._looks.text(), peer=channel.peer, device="verbs", status="SILENT"))

    def forget(self, channel: VerbsChannel) -> None:
        """Stop watching a channel that has ended."""
        with self._lock:
            if self._service.forget(channel.stream.sock):
                self._retire(channel)

    # -- the end

    def _forked(self) -> None:
        for channel in list(self._channels):
            if isinstance(channel, VerbsChannel):
                channel.stream.sock.close()
        self._service.drop()

    def _shut(self) -> None:
        with self._lock:
            rest = set(self._by_qp.values())
        for channel in rest:  # still in their handshake
            channel.lose(PeerLost("the device was closed meanwhile", peer=channel.peer, device="verbs", status="CLOSED"))
        self._service.stop()
        self._end_completions()
        if self._tls is not None:
            self._tls.close(_LINGER_S)
        self._heart.stop()
        self._srq.close()
        self._cq.close()
        self._close_regions()
        if self._gpu is not None:
            self._gpu.close()
        self._context.close()
        os.close(self._woken)

    def _end_completions(self) -> None:
        self._stopping = True
        kernels.store(self.port + 8 * verbs_kernels.PORT_STOP, 1)
        os.eventfd_write(self._woken, 1)
        if threading.current_thread() is not self._completions:
            self._completions.join(timeout=5.0)
        verbs_kernels.shut(self.port)

    def _close_regions(self) -> None:
        for mr in self._mrs.values():
            mr.close()


def _announcement(segment: Segment, mr: MemoryRegion) -> tuple[int, int, int, int, int, int]:
    kind = verbs_control.SEGMENT if segment.pool.access == READ else verbs_control.LANDING
    return kind, segment.number, segment.key, segment.address, segment.nbytes, mr.rkey
