"""How small frames are taken, and how a thread that waits for a notification, or for an answer, reads its channel's socket.

A kernel takes whole, small frames that have no more to them than words and a copy: WRITE into a place that was looked up
before, NOTIFY, ACK, BEAT. No signal handler of Python interrupts it. Any other frame stays in the socket, for ``reader``. The
I/O thread begins with this kernel too. While another thread waits and reads, the I/O thread does not watch the socket, so no
thread is woken only to wake another one. State, of 64-bit words:

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

from ..words.atomics import fence, load_acquire, memcpy, now, sched_yield, store_release
from ..words.compiled import compiled
from ..words.kernels import OK, TIMEOUT
from ..words.signals import MAX_NOTIFY, RECORD_BYTES, signal
from ..words.symbols import CFunction, i32, i64, inline
from .wire import ACK, BEAT, HEADER, LAST, LATER, NOTIFY, SILENT, WRITE

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
