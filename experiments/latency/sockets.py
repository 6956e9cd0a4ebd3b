"""The floor of ``tcp``: bytes to the other process and back over a plain TCP connection of loopback, by blocking calls.

Twice: in Python, and in a compiled loop that makes the same system calls as a C program would.
"""

from __future__ import annotations

import mmap
import socket
import statistics
import time
from multiprocessing.connection import Connection

from rdmarpc.transport import CFunction, compiled, i32, i64, now

from ..harness.floor import address_of

TIMEOUT_S = 60
GROUPS = 20
_ALL = 0x100  # MSG_WAITALL

_send = CFunction("send", i64(i32, i64, i64, i32))
_recv = CFunction("recv", i64(i32, i64, i64, i32))


@compiled(i64(i64, i64, i64))
def send_all(fd: int, at: int, nbytes: int) -> int:
    """Returns how many bytes were not sent."""
    left = nbytes
    while left > 0:
        sent = _send(i32(fd), at + nbytes - left, left, i32(0))
        if sent <= 0:
            return left
        left -= sent
    return left


@compiled(i64(i64, i64, i64, i64, i64))
def ping_pong(fd: int, at: int, nbytes: int, rounds: int, first: int) -> int:
    """So many bytes go there and back ``rounds`` times. Returns the nanoseconds of all rounds, or -1 if the stream ended."""
    start = now()
    for _ in range(rounds):
        if first != 0 and send_all(fd, at, nbytes) != 0:
            return -1
        if _recv(i32(fd), at, nbytes, i32(_ALL)) != nbytes:
            return -1
        if first == 0 and send_all(fd, at, nbytes) != 0:
            return -1
    return now() - start


class Sockets:
    """Two processes make one at the same time over their ends of ``link``. The first one measures."""

    def __init__(self, link: Connection, first: bool) -> None:
        self.first = first
        if first:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                listener.settimeout(TIMEOUT_S)
                link.send(listener.getsockname()[1])
                self._sock, _ = listener.accept()
        else:
            self._sock = socket.create_connection(("127.0.0.1", link.recv()), TIMEOUT_S)
        self._sock.setblocking(True)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def compiled(self, nbytes: int, rounds: int) -> float:
        """Microseconds one way: of so many there and back the mean, of ``GROUPS`` of them the median. Both sides call it at the
        same time."""
        memory = mmap.mmap(-1, nbytes)
        taken = []
        for _ in range(GROUPS):
            taken.append(ping_pong(self._sock.fileno(), address_of(memory), nbytes, rounds, int(self.first)))
            if taken[-1] < 0:
                raise ConnectionError("the other end of the plain connection has gone")
        return statistics.median(taken) / rounds / 2e3

    def python(self, nbytes: int, rounds: int) -> float:
        """As ``compiled``."""
        memory = memoryview(bytearray(nbytes))
        return statistics.median(self._there_and_back(memory, rounds) for _ in range(GROUPS)) / rounds / 2e3

    def _there_and_back(self, memory: memoryview, rounds: int) -> int:
        """Nanoseconds."""
        start = time.perf_counter_ns()
        for _ in range(rounds):
            if self.first:
                self._sock.sendall(memory)
            if self._sock.recv_into(memory, len(memory), socket.MSG_WAITALL) != len(memory):
                raise ConnectionError("the other end of the plain connection has gone")
            if not self.first:
                self._sock.sendall(memory)
        return time.perf_counter_ns() - start

    def close(self) -> None:
        self._sock.close()
