"""The connection between two processes over one TCP stream.

Its parts, each below the one before: what comes in (``Reader``), what was posted (``Posts``), what is still to be sent
(``Outbox``), and what the peer may touch (``Access``). The device's I/O thread reads the stream, or a thread that waits
(``hear_until``).
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Sequence

import torch

from ..channel import Channel, Pair, Transfer, Window, check_notify, sort_pair
from ..device import Device
from ..errors import PeerLost, RdmaError, TransferTimeout, kept
from ..interrupts import interruptible
from ..listening import ANSWER_TIMEOUT_S
from ..memory.mapping import anonymous
from ..notify import Expectation
from ..peers.heartbeat import CLOSED, Heart, often
from ..peers.service import Service
from ..region import OTHERS, RemoteRegion, refusal
from ..words import kernels
from ..words.signals import MAX_NOTIFY, RECORD_BYTES
from .outbox import BYE, CHECK, HEADER, MAX_COPIES, NOTIFY, Outbox
from .reader import READABLE, Access, Reader
from .transfer import Posts, TcpTransfer, TcpWindow

_FIRST_S = 0.001
_OVERDUE_S = 1.0


class HeardExpectation(Expectation):
    """An ``Expectation`` whose waiting thread reads the stream itself."""

    __slots__ = ()
    _channel: TcpChannel

    def wait(self, timeout: float | None = None) -> None:
        begin, target = time.monotonic(), self._count.consumed + self.count
        if not self._channel.hear_until(self._record, target, timeout):
            self._wait_on(target, timeout, begin)
        self._count.consumed = target


class TcpChannel(Channel):
    """See the contract in ``channel``. A WRITE's ``Work`` is done when the peer has the data; a descriptor that the peer
    refuses is a ``RemoteAccessError`` from ``Work.wait`` and the channel stays usable. ``close`` first lets what was posted
    finish, for at most a second."""

    device: Device
    reads_take_peer = True

    def __init__(
        self, device: Device, io: Service, sock: socket.socket, identity: tuple[int, int], hello: bytes, patience: float
    ) -> None:
        super().__init__(device)
        self._io = io
        try:
            host, port = sock.getpeername()[:2]
        except OSError as error:  # the peer has reset the stream
            raise PeerLost(f"the peer broke off the handshake: {error}", device="tcp") from None
        self.sock, self.peer_hello = sock, hello
        self.peer_uid, self.peer_epoch = identity
        self._gone = threading.Event()  # set when the socket is closed
        # One record more than the notifications: the answers, as many as the last post that was answered.
        records = anonymous((MAX_NOTIFY + 1) * RECORD_BYTES)
        self.records = torch.frombuffer(records, dtype=torch.uint8, count=1).data_ptr()
        self._beat_s = often(patience)
        self._silence = 0.0
        self.access = Access(device, self)
        self.outbox = Outbox(sock, io.await_events)
        answers = self.records + MAX_NOTIFY * RECORD_BYTES
        self._posts = Posts(self.outbox, records, answers, device.bells, f"{host}:{port}")
        self.reader = Reader(sock, self.access, self.outbox, self._posts, records=self.records, bells=device.bells)

        self._reading = threading.Lock()
        """Held by the thread that reads the stream while it waits."""
        self._reads_until = 0.0
        self._posts.hear = self.hear_until

    @property
    def peer(self) -> str:
        return self._posts.peer

    @peer.setter
    def peer(self, name: str) -> None:
        self._posts.peer = name

    # -- copies

    def prepare(self, pairs: Sequence[Pair], *, notify: int | None = None) -> Transfer:
        self.check()
        check_notify(notify)
        if len(pairs) > MAX_COPIES:
            raise ValueError(f"at most {MAX_COPIES} copies in one transfer, got {len(pairs)}")
        sides = [sort_pair(dst, src) for dst, src in pairs]
        for remote, _, _ in sides:
            self._check_owner(remote)
        return TcpTransfer(self._posts, sides, notify)

    def _window(self, remote: RemoteRegion, local: torch.Tensor, notify: int) -> Window:
        self._check_owner(remote)
        self._posts.ask(CHECK, (remote.region, remote.key, remote.offset, remote.nbytes)).wait(ANSWER_TIMEOUT_S)
        return TcpWindow(self._posts, remote, local, notify)

    def expect(self, imm: int, count: int = 1) -> Expectation:
        return HeardExpectation(self, imm, count, self.count(imm))

    def hear_until(self, record: int, target: int, timeout: float | None) -> bool:
        """Read the stream on this thread until the record has reached ``target``: ``True``. ``False``: wait in another way,
        because something came that is for the I/O thread, ``timeout`` seconds have passed, or the channel has ended."""
        if kernels.load(record) >= target:
            return True
        if not self.outbox.started or self.error is not None or timeout == 0 or self._io.is_current():
            return False
        if self._io.looks.interval is None:
            return False  # nobody would read while a signal handler holds this thread up
        if not self._reading.acquire(blocking=False):
            return False  # another thread reads
        begin = time.monotonic()
        try:
            self.outbox.read_elsewhere(True)
            return self._hear(record, target, math.inf if timeout is None else begin + timeout)
        finally:
            self.outbox.read_elsewhere(False)
            self._reading.release()
            soon = time.monotonic() - begin < kernels.SPIN_MAX_NS / 1e9
            kernels.store(kernels.SPIN, kernels.SPIN_MAX_NS if soon else kernels.SPIN_MIN_NS)

    @interruptible()
    def _hear(self, record: int, target: int, deadline: float) -> bool:
        spin_ns, slice_s = kernels.load(kernels.SPIN), _FIRST_S
        while self.error is None and (left := deadline - time.monotonic()) > 0:
            # What the I/O thread was reading a moment ago it may signal without our notice: so the first slices are short.
            self._reads_until = time.monotonic() + slice_s + _OVERDUE_S
            found = self.reader.await_bytes(record, target, spin_ns, int(min(slice_s, left) * 1e9))
            if found == READABLE and not self.reader.hear():
                self._io.attend(self.sock, self)  # what has come is for the I/O thread
                return kernels.load(record) >= target
            if kernels.load(record) >= target:
                return True
            if found != READABLE:
                spin_ns, slice_s = 0, min(2 * slice_s, kernels.SLICE_NS / 1e9)
        return False

    def fence(self, timeout: float | None = None) -> None:
        self._posts.ask(NOTIFY).wait(timeout)

    def _check_owner(self, remote: RemoteRegion) -> None:
        if remote.nbytes and (remote.owner != self.peer_uid or remote.epoch != self.peer_epoch):
            raise refusal(OTHERS, self.peer, "tcp")

    def check(self) -> None:
        self._posts.check()

    def totals(self) -> tuple[int, int]:
        return self._posts.count, self._posts.nbytes

    # -- for the device

    def start(self, heart: Heart) -> None:
        """Let the I/O thread serve this channel from now on, and send the frames that were posted before."""
        with self.outbox.lock:
            if not self._gone.is_set():  # since it is watched, the peer may have hung up
                self.outbox.start(heart.pulse(self.sock.fileno(), self._beat_s))

    def look(self, seconds: float) -> float:
        """Note that ``seconds`` have passed since the last look. Returns for how long (s) nothing has come (I/O thread)."""
        if self.outbox.read_by_waiter and time.monotonic() > self._reads_until:
            self.outbox.read_elsewhere(False)  # a signal handler raised before that thread had given it back
        self._silence = 0.0 if self.reader.heard else self._silence + seconds
        self.reader.heard = False
        return self._silence

    def revoke(self, region: int) -> None:
        """Stop all copies of this channel from and to a region of ours. Its memory is not touched after the return."""
        with self.reader.lock:
            self.reader.revoke(region)
            with self.outbox.lock:
                self.outbox.revoke(region)

    # -- the end

    def end(self, error: RdmaError, *, goodbye: int | None = None) -> bool:
        """Make every use of this channel fail with ``error`` from now on, and let go of all buffers. ``goodbye``: what the
        peer is told, if no frame is half sent. ``False`` if it had ended before."""
        with self.reader.lock, self.outbox.lock:
            if self.error is not None:
                return False
            self.error = kept(error)
            whole = self.outbox.end()
            self.reader.end()
            if whole:
                self.outbox.answer()  # the peer must not take for lost what is here
            if whole and goodbye is not None:
                with contextlib.suppress(OSError):
                    self.outbox.send([HEADER.pack(BYE, 0, goodbye, 0, 0, 0, 0, 0, 0)])
            callbacks = self._posts.end(self.error)
        for callback in callbacks:
            callback()
        return True

    def forked(self, error: RdmaError) -> None:
        super().forked(error)
        self._posts.error = error
        self.outbox.lock, self.reader.lock = threading.RLock(), threading.RLock()  # the parent's threads may hold the old ones

    def _abort(self, timeout: float) -> None:
        unanswered = self._posts.last > self._posts.answered
        self.end(PeerLost("the channel was aborted", peer=self.peer, device="tcp", status="ABORTED"))
        self._hang_up()
        # The peer ends too when it has read our end of stream: then none of our bytes can land there any more.
        if not self.outbox.started or self._io.is_current() or self._gone.wait(timeout):
            return
        if unanswered:
            raise TransferTimeout("the peer may be stopped in the middle of our copy", peer=self.peer, device="tcp")

    def _close(self) -> None:
        deadline = self.device.close_deadline()
        self._posts.urge(self._posts.last)
        while (self._posts.waiting or not self.outbox.empty) and self.error is None and not self._io.is_current():
            if time.monotonic() > deadline:
                break
            time.sleep(0.0005)
        self.end(PeerLost("the channel was closed here", peer=self.peer, device="tcp", status="CLOSED"), goodbye=CLOSED)
        self._hang_up()

    def release(self) -> None:
        """Close the socket (I/O thread, when nothing can come or go any more)."""
        with self.outbox.lock:
            self.outbox.close()
            self._gone.set()
            self.sock.close()

    def _hang_up(self) -> None:
        """Send the end of the stream; the I/O thread closes the socket when the peer's has come."""
        with self.outbox.lock:
            if self._gone.is_set():
                return
            with contextlib.suppress(OSError):  # it is broken already, which the I/O thread sees too
                self.sock.shutdown(socket.SHUT_WR)
