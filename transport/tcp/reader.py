"""The frames that come in on one TCP stream.

Small frames are taken by a kernel, also by a thread that waits for a notification, or for an answer. For all others the I/O
thread looks up a region before it receives payload, and receives straight into the region. It reads refused payload and throws
it away, and the channel goes on.

A kernel takes whole, small frames that have no more to them than words and a copy: WRITE into a place that was looked up
before, NOTIFY, ACK, BEAT. No signal handler of Python interrupts it. Any other frame stays in the socket, for the I/O thread,
which begins with this kernel, too. While another thread waits and reads, the I/O thread does not watch the socket, so no thread
is woken only to wake another one. State, of 64-bit words:

    +0   fd       the socket
    +8   frames   address of ``PEEK_BYTES`` bytes of our own
    +16  head     address of the header of one frame
    +24  records  address of the notification records
    +32  bells    address of the bells
    +40  acked    the last post that an ACK has answered
    +48  due      the last post that the peer wants an ACK for, 0: none
    +56  more     0 if there was nothing in the socket behind what was taken last
    +64  owed     address of the last post that the peer wants an ACK for with the next frame that goes back (``outbox``)
    +72  places   from here on ``PLACES`` regions, by the low bits of their numbers: region, key, address, bytes (0: none)
"""

from __future__ import annotations

import secrets
import select
import socket
import threading
import weakref

import numpy as np
import torch

from ..channel import Channel
from ..device import Device
from ..errors import PeerLost, RdmaError
from ..interrupts import interruptible
from ..listening import failure
from ..memory.memory import NOWHERE
from ..peers.heartbeat import goodbye
from ..region import LENT, READ_ONLY, RemoteRegion, barrier, local_bytes, refusal
from ..words import kernels
from ..words.atomics import fence, load_acquire, memcpy, now, sched_yield, store_release
from ..words.compiled import compiled
from ..words.kernels import OK, TIMEOUT
from ..words.signals import MAX_NOTIFY, RECORD_BYTES, signal
from ..words.symbols import CFunction, i32, i64, inline
from . import outbox as wire
from .outbox import ACK, BEAT, HEADER, LAST, LATER, NOTIFY, SILENT, WRITE, Outbox, memory_at
from .transfer import Posts

PEEK_BYTES, PLACES = 4096, 16
TORN, READABLE = -1, 1
STATE_ACKED, STATE_DUE, STATE_MORE, STATE_WORDS = 5, 6, 7, 9
_HEADER = HEADER.size
_PEEK, _TAKE = 0x02 | 0x40, 0x40  # MSG_PEEK, MSG_DONTWAIT
_CROWDED_NS, _MS = 50_000, 1_000_000

_recv = CFunction("recv", i64(i32, i64, i64, i32))
_poll = CFunction("poll", i32(i64, i64, i32))


@inline
def _place(state: int, region: int, key: int, offset: int, nbytes: int) -> int:
    """Where a WRITE goes, or 0 if the I/O thread has to look that up."""
    at = state + 72 + 32 * (region & 15)
    if load_acquire(at) != region or load_acquire(at + 8) != key:
        return 0
    if offset < 0 or nbytes <= 0 or offset > load_acquire(at + 24) - nbytes:
        return 0
    return load_acquire(at + 16) + offset


@compiled(i64(i64, i64))
def take(state: int, last: int) -> int:
    """Take the frames that have come, up to the first one that is for the I/O thread. ``last``: the last post of ours. Returns
    how many bytes that were, or ``TORN`` if some of them cannot be taken from the socket any more."""
    fd, frames, head = i32(load_acquire(state)), load_acquire(state + 8), load_acquire(state + 16)
    records, bells = load_acquire(state + 24), load_acquire(state + 32)
    got = _recv(fd, frames, PEEK_BYTES, i32(_PEEK))
    at = 0
    while got - at >= _HEADER:
        memcpy(head, frames + at, _HEADER)
        first, seq = load_acquire(head), load_acquire(head + 8)
        op, flags, imm = first & 255, (first >> 8) & 255, (first >> 32) & 0xFFFFFFFF
        nbytes = 0
        if imm > MAX_NOTIFY or seq < 0:
            break
        if op == WRITE:
            nbytes = load_acquire(head + 40)
            if nbytes > got - at - _HEADER:
                break
            where = _place(state, load_acquire(head + 16), load_acquire(head + 24), load_acquire(head + 32), nbytes)
            if where == 0:
                break
            memcpy(where, frames + at + _HEADER, nbytes)
        elif op == ACK:
            if seq > last:
                break
            if seq > load_acquire(state + 40):
                store_release(state + 40, seq)
        elif op != NOTIFY and op != BEAT:
            break
        if op == WRITE or op == NOTIFY:
            if imm:
                signal(records + (imm - 1) * RECORD_BYTES, bells)
            if flags & LAST and not flags & SILENT:
                store_release(load_acquire(state + 64) if flags & LATER else state + 48, seq)
        at += _HEADER + nbytes
    store_release(state + 56, 1 if at < got or got == PEEK_BYTES else 0)
    left = at
    while left > 0:
        taken = _recv(fd, frames, left, i32(_TAKE))
        if taken <= 0:
            return TORN
        left -= taken
    return at


