"""The connection between two processes over one TCP stream.

Both ends receive on their device's I/O thread: it looks a region up before it takes payload, and receives straight into it;
payload it refuses is read and thrown away, and the channel goes on. Posting threads send directly from where the tensors lie;
what the socket does not take at once is left to the I/O thread, so two ends that send huge data to each other both progress.

Locks: ``_receiving`` (held by the I/O thread while it handles what came) before ``_sending``. Neither is held across a wait.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from . import kernels
from .channel import Channel, Pair, Transfer, Window, check_notify, sort_pair
from .device import Device
from .errors import PeerLost, RdmaError, RemoteAccessError, TransferTimeout, kept
from .heartbeat import Heart, goodbye
from .mapping import anonymous
from .memory import NOWHERE, Registered
from .pulse import MAX_BUFFERS, Pulse
from .questions import ANSWER_TIMEOUT_S
from .records import MAX_NOTIFY, RECORD_BYTES
from .region import LENT, RemoteRegion, local_bytes
from .tcp_transfer import Buffers, TcpTransfer, TcpWindow, TcpWork
from .tcp_wire import (
    ACK,
    BEAT,
    BYE,
    CHECK,
    DATA,
    END_CLOSED,
    HEADER,
    LAST,
    MAX_COPIES,
    MAX_REASON,
    NOTIFY,
    READ,
    REFUSED,
    SILENT,
    WRITE,
    memory_at,
)
from .tls import failure

_TURN_BYTES = 4 << 20  # what one channel sends or receives before it is another's turn
_BEAT_MIN_S, _BEAT_MAX_S = 0.25, 2.5
_ENDED = 1 << 62  # added to the answers when the channel ends, so that every wait on them returns


class IoThread(Protocol):
    """The thread of a device that receives for its channels, and sends what posting threads left over."""

    heart: Heart

    def on_io_thread(self) -> bool: ...

    def watch(self, channel: TcpChannel, *, writable: bool) -> None:
        """Have ``channel.flush`` called when its socket has room. Called under the channel's send lock."""


