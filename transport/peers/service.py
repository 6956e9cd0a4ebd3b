"""The thread of a device that accepts peers, hears them on their sockets, and looks for those that are silent."""

from __future__ import annotations

import contextlib
import io
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..errors import PeerLost
from ..sandboxed import REFUSED
from .handshakes import Handshakes
from .heartbeat import Looks

IN, OUT = select.POLLIN, select.POLLOUT
"""What a socket is watched for, of poll and of epoll."""
_JOIN_S = 5.0
_RETRY_S = _END_PAUSE_S = 0.05


class Service:
    """Owns its listener, whose connections go to the device's ``_welcome`` (``Handshakes``), from ``start`` on. ``_hear`` (with
    what was given to ``watch``), ``_flush`` (the same; there is room to send) and ``_look`` (the same, and the seconds that the
    look counts for) of the device run on the thread of the service, and must not block. What they raise is an end of that
    channel alone (``break_off``). ``linger_s`` of the device: how long ``stop`` waits for the peers to hang
    up, too."""

    def __init__(self, device: Any, listener: socket.socket) -> None:
        """``device``: a ``ListeningDevice``."""
        self._device, self._guard = device, device.guard
        self.looks: Looks = device._looks
        self._linger_s: float = device.linger_s
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Files, not their numbers: whoever wakes a service that has ended must not write to another file.
        self._woken, self._wake = io.FileIO(woken, "r"), io.FileIO(wake, "w")
        try:
            self._epoll = self._epoll_or_poll(listener)
        except BaseException:
            self._woken.close()
            self._wake.close()
            raise
        self._watched: dict[int, tuple[socket.socket, Any]] = {}
        self._asked: deque[tuple[int, Any]] = deque()
        self._stop_at = 0.0
        self.handshakes = Handshakes(listener, device._welcome, wake=self.wake, guard=device.guard, admits=device._admits)
        self._thread = threading.Thread(target=self._run, name=f"rdmarpc-{device.name}", daemon=True)

    def _epoll_or_poll(self, listener: socket.socket) -> Any:
        """What listens to these and to all that is watched: epoll, or POSIX's poll where a sandbox forbids that."""
        epoll = None
        try:
            epoll = select.epoll()
            epoll.register(listener, IN)
            epoll.register(self._woken, IN)
            epoll.poll(0)
            return epoll
        except OSError as error:
            if epoll is not None:
                epoll.close()
            if error.errno not in REFUSED:
                raise
        poll = _Poll(self.wake)
        poll.register(listener, IN)
        poll.register(self._woken, IN)
        return poll

    def start(self) -> None:
        self._thread.start()

    def is_current(self) -> bool:
        """Whether the caller is this thread."""
        return threading.current_thread() is self._thread

    def wake(self) -> None:
        """Have the thread look again how long it may sleep."""
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self._wake.write(b"\0")  # no matter if it has enough to wake it

    def watch(self, sock: socket.socket, channel: Any) -> None:
        """Have ``hear(channel)`` called when something comes. Excluded from ``forget`` by the caller, as all of ``forget``."""
        self._epoll.register(sock, IN)
        self._watched[sock.fileno()] = sock, channel
        self.wake()

    def await_events(self, sock: socket.socket, events: int) -> None:
        """Watch a socket for ``IN``, for ``OUT``, for both or none from now on. Any thread, while the socket is open."""
        self._epoll.modify(sock, events)

    def attend(self, sock: socket.socket, channel: Any) -> None:
        """Have ``hear(channel)`` called soon, if it is still watched. Any thread."""
        self._asked.append((sock.fileno(), channel))
        self.wake()

    def forget(self, sock: socket.socket) -> bool:
        """Watch it no more, before it is closed. ``False`` if it was not watched."""
        if self._watched.pop(sock.fileno(), None) is None:
            return False
        try:
            self._epoll.unregister(sock)
        except (KeyError, ValueError, OSError):
            return False
        return True

    def _run(self) -> None:
        while not self._stop_at or (self._watched and time.monotonic() < self._stop_at):
            try:
                self._serve()
            except BaseException as error:
                self._guard.note(error, "serving peers")
                time.sleep(_RETRY_S)
        for sock, channel in list(self._watched.values()):
            closed = PeerLost("the device was closed", peer=channel.peer)
            self._attend(sock, "ending a channel", self._device.lost, channel, closed)
        self.handshakes.hang_up()  # on those that came meanwhile; their threads close them
        self.drop()
        self._device = None

    def _serve(self) -> None:
        pauses = (self.looks.interval, self.handshakes.pause, _END_PAUSE_S if self._stop_at else None)
        listener, woken = self.handshakes.listener.fileno(), self._woken.fileno()
        for fd, events in self._epoll.poll(min((pause for pause in pauses if pause is not None), default=None)):
            if fd == listener:
                self.handshakes.accept()
            elif fd == woken:
                self._woken.read(4096)
                while self._asked:
                    number, channel = self._asked.popleft()
                    if (found := self._watched.get(number)) is not None and found[1] is channel:
                        self._attend(found[0], "hearing a peer", self._device._hear, channel)
            elif (found := self._watched.get(fd)) is not None:
                if events & OUT:
                    self._attend(found[0], "sending to a peer", self._device._flush, found[1])
                if events & ~OUT:
                    self._attend(found[0], "hearing a peer", self._device._hear, found[1])
        self.handshakes.hang_up_on_the_slow()
        if seconds := self.looks.due():
            for sock, channel in list(self._watched.values()):
                self._attend(sock, "looking after a peer", self._device._look, channel, seconds)

    def _attend(self, sock: socket.socket, doing: str, step: Callable[..., None], channel: Any, *args: Any) -> None:
        """Whatever goes wrong with one peer ends its channel and nothing else."""
        try:
            step(channel, *args)
        except BaseException as error:
            try:
                self._device.break_off(channel, error, doing)
            except BaseException as another:
                self._guard.note(another, "ending a channel")
                self.forget(sock)

    def stop(self) -> None:
        """Ends the thread, which then closes what it listened to and lets go of what it was given to call."""
        self.handshakes.hang_up()
        self._stop_at = time.monotonic() + self._linger_s
        self.wake()
        if not self.is_current():
            self._thread.join(_JOIN_S)
        self.handshakes.end()

    def drop(self) -> None:
        """Close our own sockets: the last thing, and all that a forked child does. Also where the thread was never started."""
        self._epoll.close()
        self.handshakes.drop()
        self._woken.close()
        self._wake.close()


class _Poll:
    """POSIX's poll as if it were epoll: ``changed`` wakes the thread that waits, which else would not see what changed."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._poll, self._changed = select.poll(), changed
        self.unregister = self._poll.unregister

    def register(self, sock: Any, events: int) -> None:
        self._poll.register(sock, events)
        self._changed()

    modify = register

    def poll(self, timeout: float | None) -> list[tuple[int, int]]:
        return self._poll.poll(None if timeout is None else timeout * 1000)

    def close(self) -> None:
        """There is nothing to close."""