@compiled(i64(i64, i64, i64, i64, i64))
def await_bytes(poll_fd: int, record: int, target: int, spin_ns: int, slice_ns: int) -> int:
    """Wait until something can be read (``poll_fd``: address of a ``struct pollfd``), or the record has reached ``target``:
    ``READABLE``, ``kernels.OK``, or ``kernels.TIMEOUT`` after ``slice_ns``. Spins first, for ``spin_ns``."""
    start = now()
    before = start
    while before - start < spin_ns:
        if load_acquire(record) >= target:
            return OK
        if _poll(poll_fd, 1, i32(0)) > 0:
            return READABLE
        sched_yield()
        after = now()
        if after - before > _CROWDED_NS:
            break
        before = after
    found = _poll(poll_fd, 1, i32((slice_ns + _MS - 1) // _MS))
    fence()
    if load_acquire(record) >= target:
        return OK
    return READABLE if found > 0 else TIMEOUT


class Access:
    """Looked up for every frame: nothing is announced, so nothing has to be taken back. Any thread lends."""

    def __init__(self, device: Device, channel: Channel) -> None:
        """``channel``: the channel, whose peer may touch its ``own_pool``. It is not kept alive."""
        self._device, self._channel = device, weakref.ref(channel)
        self.lent: dict[int, tuple[int, int, weakref.ref[torch.UntypedStorage]]] = {}
        """Memory lent to this peer for READs, by key: address, bytes, the storage. The entry goes when the storage dies."""

    def lend(self, tensor: torch.Tensor) -> RemoteRegion:
        """See ``Device.lend``. Good for this peer alone, and as long as the tensor's storage lives."""
        address, nbytes = local_bytes(tensor)
        key, lent = secrets.randbits(64), self.lent
        storage = weakref.ref(tensor.untyped_storage(), lambda _: lent.pop(key, None) and None)
        lent[key] = address, nbytes, storage
        return RemoteRegion(self._device.uid, self._device.epoch, LENT, key, 0, nbytes)

    def place(self, region: int) -> tuple[int, int, int]:
        """Key, address and bytes of a region that this peer may write to."""
        address, size, key, _ = self._device.regions.get(region, NOWHERE)
        return key, address, size

    def look_up(self, region: int, key: int, offset: int, nbytes: int, *, write: bool) -> memoryview | str:
        """Our memory that the peer names, or why it may not touch it."""
        if nbytes == 0:
            return memoryview(b"")
        address, size, right_key, pool = self._device.regions.get(region, NOWHERE)
        if region == LENT and (loan := self.lent.get(key)) is not None:
            address, size, right_key, pool = loan[0], loan[1], key, self._device.arena.readable
        right = ""
        if pool is not None:
            channel = self._channel()
            own = channel.own_pool if channel is not None else None
            if not pool.admits(own, write=write):
                right = READ_ONLY if pool.admits(own, write=False) else "is for another peer"
        known = (size, right_key) if size else None
        return barrier(region, key, offset, nbytes, known, right) or memory_at(address + offset, nbytes)


class Reader:
    """Reads the stream of one channel, on the I/O thread, or by ``hear`` on one that waits. It holds ``lock`` while it handles
    frames. A thread that needs both locks takes ``lock`` before the outbox's; no thread holds either of them while it waits."""

    def __init__(self, sock: socket.socket, access: Access, outbox: Outbox, posts: Posts, *, records: int, bells: int) -> None:
        """``records``: address of the notification records."""
        self.lock = threading.RLock()
        self.heard = True
        """Whether bytes have come since this was last set to false."""
        self._sock, self._access, self._outbox, self._posts = sock, access, outbox, posts
        self._records, self._bells = records, bells
        self._scratch = memoryview(bytearray(64 << 10))
        fd = sock.fileno()
        self._frames = np.zeros(PEEK_BYTES + HEADER.size, np.uint8)
        self._state = np.zeros(STATE_WORDS + 4 * PLACES, np.int64)
        frames = self._frames.ctypes.data
        self._state[:5] = fd, frames, frames + PEEK_BYTES, records, bells
        self._state[8] = outbox.owed
        self._places = self._state[STATE_WORDS:].reshape(PLACES, 4)
        self._poll_fd = np.array([fd | select.POLLIN << 32], np.int64)
        self._at, self._poll_at = self._state.ctypes.data, self._poll_fd.ctypes.data
        self._torn = False
        # State of the frame that is being received:
        self._header = bytearray(HEADER.size)
        self._header_got = 0
        self._frame: tuple[int, ...] = ()
        self._left = 0
        self._target: memoryview | None = None
        self._reason = bytearray(wire.MAX_REASON)
        # State of the post that is being received:
        self._refusal = ""
        self._answered_by_data = False
        self._ack_due = 0

    def receive(self) -> RdmaError | None:
        """Read and handle what has come. Returns why the stream has ended, or ``None``."""
        with self.lock:
            room = wire.TURN_BYTES
            try:
                if self.hear() and not self._word(STATE_MORE):
                    return None
                self._answer_heard()
                while room > 0:
                    wanted, got = self._receive_some()
                    self.heard = True
                    if got == 0:
                        why = "the peer's process ended, or it aborted"
                        return failure(self._sock, self._posts.peer) or PeerLost(
                            why, peer=self._posts.peer, device="tcp", status="EOF"
                        )
                    room -= got
                    if got < wanted:
                        break
            except BlockingIOError:
                pass
            except OSError as error:
                broken = PeerLost(f"the connection broke: {error}", peer=self._posts.peer, device="tcp", status="BROKEN")
                return failure(self._sock, self._posts.peer) or broken
            except RdmaError as error:
                return error
            self._send_ack()
        return None

    def _word(self, number: int) -> int:
        return kernels.load(self._at + 8 * number)

    def _take(self) -> int:
        return take(self._at, self._posts.last)

    @interruptible()
    def await_bytes(self, record: int, target: int, spin_ns: int, slice_ns: int) -> int:
        """Wait until there is something to ``hear``, or the record has reached ``target``: see the kernel."""
        return await_bytes(self._poll_at, record, target, spin_ns, slice_ns)

    def hear(self) -> bool:
        """Take the small frames that have come, on any thread. ``False``: something is left that ``receive`` has to do."""
        with self.lock:
            if self._posts.error is not None or self._torn or self._header_got or self._left or self._refusal:
                return False
            taken = self._take()
            self._torn = taken < 0
            if taken <= 0:
                return False
            self.heard = True
            self._ack_due = self._word(STATE_DUE) or self._ack_due
            self._send_ack()
            acked = self._word(STATE_ACKED)
            return acked <= self._posts.answered or self._posts.settle(acked)

    def _answer_heard(self) -> None:
        """What ``hear`` has left to be answered."""
        if self._torn:
            raise self._malformed("bytes that could not be read")
        self._ack_due = self._word(STATE_DUE) or self._ack_due
        if (acked := self._word(STATE_ACKED)) > self._posts.answered and self._posts.error is None:
            self._posts.answer(acked)

    def _receive_some(self) -> tuple[int, int]:
        """Make one system call: receive payload straight into its place, and the next header behind it. Returns the bytes asked
        for and the bytes received."""
        if self._posts.error is not None:
            return len(self._scratch), self._sock.recv_into(self._scratch)
        header = memoryview(self._header)[self._header_got :]
        if not self._left:
            got = self._sock.recv_into(header)
            self._take_header(got)
            return len(header), got
        if self._target is not None:
            wanted = self._left + len(header)
            got = self._sock.recvmsg_into([self._target, header])[0]
        else:
            wanted = min(self._left, len(self._scratch))
            got = self._sock.recv_into(self._scratch[:wanted])
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
            self._target = None
            self._begin_frame(*self._frame)
            if not self._left:
                self._end_frame()

    def _begin_frame(
        self, op: int, flags: int, index: int, imm: int, seq: int, region: int, key: int, offset: int, nbytes: int
    ) -> None:
        if op in (wire.WRITE, wire.READ, wire.CHECK):
            found = self._access.look_up(region, key, offset, nbytes, write=op != wire.READ)
            if isinstance(found, str):
                self._refusal = self._refusal or found
            elif op == wire.WRITE:
                self._target = found
                if nbytes:  # an empty copy needs no right
                    key, address, size = self._access.place(region)
                    self._places[region % PLACES] = region, key - (1 << 64) if key >> 63 else key, address, size
            elif op == wire.READ and not self._refusal:
                self._send_ack()
                self._answered_by_data = bool(flags & LAST)
                self._answer(wire.DATA, seq, [found], region=region, index=index, flags=flags & LAST)
            if op == wire.WRITE:
                self._left = nbytes
        elif op == wire.DATA:
            self._target, self._left = self._posts.target(seq, index), nbytes
            if self._target is None or len(self._target) != nbytes:
                raise self._malformed("data that nobody asked for")
        elif op == wire.REFUSED:
            if nbytes > wire.MAX_REASON:
                raise self._malformed("an overlong reason")
            self._left, self._target = nbytes, memoryview(self._reason)[:nbytes]
        elif op not in (wire.NOTIFY, wire.ACK, wire.BYE, wire.BEAT):
            raise self._malformed(f"operation {op}")
        if imm > MAX_NOTIFY or (op in (wire.ACK, wire.DATA, wire.REFUSED) and seq > self._posts.last):
            raise self._malformed("a number out of range")

    def _end_frame(self) -> None:
        op, flags, index, imm, seq, _, _, _, nbytes = self._frame
        self._target = None
        if op in (wire.WRITE, wire.READ, wire.CHECK, wire.NOTIFY):
            if imm and not self._refusal:
                kernels.signal(self._records + (imm - 1) * RECORD_BYTES, self._bells)
            if flags & LAST:
                self._end_post(flags, seq)
        elif op == wire.ACK or (op == wire.DATA and flags & LAST):
            self._posts.answer(seq)
        elif op == wire.REFUSED:
            self._posts.refuse(seq, refusal(self._reason[:nbytes].decode("utf-8", "replace"), self._posts.peer, "tcp"))
        elif op == wire.BYE:
            raise goodbye(index, self._posts.peer, "tcp")

    def _end_post(self, flags: int, seq: int) -> None:
        if self._refusal:
            self._send_ack()
            self._answer(wire.REFUSED, seq, [self._refusal.encode()[: wire.MAX_REASON]])
        elif not self._answered_by_data and not flags & wire.SILENT:
            if flags & wire.LATER:
                kernels.store(self._outbox.owed, seq)
            else:
                self._ack_due = seq
        self._refusal, self._answered_by_data = "", False

    def _send_ack(self) -> None:
        if self._ack_due:
            self._answer(wire.ACK, self._ack_due, [])
            self._ack_due = 0
            kernels.store(self._at + 8 * STATE_DUE, 0)

    def _answer(self, op: int, seq: int, parts: wire.Buffers, *, region: int = 0, index: int = 0, flags: int = LAST) -> None:
        nbytes = sum(len(part) for part in parts)
        with self._outbox.lock:
            self._outbox.send([HEADER.pack(op, flags, index, 0, seq, 0, 0, 0, nbytes), *parts], region=region)

    def _malformed(self, what: str) -> PeerLost:
        return PeerLost(f"the peer sent {what}", peer=self._posts.peer, device="tcp", status="PROTOCOL")

    def revoke(self, region: int) -> None:
        """Stop a copy into a region of ours. Its memory is not written after the return. Call it with ``lock`` held."""
        if self._places[region % PLACES, 0] == region:
            self._places[region % PLACES] = 0
        if self._left and self._frame[0] == WRITE and self._frame[5] == region:
            self._target = None
            self._refusal = self._refusal or f"region {region} was closed during the copy"

    def end(self) -> None:
        """Let go of the memory that payload was being received into. Call it with ``lock`` held."""
        self._target, self._left = None, 0
