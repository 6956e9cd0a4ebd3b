"""Sending on a stream so that signs of life get through whatever Python does.

A *pulse* is the row of a stream in the table of its device's heart (``heartbeat``), of sixteen words, and an array of buffers
(``iovec``) beside it. A poster and the heart both send in a kernel without the GIL, and leave the row in a consistent state. So
a thread that needs the GIL back after sending does not keep the heart from beating. If the socket took half of a frame, the
heart pushes the rest, as any bytes are a sign of life.

    +0   lock    FREE (between frames, nothing is left), LEFT (buffers may be left, nobody sends), BUSY (somebody sends), CLOSED
    +8   fd      the socket
    +16  owed    bytes of a beat that the socket did not take yet; they go before anything else
    +24  every   nanoseconds between beats
    +32  due     when the next one is due (written by the heart)
    +40  pushed  bytes of the buffers that went out and that the sender was not told of yet
    +48  whole   1: where the buffers end a frame ends
    +56  base    address of the buffers
    +64  a ``struct msghdr``: name, namelen, iov (the first buffer that is not all sent), iovlen, control, controllen, flags

Invariants: (1) all words but ``lock`` are touched only by the thread that changed it from FREE or LEFT to BUSY, or that is the
one sender of a CLOSED row; (2) a beat goes out when ``lock`` was FREE, or LEFT with no buffer left and ``whole``: never inside
a frame; (3) buffers are alive until they were reported as sent, or withdrawn; (4) the descriptor is closed after ``lock``
became CLOSED, so nothing goes to another socket of the same number. The senders of a stream exclude each other by a lock of its
channel.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence

import numpy as np

from ..words import kernels
from ..words.atomics import compare_exchange, errno, load_acquire, sched_yield, store_release
from ..words.compiled import compiled
from ..words.symbols import CFunction, i32, i64, inline

ROW_WORDS = 16
MAX_BUFFERS = 512
"""How many buffers one ``Pulse.send`` takes; below IOV_MAX."""
SMALL_BYTES = 4096
"""How many bytes one ``Pulse.send_small`` takes."""
FREE, LEFT, BUSY, CLOSED = range(4)
_FLAGS = 0x40 | 0x4000  # MSG_DONTWAIT | MSG_NOSIGNAL
_EINTR, _EAGAIN = 4, 11
_KEEP, _DROP = 0, 1

_send = CFunction("send", i64(i32, i64, i64, i32))
_sendmsg = CFunction("sendmsg", i64(i32, i64, i32))


@inline
def _send_owed(row: int, frame: int, nbytes: int) -> bool:
    """Send what is left of a beat. Whether all of it is out."""
    owed = load_acquire(row + 16)
    sent = _send(i32(load_acquire(row + 8)), frame + nbytes - owed, owed, i32(_FLAGS))
    if sent > 0:
        owed -= sent
        store_release(row + 16, owed)
    return owed == 0


@inline
def _send_some(row: int) -> int:
    """One system call for the buffers. Returns bytes, 0 if there is no room, or a negative errno."""
    sent = _sendmsg(i32(load_acquire(row + 8)), row + 64, i32(_FLAGS))
    if sent < 0:
        code = errno()
        return 0 if code == _EAGAIN or code == _EINTR else -code
    left, at, count = sent, load_acquire(row + 80), load_acquire(row + 88)
    while count and left >= load_acquire(at + 8):
        left -= load_acquire(at + 8)
        at += 16
        count -= 1
    if left:
        store_release(at, load_acquire(at) + left)
        store_release(at + 8, load_acquire(at + 8) - left)
    store_release(row + 80, at)
    store_release(row + 88, count)
    return sent


@compiled(i64(i64, i64, i64, i64))
def beat(row: int, time_now: int, frame: int, nbytes: int) -> int:
    """Serve a row that is due, on the heart's thread: push the rest of a frame, or send the ``nbytes`` of a beat at
    ``frame``."""
    rest = FREE
    if compare_exchange(row, FREE, BUSY) == 0:
        rest = LEFT
        if compare_exchange(row, LEFT, BUSY) == 0:
            return 0
    if load_acquire(row + 16):
        _send_owed(row, frame, nbytes)
    elif rest == LEFT and load_acquire(row + 88):
        sent = _send_some(row)
        if sent > 0:
            store_release(row + 40, load_acquire(row + 40) + sent)
    elif rest == FREE or load_acquire(row + 48):
        store_release(row + 16, nbytes)
        _send_owed(row, frame, nbytes)
        if load_acquire(row + 16) == nbytes:
            store_release(row + 16, 0)  # no room, so the peer has unread bytes of us; or it is gone, which others notice
    store_release(row + 32, time_now + load_acquire(row + 24))
    store_release(row, rest)
    return 1


@compiled(i64(i64, i64, i64, i64, i64, i64, i64))
def push(row: int, count: int, whole: int, room: int, drop: int, frame: int, nbytes: int) -> int:
    """Send up to about ``room`` bytes of the buffers: ``count`` new ones, 0: those that are left. ``drop``: forget them then.
    Returns how many bytes went out since the last return, or a negative errno if the stream is broken."""
    closed = False
    while compare_exchange(row, FREE, BUSY) == 0 and compare_exchange(row, LEFT, BUSY) == 0:
        if load_acquire(row) == CLOSED:
            closed = True
            break
        sched_yield()  # the heart makes one system call that does not block
    if count:
        store_release(row + 80, load_acquire(row + 56))
        store_release(row + 88, count)
        store_release(row + 48, whole)
    total = load_acquire(row + 40)
    store_release(row + 40, 0)
    broken = 0
    if load_acquire(row + 16) == 0 or (room > 0 and _send_owed(row, frame, nbytes)):
        while room > 0 and load_acquire(row + 88):
            sent = _send_some(row)
            if sent <= 0:
                broken = sent
                break
            total += sent
            room -= sent
    if broken or (drop and load_acquire(row + 88)):
        store_release(row + 48, 0)
        store_release(row + 88, 0)
    done = load_acquire(row + 88) == 0 and load_acquire(row + 48) and load_acquire(row + 16) == 0
    if not closed:
        store_release(row, FREE if done else LEFT)
    return broken if broken else total


class Pulse:
    """The sending side of one stream, which beats from the moment it is made. Its methods are called under the lock that the
    senders of the stream share.

    ``row``: a row of the heart's table, which belongs to it until ``end``. ``frame``: address and size of the frame of a beat.
    """

    def __init__(self, row: np.ndarray, fd: int, every: float, frame: tuple[int, int], drop: Callable[[], None]) -> None:
        self._buffers = np.zeros((MAX_BUFFERS, 2), np.int64)
        small = np.zeros(SMALL_BYTES, np.uint8)
        self._small, self._small_at = memoryview(small), small.ctypes.data
        self._frame, self._drop = frame, drop
        self.at = row.ctypes.data
        """The address of the row."""
        row[1:] = 0
        row[1], row[3], row[6], row[7] = fd, int(every * 1e9), 1, self._buffers.ctypes.data
        kernels.store(self.at, FREE)

    def send(self, views: Sequence[bytes | memoryview], whole: bool, room: int) -> int:
        """Send about ``room`` bytes of these buffers, none of them empty, at most ``MAX_BUFFERS``; when those of the
        ``send`` before are out, or withdrawn. ``whole``: a frame ends where they end. Returns as ``resume``."""
        flat = []
        for view in views:
            flat += [np.frombuffer(view, np.uint8).__array_interface__["data"][0], len(view)]
        struct.pack_into(f"<{len(flat)}q", self._buffers, 0, *flat)
        return self._told(push(self.at, len(views), int(whole), room, _KEEP, *self._frame))

    def send_small(self, frames: bytes) -> int:
        """Send these whole frames, at most ``SMALL_BYTES``; when as ``send``. A copy goes out: that costs less than handing
        over the buffers. Returns how many bytes went out; the rest is withdrawn. ``OSError`` when the stream is broken."""
        nbytes = len(frames)
        self._small[:nbytes] = frames
        struct.pack_into("<2q", self._buffers, 0, self._small_at, nbytes)
        sent = self._told(push(self.at, 1, 1, nbytes, _KEEP, *self._frame))
        return sent if sent == nbytes else sent + self.withdraw()

    def resume(self, room: int) -> int:
        """Send more of what is left. Returns the bytes that went out since the last return, by whomever. ``OSError``
        when the stream is broken; then nothing is left."""
        return self._told(push(self.at, 0, 0, room, _KEEP, *self._frame))

    @staticmethod
    def _told(result: int) -> int:
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result

    def withdraw(self) -> int:
        """Take back the unsent buffers: they are neither sent nor read any more. Returns the bytes that went out before. If
        buffers were left, nothing goes out until the next ``send``."""
        return push(self.at, 0, 0, 0, _DROP, *self._frame)

    def close(self) -> None:
        """Stop the beats and drop the unsent buffers, before the socket is closed. ``send`` still works."""
        while not (kernels.swap_if(self.at, FREE, CLOSED) or kernels.swap_if(self.at, LEFT, CLOSED)):
            if kernels.load(self.at) == CLOSED:
                return
            time.sleep(0)

    def end(self) -> None:
        """Give the row back. Call it once, after ``close``."""
        self._drop()
