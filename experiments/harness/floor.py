"""The physical floor of every latency: a warm memcpy and a flag handed to and fro between two processes."""

import ctypes
import mmap
import os
import statistics
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

from rdmarpc.transport import compiled, i64, load_acquire, memcpy, now, pause, store_release

FLAGS = 4096
"""Bytes in front of the landing place, for the flags."""
LINE = 128  # two cache lines: some processors fetch them in pairs
GROUPS = FLAGS // LINE // 2
ROUND_TRIPS = 500


@compiled(i64(i64, i64, i64, i64))
def copies(dst: int, src: int, nbytes: int, times: int) -> int:
    """The same memcpy `times` times without returning to Python."""
    for _ in range(times):
        memcpy(dst, src, nbytes)
    return 0


@compiled(i64(i64, i64, i64, i64))
def ping_pong(mine: int, theirs: int, rounds: int, first: int) -> int:
    """Two processes hand a flag to and fro `rounds` times. Both call it with the two words swapped. Returns the nanoseconds of
    all rounds. Spins without bound."""
    start = now()
    for turn in range(1, rounds + 1):
        if first != 0:
            store_release(theirs, turn)
        while load_acquire(mine) < turn:
            pause()
        if first == 0:
            store_release(theirs, turn)
    return now() - start


class Floor:
    """Memory shared by two processes, and a private source to copy from.

    Both sides make one at the same time over their ends of `link`. The mapping lives as long as the object does.
    """

    def __init__(self, link: Connection, first: bool, nbytes: int) -> None:
        if first:
            fd = os.memfd_create("floor")
            os.ftruncate(fd, FLAGS + nbytes)
            send_handle(link, fd, None)
            self._source = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.source = address_of(self._source)
            ctypes.memset(self.source, 1, nbytes)
        else:
            fd = recv_handle(link)
        self._shared = mmap.mmap(fd, FLAGS + nbytes)
        os.close(fd)
        self.shared = address_of(self._shared)
        self.nbytes = nbytes
        self.first = first

    def copy(self, nbytes: int, times: int) -> None:
        """Copies the private source into the shared mapping, `times` times; only the first side has a source."""
        copies(self.shared + FLAGS, self.source, nbytes, times)

    def clear_flags(self) -> None:
        """Clear the flags. One side calls this before every `ping_pong`, while neither side is in it."""
        ctypes.memset(self.shared, 0, FLAGS)

    def ping_pong(self) -> float:
        """Microseconds for the flag to go to the other process and back: the median over groups of round trips.

        Both sides call it at the same time.
        """
        elapsed_ns = []
        for group in range(GROUPS):  # each has its own pair of flags, because the kernel counts from 1
            mine, theirs = self.shared + group * LINE, self.shared + (GROUPS + group) * LINE
            if not self.first:
                mine, theirs = theirs, mine
            elapsed_ns.append(ping_pong(mine, theirs, ROUND_TRIPS, int(self.first)))
        return statistics.median(elapsed_ns) / ROUND_TRIPS / 1e3


def address_of(memory: mmap.mmap) -> int:
    """Where a writable mapping begins; valid while `memory` is."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
