"""The I/O thread of a ``tcp`` device.

It accepts, receives for all channels that no waiting thread reads, sends what posting threads left over, and looks for peers
that are silent. It never blocks. ``peers/service`` is the same for devices whose channels leave nothing to be sent.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..errors import PeerLost, RdmaError
from ..peers.ended import nobody
from ..peers.guard import Guard, broken_by
from ..peers.handshakes import Handshakes
from ..peers.heartbeat import Looks
from ..sandboxed import naming
from .channel import TcpChannel
from .wire import END_BROKEN, END_SILENT

_LINGER_S = 1.0  # for the peers to hang up too
_END_PAUSE_S, _RETRY_S, _JOIN_S = 0.05, 0.05, 5.0
_IN = select.EPOLLIN


class Loop:
    """Calls ``lost`` with each channel that broke, and ``dropped`` with each one that it serves no more, on its thread. Owns
    the listener from ``start`` on."""

    def __init__(
        self,
        listener: socket.socket,
        looks: Looks,
        guard: Guard,
        *,
        welcome: Callable[[socket.socket], None],
        lost: Callable[[TcpChannel], None],
        dropped: Callable[[TcpChannel], None],
    ) -> None:
        self.handshakes = Handshakes(listener, welcome, wake=self.wake, guard=guard)
        self._looks, self._guard, self._lost, self._dropped = looks, guard, lost, dropped
        self._by_fd: dict[int, TcpChannel] = {}
        self._asked: deque[TcpChannel] = deque()
        self._stop_at = 0.0
        self._lock = threading.RLock()
        with naming("eventfd", device="tcp"):
            self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            with naming("epoll", device="tcp"):
                self._epoll = select.epoll()
                self._epoll.register(listener, _IN)
                self._epoll.register(self._woken, _IN)
                self._epoll.poll(0)
        except BaseException:
            os.close(self._woken)
            raise
        self._thread = threading.Thread(target=self._serve, name="rdmarpc-tcp", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_current(self) -> bool:
        """Whether the caller is this thread."""
        return threading.current_thread() is self._thread

    def add(self, channel: TcpChannel) -> None:
        """Serve this channel, too."""
        with self._lock:
            self._by_fd[channel.sock.fileno()] = channel
            self._epoll.register(channel.sock, _IN)

    @property
    def looks(self) -> bool:
        """Whether it looks for silent peers."""
        return self._looks.interval is not None

    def channels(self) -> list[TcpChannel]:
        with self._lock:
            return list(self._by_fd.values())

    def watch(self, sock: socket.socket, readable: bool, writable: bool) -> None:
        """Whether to read what comes for that socket's channel, and to call its ``flush`` when there is room. While the socket
        is open."""
        self._epoll.modify(sock, (_IN if readable else 0) | (select.EPOLLOUT if writable else 0))

    def attend(self, channel: TcpChannel) -> None:
        """Read what has come for this channel, soon. Any thread."""
        self._asked.append(channel)
        self.wake()

    def wake(self) -> None:
        with self._lock:
            if self._woken >= 0:
                os.eventfd_write(self._woken, 1)

    def _serve(self) -> None:
        while not self._stop_at or (self._by_fd and time.monotonic() < self._stop_at):
            try:
                self._serve_once()
            except BaseException as error:
                self._guard.note(error, "serving peers")
                time.sleep(_RETRY_S)
        for channel in self.channels():
            self._drop(channel)
        self.discard()
        self.handshakes.listener.close()
        self._lost = self._dropped = nobody

    def _serve_once(self) -> None:
        pauses = (self._looks.interval, self.handshakes.pause, _END_PAUSE_S if self._stop_at else None)
        listener = self.handshakes.listener.fileno()
        for fd, events in self._epoll.poll(min((pause for pause in pauses if pause is not None), default=None)):
            if fd == listener:
                self.handshakes.accept()
            elif fd == self._woken:
                os.eventfd_read(self._woken)
                self._read_asked()
            elif (channel := self._by_fd.get(fd)) is not None:
                self._attend(channel, "hearing a peer", self._hear, channel, events)
        self.handshakes.hang_up_on_the_slow()
        if seconds := self._looks.due():
            # What came until now has been received before; what a waiting thread was to read is now.
            for channel in self.channels():
                self._attend(channel, "hearing a peer", self._hear, channel, _IN)
                self._attend(channel, "looking after a peer", self._look, channel, seconds)

    def _attend(self, channel: TcpChannel, doing: str, step: Callable[..., None], *args: Any) -> None:
        """Whatever goes wrong with one peer ends its channel and nothing else."""
        try:
            step(*args)
        except BaseException as error:
            if not isinstance(error, RdmaError):
                self._guard.note(error, doing)
            broke = channel.end(broken_by(error, doing, peer=channel.peer, device="tcp"), goodbye=END_BROKEN)
            self._lose(channel, broke)

    def _read_asked(self) -> None:
        while self._asked:
            channel = self._asked.popleft()
            if self._by_fd.get(channel.sock.fileno()) is channel:
                self._attend(channel, "hearing a peer", self._hear, channel, _IN)

    def _look(self, channel: TcpChannel, seconds: float) -> None:
        """Give the peer up if nothing came of it for too long. Should it ever run again, it finds our goodbye."""
        if channel.error is None and self._looks.too_long(channel.look(seconds)):
            error = PeerLost(self._looks.text(), peer=channel.peer, device="tcp", status="SILENT")
            self._lose(channel, channel.end(error, goodbye=END_SILENT))

    def _hear(self, channel: TcpChannel, events: int) -> None:
        if events & select.EPOLLOUT:
            channel.outbox.flush()
        if events & ~select.EPOLLOUT and (error := channel.reader.receive()) is not None:
            self._lose(channel, channel.end(error))

    def _lose(self, channel: TcpChannel, broke: bool) -> None:
        """Finish a channel that has ended: stop watching it, and tell its loss if it ``broke``, so was not closed here."""
        try:
            self._drop(channel)
        finally:
            if broke:
                self._lost(channel)

    def _drop(self, channel: TcpChannel) -> None:
        with self._lock:
            if self._by_fd.pop(channel.sock.fileno(), None) is None:
                return
            with contextlib.suppress(OSError):
                self._epoll.unregister(channel.sock)
        self._dropped(channel)
        channel.release()

    def stop(self) -> None:
        """Let the peers hang up, for a second, then end the thread."""
        self.handshakes.hang_up()
        self._stop_at = time.monotonic() + _LINGER_S
        self.wake()
        if not self.is_current():
            self._thread.join(timeout=_JOIN_S)
        self.handshakes.end()

    def discard(self) -> None:
        """Give back what it waits on: at the thread's end, or where it was never started."""
        with self._lock:
            self._epoll.close()
            if self._woken >= 0:
                os.close(self._woken)
            self._woken = -1

    def drop(self) -> None:
        """In a forked child: close our copies of the sockets."""
        for channel in self._by_fd.values():
            channel.sock.close()
        self._epoll.close()
        self.handshakes.drop()
