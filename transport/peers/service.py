"""The thread of a device that accepts peers, hears them on their sockets, and looks for those that are silent.

Each peer that connects to the listener is welcomed on a thread of its own. Until a peer has proven that it belongs here it is
*unproven*: a stranger must not delay the peers of this job. There are at most ``MAX_UNPROVEN`` of these: if one more comes, the
oldest is hung up on. A peer of this job proves itself within a moment, so it is hardly ever the oldest; if it is, it connects
again.

The proof, and the rest of a handshake, have a deadline each. The thread that serves the device hangs up when it passes, however
slowly the peer trickles; so everything in between may use the socket as if it had for ever.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import PeerLost
from .guard import REFUSED, nobody
from .heartbeat import Looks

IN, OUT = select.POLLIN, select.POLLOUT
"""What a socket is watched for, of poll and of epoll."""
MAX_UNPROVEN = 128
_JOIN_S = 5.0
_RETRY_S = _END_PAUSE_S = 0.05
_LOOK_S = 0.25
_NO_DESCRIPTOR_S = 0.02


class Handshakes:
    """The handshakes of one device, in both directions. Owns the listener. Thread-safe; ``accept`` and ``hang_up_on_the_slow``
    are called only by the thread that serves the device.

    ``_welcome`` of the device runs on a thread for each connection; it has to call ``proven``. ``_admits`` tells whether a peer
    may connect at all, as far as the system shows that at once. ``wake`` makes the serving thread ask again how long it may
    sleep (``pause``).
    """

    def __init__(self, listener: socket.socket, device: Any, wake: Callable[[], None]) -> None:
        listener.setblocking(False)
        self.listener, self._wake = listener, wake
        self._welcome, self._admits, self._guard = device._welcome, device._admits, device.guard
        self._lock = threading.Lock()
        self._deadlines: dict[socket.socket, float] = {}
        self._unproven: dict[socket.socket, None] = {}  # the oldest first

    # -- by the thread that serves the device

    @property
    def pause(self) -> float | None:
        """The seconds that the serving thread may sleep before a handshake can be too slow; ``None``: there is none."""
        return _LOOK_S if self._deadlines else None

    def accept(self) -> None:
        """Accept one connection, if one has come."""
        try:
            sock, _ = self.listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, *REFUSED):
                self._guard.note(error, "accepting a connection")
                time.sleep(_NO_DESCRIPTOR_S)  # the peer stays in the queue, and must not make us spin
            return
        try:
            if not self._admits(sock):
                sock.close()
                return
            with self._lock:
                if len(self._unproven) >= MAX_UNPROVEN:
                    self._hang_up(next(iter(self._unproven)))
                self._unproven[sock] = None
            threading.Thread(target=self._shake_hands, args=(sock,), name="rdmarpc-handshake", daemon=True).start()
        except BaseException as error:  # also: no more threads
            self._guard.note(error, "taking a connection in")
            self.proven(sock)
            sock.close()

    def hang_up_on_the_slow(self) -> None:
        if not self._deadlines:
            return
        now = time.monotonic()
        with self._lock:
            for sock in [sock for sock, deadline in self._deadlines.items() if now > deadline]:
                self._hang_up(sock)

    def _hang_up(self, sock: socket.socket) -> None:
        """End a stream. The thread that waits on it then reads the end, and closes the socket. The caller holds the lock, so
        that the socket is not closed meanwhile."""
        self._unproven.pop(sock, None)
        self._deadlines.pop(sock, None)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    # -- by the thread of a handshake

    def _shake_hands(self, sock: socket.socket) -> None:
        try:
            self._welcome(sock)
        except BaseException as error:  # of a callback above us: the peer's channel has ended with it
            self._guard.note(error, "welcoming a peer")
            self.proven(sock)
            sock.close()
        finally:
            self.proven(sock)

    def proven(self, sock: socket.socket) -> None:
        """Take a peer out of the unproven ones: it has proven itself, or its handshake has failed. From then on it is not hung
        up on for what ``limited`` said. Idempotent. Call it before the socket is closed."""
        with self._lock:
            self._unproven.pop(sock, None)
            if sock in self._deadlines:
                self._deadlines[sock] = math.inf

    @contextlib.contextmanager
    def limited(self, sock: socket.socket, deadline: float) -> Iterator[None]:
        """Inside the block the peer has until ``deadline`` (``time.monotonic``); then the stream is ended. ``PeerLost`` at the
        end of the block if it was, also where the peer had answered by then."""
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        with self._lock:
            self._deadlines[sock] = deadline
        self._wake()
        try:
            yield
        finally:
            with self._lock:
                hung_up = self._deadlines.pop(sock, None) is None
        if hung_up:
            raise PeerLost("the handshake was ended here: it took too long")

    # -- the end

    def hang_up(self) -> None:
        """Hang up on all peers that are in a handshake."""
        with self._lock:
            for sock in {**self._deadlines, **self._unproven}:
                self._hang_up(sock)

    def end(self) -> None:
        """Release the callbacks, after ``hang_up``. Connections that come from now on are closed."""
        self._welcome, self._wake, self._admits = socket.socket.close, nobody, bool

    def drop(self) -> None:
        """In a forked child, close our copies of the sockets. Takes no lock, as a thread of the parent may hold it."""
        for sock in {**self._deadlines, **self._unproven}:
            sock.close()
        self.listener.close()


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
        self.await_events: Callable[[socket.socket, int], None] = self._epoll.modify
        """Watch a socket for ``IN``, for ``OUT``, for both or none from now on. Any thread, while the socket is open."""
        self._watched: dict[int, tuple[socket.socket, Any]] = {}
        self._asked: deque[tuple[int, Any]] = deque()
        self._stop_at = 0.0
        self.handshakes = Handshakes(listener, device, self.wake)
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
        """Have ``_hear(channel)`` called when something comes. Excluded from ``forget`` by the caller, as all of ``forget``."""
        self._epoll.register(sock, IN)
        self._watched[sock.fileno()] = sock, channel
        self.wake()

    def attend(self, sock: socket.socket, channel: Any) -> None:
        """Have ``_hear(channel)`` called soon, if it is still watched. Any thread."""
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