class TcpChannel(Channel):
    """See the contract in ``channel``. A WRITE's ``Work`` is done when the peer has the data; a descriptor that the peer
    refuses is a ``RemoteAccessError`` from ``Work.wait`` and the channel stays usable. ``close`` first lets what was posted
    finish, for at most a second."""

    device: Device
    reads_take_peer = True

    def __init__(
        self,
        device: Device,
        io: IoThread,
        sock: socket.socket,
        identity: tuple[int, int],
        hello: bytes,
        patience: float,
    ) -> None:
        super().__init__(device)
        self._io = io
        host, port = sock.getpeername()[:2]
        self.sock = sock
        self.peer, self.peer_hello = f"{host}:{port}", hello
        self.peer_uid, self.peer_epoch = identity
        self.gone = threading.Event()  # set when the socket is closed
        # One record more than the notifications: the answers, as many as the last post that was answered.
        self._records = anonymous((MAX_NOTIFY + 1) * RECORD_BYTES)
        self._inbox = torch.frombuffer(self._records, dtype=torch.uint8, count=1).data_ptr()
        self.answers = self._inbox + MAX_NOTIFY * RECORD_BYTES
        self.answered = 0
        self._sending, self._receiving = threading.RLock(), threading.RLock()
        self._pulse: Pulse | None = None  # once the I/O thread serves this channel
        self._beat_s = min(max(patience / 4, _BEAT_MIN_S), _BEAT_MAX_S)
        self._heard, self._silence = True, 0.0
        self._seq = 0
        self._pending: dict[int, TcpWork] = {}
        self._outbox: deque[tuple[memoryview, int]] = deque()  # with the region number it reads from, or 0
        self._given = 0  # so many of its first buffers are the pulse's
        self._posts = self._bytes = self.inlined = 0
        # Of the frame that is coming in:
        self._header = bytearray(HEADER.size)
        self._header_got = 0
        self._frame: tuple[int, ...] = ()
        self._left = 0
        self._target: memoryview | None = None
        self._target_region = 0
        self._reason = bytearray(MAX_REASON)
        self._scratch = memoryview(bytearray(64 << 10))
        self._lent: dict[int, tuple[int, int, weakref.ref[torch.UntypedStorage]]] = {}
        """What this peer may READ besides: key -> (address, bytes, the storage, which takes the entry with it)."""
        # Of the post that is coming in:
        self._refusal = ""
        self._answered_by_data = False
        self._ack_due = 0

    def lend(self, tensor: torch.Tensor) -> RemoteRegion:
        """See ``Device.lend``. Good for this peer alone, and as long as the tensor's storage lives."""
        address, nbytes = local_bytes(tensor)
        key, lent = secrets.randbits(64), self._lent
        storage = weakref.ref(tensor.untyped_storage(), lambda _: lent.pop(key, None) and None)
        lent[key] = address, nbytes, storage
        return RemoteRegion(self.device.uid, self.device.epoch, LENT, key, 0, nbytes)

    # -- copies

    def prepare(self, pairs: Sequence[Pair], *, notify: int | None = None) -> Transfer:
        self.check()
        check_notify(notify)
        if len(pairs) > MAX_COPIES:
            raise ValueError(f"at most {MAX_COPIES} copies in one transfer, got {len(pairs)}")
        sides = [sort_pair(dst, src) for dst, src in pairs]
        for remote, _, _ in sides:
            self._check_owner(remote)
        return TcpTransfer(self, sides, notify)

    def window(self, remote: RemoteRegion, local: torch.Tensor, *, notify: int) -> Window:
        self.check()
        check_notify(notify)
        remote, local, _ = sort_pair(remote, local)
        self._check_owner(remote)
        work = TcpWork(self, (), {}, None)
        with self._sending:
            seq = self._enlist(work)
            self._transmit([HEADER.pack(CHECK, LAST, 0, 0, seq, remote.region, remote.key, remote.offset, remote.nbytes)])
        work.wait(ANSWER_TIMEOUT_S)
        return TcpWindow(self, remote, local, notify)

    def record(self, imm: int) -> int:
        check_notify(imm)
        return self._inbox + imm * RECORD_BYTES

    def post(self, transfer: TcpTransfer, work: TcpWork) -> None:
        """Send the frames of a transfer; ``work`` is answered later."""
        with self._sending:
            seq = self._enlist(work)
            self._posts += 1
            self._bytes += transfer.nbytes
            self._transmit(transfer.frames(seq))

    def post_notify(self, imm: int | None) -> None:
        """Send a notification alone (``None``: an empty transfer, nothing to send)."""
        with self._sending:
            self.check()
            self._posts += 1
            if imm is not None:
                self._transmit([HEADER.pack(NOTIFY, LAST | SILENT, 0, imm + 1, self._seq, 0, 0, 0, 0)])

    def fence(self, timeout: float | None = None) -> None:
        work = TcpWork(self, (), {}, None)
        with self._sending:
            # Frames are taken in order, so the answer to the last one says that all are there.
            self._transmit([HEADER.pack(NOTIFY, LAST, 0, 0, self._enlist(work), 0, 0, 0, 0)])
        work.wait(timeout)

    def put(self, op: int, flags: int, imm: int, place: tuple[int, int, int, int], view: memoryview) -> None:
        """One unacknowledged frame. When this returns, the bytes of ``view`` are with the kernel, or copied."""
        with self._sending:
            self.check()
            self._seq += 1
            self._posts += 1
            self._bytes += place[3]
            self._transmit([HEADER.pack(op, flags, 0, imm, self._seq, *place), view], keep=False)

    def _enlist(self, work: TcpWork) -> int:
        self.check()
        self._seq += 1
        work.seq = self._seq
        self._pending[work.seq] = work
        return work.seq

    def _check_owner(self, remote: RemoteRegion) -> None:
        if remote.nbytes and (remote.owner != self.peer_uid or remote.epoch != self.peer_epoch):
            why = "the descriptor was exported by another device, or in an earlier life of this one"
            raise self._refused(why)

    def _refused(self, why: str) -> RemoteAccessError:
        return RemoteAccessError(why, peer=self.peer, device="tcp", status="REM_ACCESS_ERR")

    def check(self) -> None:
        super().check()
        if os.getpid() != self.device.pid:
            raise RdmaError("a channel cannot be used in a forked child", device="tcp", hint="fork first, or use spawn")

    def totals(self) -> tuple[int, int]:
        return self._posts, self._bytes

    # -- sending

    def enlist(self) -> None:
        """From here on the I/O thread serves this channel; what was posted before goes out now."""
        with self._sending:
            self._pulse = self._io.heart.pulse(self.sock.fileno(), self._beat_s)
            self.flush()

    def flush(self) -> None:
        """Send some of what is left over (I/O thread, when the socket has room)."""
        with self._sending:
            self._flush()
            self._await_room()

    def _transmit(self, parts: Buffers, *, region: int = 0, keep: bool = True) -> None:
        """Send, or leave to the I/O thread. ``keep``: the parts stay unchanged until they are answered; otherwise what does
        not go out now is copied. ``region``: where the parts come from, if a peer asked for them."""
        idle = not self._outbox and self._pulse is not None
        self._outbox.extend((memoryview(part), region) for part in parts if len(part))
        if idle:
            self._flush()
        if not self._outbox:
            return
        if not keep:
            # Its owner may overwrite it now: go on with a copy.
            if self._given == len(self._outbox):
                self._withdraw()
            if self._outbox:
                view, region = self._outbox.pop()
                self.inlined += len(view)
                self._outbox.append((memoryview(bytes(view)), region))
            if idle:
                self._flush()
        if idle:
            self._await_room()

    def _flush(self) -> None:
        """As much as the socket takes, and one channel may send in its turn."""
        assert self._pulse is not None
        room = _TURN_BYTES
        try:
            while self._outbox and room > 0:
                if self._given:
                    sent = self._pulse.resume(room)
                else:
                    batch = [view for view, _ in itertools.islice(self._outbox, MAX_BUFFERS)]
                    self._given = len(batch)
                    sent = self._pulse.send(batch, len(batch) == len(self._outbox), room)
                room -= sent
                self._sent(sent)
                if self._given:
                    return
        except OSError:
            # The I/O thread sees the broken connection too, takes what came before, and ends the channel.
            self._outbox.clear()
            self._given = 0

    def _sent(self, nbytes: int) -> None:
        while nbytes:
            view, region = self._outbox.popleft()
            if len(view) > nbytes:
                self._outbox.appendleft((view[nbytes:], region))
                return
            nbytes -= len(view)
            self._given -= 1

    def _withdraw(self) -> None:
        """Nobody but us touches the outbox any more, until the next ``_flush``."""
        if self._given and self._pulse is not None:
            self._sent(self._pulse.withdraw())
            self._given = 0

    def _await_room(self) -> None:
        self._io.watch(self, writable=bool(self._outbox))

    def _answer(self, op: int, seq: int, parts: Buffers, *, region: int = 0, index: int = 0, flags: int = LAST) -> None:
        nbytes = sum(len(part) for part in parts)
        with self._sending:
            self._transmit([HEADER.pack(op, flags, index, 0, seq, 0, 0, 0, nbytes), *parts], region=region)

    # -- receiving (I/O thread)

    def receive(self) -> RdmaError | None:
        """Take what has come. Returns why the stream is over, or ``None``."""
        with self._receiving:
            room = _TURN_BYTES
            try:
                while room > 0:
                    wanted, got = self._receive_some()
                    self._heard = True
                    if got == 0:
                        ended = PeerLost("the peer's process ended, or it aborted", peer=self.peer, device="tcp", status="EOF")
                        return failure(self.sock) or ended
                    room -= got
                    if got < wanted:
                        break
            except BlockingIOError:
                pass
            except OSError as error:
                broken = PeerLost(f"the connection broke: {error}", peer=self.peer, device="tcp", status="BROKEN")
                return failure(self.sock) or broken
            except RdmaError as error:
                return error
            self._send_ack()
        return None

    def _receive_some(self) -> tuple[int, int]:
        """One system call: payload straight into its place, and the next header behind it."""
        if self.error is not None:
            return len(self._scratch), self.sock.recv_into(self._scratch)
        header = memoryview(self._header)[self._header_got :]
        if not self._left:
            got = self.sock.recv_into(header)
            self._take_header(got)
            return len(header), got
        if self._target is not None:
            wanted = self._left + len(header)
            got = self.sock.recvmsg_into([self._target, header])[0]
        else:
            wanted = min(self._left, len(self._scratch))
            got = self.sock.recv_into(self._scratch[:wanted])
        payload = min(got, self._left)
        self._left -= payload
        if self._target is not None:
            self._target = self._target[payload:]
        if not self._left and got:
            self._end_frame()
            self._take_header(got - payload)
        return wanted, got

    def _take_header(self, got: int) -> None:
        self._header_got += got
        if self._header_got == HEADER.size:
            self._header_got = 0
            self._frame = HEADER.unpack(self._header)
            self._target, self._target_region = None, 0
            self._begin_frame(*self._frame)
            if not self._left:
                self._end_frame()

    def _begin_frame(
        self, op: int, flags: int, index: int, imm: int, seq: int, region: int, key: int, offset: int, nbytes: int
    ) -> None:
        if op == WRITE:
            self._left = nbytes
            self._target = self._look_up(region, key, offset, nbytes, write=True)
            self._target_region = region
        elif op in (READ, CHECK):
            view = self._look_up(region, key, offset, nbytes, write=op == CHECK)
            if op == READ and not self._refusal and view is not None:
                self._send_ack()
                self._answered_by_data = bool(flags & LAST)
                self._answer(DATA, seq, [view], region=region, index=index, flags=flags & LAST)
        elif op == DATA:
            work = self._pending.get(seq)
            self._target = None if work is None else work.reads.pop(index, None)
            self._left = nbytes
            if self._target is None or len(self._target) != nbytes:
                raise self._malformed("data that nobody asked for")
        elif op == REFUSED:
            if nbytes > MAX_REASON:
                raise self._malformed("an overlong reason")
            self._left, self._target = nbytes, memoryview(self._reason)[:nbytes]
        elif op not in (NOTIFY, ACK, BYE, BEAT):
            raise self._malformed(f"operation {op}")
        if imm > MAX_NOTIFY or (op in (ACK, DATA, REFUSED) and seq > self._seq):
            raise self._malformed("a number out of range")

    def _end_frame(self) -> None:
        op, flags, index, imm, seq, _, _, _, nbytes = self._frame
        self._target, self._target_region = None, 0
        if op in (WRITE, READ, CHECK, NOTIFY):
            if imm and not self._refusal:
                kernels.signal(self.record(imm - 1), self.device.bells)
            if flags & LAST:
                self._end_post(flags, seq)
        elif op == ACK or (op == DATA and flags & LAST):
            self._answer_came(seq)
        elif op == REFUSED:
            self._refusal_came(seq, self._refused(self._reason[:nbytes].decode("utf-8", "replace")))
        elif op == BYE:
            status, why = goodbye(index)
            raise PeerLost(why, peer=self.peer, device="tcp", status=status)

    def _end_post(self, flags: int, seq: int) -> None:
        if self._refusal:
            self._send_ack()
            self._answer(REFUSED, seq, [self._refusal.encode()[:MAX_REASON]])
        elif not self._answered_by_data and not flags & SILENT:
            self._ack_due = seq
        self._refusal, self._answered_by_data = "", False

    def _send_ack(self) -> None:
        if self._ack_due:
            due, self._ack_due = self._ack_due, 0
            self._answer(ACK, due, [])

    def _look_up(self, region: int, key: int, offset: int, nbytes: int, *, write: bool) -> memoryview | None:
        """Our memory that a peer names, or ``None`` with the reason in ``_refusal``."""
        if nbytes == 0:
            return memoryview(b"")
        if region == LENT:
            address, size, right_key, pool = self._loan(key)
        else:
            address, size, right_key, pool = self.device.regions.get(region, NOWHERE)
        if not size:
            self._refusal = self._refusal or f"region {region} is not registered (any more)"
        elif pool is not None and not pool.admits(self.own_pool, write=write):
            may = "may only be read" if pool.admits(self.own_pool, write=False) else "is for another peer"
            self._refusal = self._refusal or f"region {region} {may}"
        elif key != right_key:
            self._refusal = self._refusal or f"wrong key for region {region}"
        elif offset + nbytes > size:
            self._refusal = self._refusal or f"bytes {offset}:{offset + nbytes} of a region of {size} bytes"
        else:
            return memory_at(address + offset, nbytes)
        return None

    def _loan(self, key: int) -> Registered:
        entry = self._lent.get(key)
        return Registered(entry[0], entry[1], key, self.device.arena.readable) if entry is not None else NOWHERE

    def _answer_came(self, seq: int) -> None:
        callbacks = []
        with self._sending:
            while self._pending:
                first = next(iter(self._pending))
                if first > seq:
                    break
                work = self._pending[first]
                if work.error is None and work.reads:
                    raise self._malformed("an answer without the data")
                del self._pending[first]
                work.keep = ()
                if work.callback is not None:
                    callbacks.append(work.callback)
                if work.error is None and work.imm is not None:
                    self.post_notify(work.imm)
        if (fresh := seq - self.answered) > 0:
            self.answered = seq
            kernels.add(self.answers, fresh - 1)
            kernels.signal(self.answers, self.device.bells)
        for callback in callbacks:
            callback()

    def call_when_answered(self, work: TcpWork, callback: Callable[[], None]) -> bool:
        """Have ``callback()`` run (I/O thread, or whoever ends the channel) when that is over. ``False`` if it is."""
        with self._sending:
            if self._pending.get(work.seq) is not work:
                return False
            work.callback = callback
            return True

    def _refusal_came(self, seq: int, error: RemoteAccessError) -> None:
        work = self._pending.get(seq)
        if work is None:
            raise error
        work.error = error
        self._answer_came(seq)

    def _malformed(self, what: str) -> PeerLost:
        return PeerLost(f"the peer sent {what}", peer=self.peer, device="tcp", status="PROTOCOL")

    # -- the end

    def revoke(self, region: int) -> None:
        """No byte of this region is touched for this channel after the return."""
        with self._receiving:
            if self._target_region == region and self._left:
                self._target = None
                self._refusal = self._refusal or f"region {region} was closed during the copy"
            with self._sending:
                self._withdraw()
                for at, (view, source) in enumerate(self._outbox):
                    if source == region:
                        self.inlined += len(view)
                        self._outbox[at] = (memoryview(bytes(view)), 0)
                if self._pulse is not None:
                    self._flush()

    def end(self, error: RdmaError, *, goodbye: int | None = None) -> bool:
        """Make every use of this channel fail with ``error`` from now on, and let go of all buffers. ``goodbye``: what the
        peer is told, if no frame is half sent. ``False`` if it had ended before."""
        with self._receiving, self._sending:
            if self.error is not None:
                return False
            self.error = kept(error)
            if self._pulse is not None:
                self._pulse.close()
                self._withdraw()
            whole = not self._outbox
            self._outbox.clear()
            callbacks = [work.callback for work in self._pending.values() if work.callback is not None]
            self._pending.clear()
            self._target, self._left = None, 0
            if whole and goodbye is not None:
                with contextlib.suppress(OSError):
                    self._transmit([HEADER.pack(BYE, 0, goodbye, 0, 0, 0, 0, 0, 0)])
        kernels.add(self.answers, _ENDED - 1)
        kernels.signal(self.answers, self.device.bells)
        for callback in callbacks:
            callback()
        return True

    def forked(self, error: RdmaError) -> None:
        super().forked(error)
        self._sending, self._receiving = threading.RLock(), threading.RLock()  # the parent's threads may hold the old ones

    def abort(self, timeout: float = 5.0) -> None:
        if os.getpid() != self.device.pid:
            return
        unanswered = self._seq > self.answered
        self.end(PeerLost("the channel was aborted", peer=self.peer, device="tcp", status="ABORTED"))
        self._hang_up()
        # The peer ends too when it has read our end of stream: then none of our bytes can land there any more.
        if self._pulse is None or self._io.on_io_thread() or self.gone.wait(timeout):
            return
        if unanswered:
            raise TransferTimeout("the peer may be stopped in the middle of our copy", peer=self.peer, device="tcp")

    def close(self) -> None:
        if os.getpid() != self.device.pid:
            return
        deadline = self.device.close_deadline()
        while (self._pending or self._outbox) and self.error is None and not self._io.on_io_thread():
            if time.monotonic() > deadline:
                break
            time.sleep(0.0005)
        self.end(PeerLost("the channel was closed here", peer=self.peer, device="tcp", status="CLOSED"), goodbye=END_CLOSED)
        self._hang_up()

    def look(self, seconds: float) -> float:
        """How long (s) nothing came, as far as looks tell; this one counts for ``seconds`` (I/O thread)."""
        self._silence = 0.0 if self._heard else self._silence + seconds
        self._heard = False
        return self._silence

    def give_up(self, error: RdmaError, why: int) -> bool:
        """End a channel, and say goodbye for that reason: a peer that does not run finds it when it runs again, or a broken
        stream. ``False`` if it had ended before."""
        return self.end(error, goodbye=why)

    def release(self) -> None:
        """Close the socket (I/O thread, when nothing can come or go any more)."""
        with self._sending:
            if self._pulse is not None:
                self._pulse.close()
                self._pulse.end()
            self.gone.set()
            self.sock.close()

    def _hang_up(self) -> None:
        """Send the end of the stream; the I/O thread closes the socket when the peer's has come."""
        with self._sending:
            if self.gone.is_set():
                return
            try:
                self.sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # it is broken already, which the I/O thread sees too
