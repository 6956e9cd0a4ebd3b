"""Connections that are being made: how strangers are kept from delaying the peers of this job.

Each peer that connects to the listener is welcomed on a thread of its own. Until a peer has proven that it belongs here it is
*unproven*. There are at most ``MAX_UNPROVEN`` of these: if one more comes, the oldest is hung up on. A peer of this job proves
itself within a moment, so it is hardly ever the oldest; if it is, ``reach`` connects again.

The proof, and the rest of a handshake, have a deadline each. The thread that serves the device hangs up when it passes, however
slowly the peer trickles; so everything in between may use the socket as if it had for ever.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from ..errors import GONE, PeerLost, RdmaError, TransferTimeout
from ..sandboxed import REFUSED
from .ended import nobody
from .guard import Guard, hint_for

Stream = TypeVar("Stream")
HANDSHAKE_S, SETUP_S = 5.0, 60.0
"""The seconds that an acceptor gives a peer to prove itself, and then for the rest of its handshake. A busy machine may take
the processor from a worker for as long as the first; how long a worker waits for us is up to that worker."""
MAX_UNPROVEN = 128
EXPECTED = (RdmaError, ConnectionError, TimeoutError)
"""Errors that a peer may cause as it connects. They are not reported here."""
_LOOK_S = 0.25
_NO_DESCRIPTOR_S = 0.02
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.01, 0.25
_HALVES_S = 2.9  # half of it is enough for a heart to hang up


class Handshakes:
    """The handshakes of one device, in both directions. Owns the listener. Thread-safe; ``accept`` and ``hang_up_on_the_slow``
    are called only by the thread that serves the device.

    ``welcome`` runs on a thread for each connection; it has to call ``proven``. ``admits`` tells whether a peer may connect at
    all, as far as the system shows that at once. ``wake`` makes the serving thread ask again how long it may sleep (``pause``).
    """

    def __init__(
        self,
        listener: socket.socket,
        welcome: Callable[[socket.socket], None],
        *,
        wake: Callable[[], None],
        guard: Guard,
        admits: Callable[[socket.socket], bool],
    ) -> None:
        listener.setblocking(False)
        self.listener = listener
        self._welcome, self._wake, self._guard, self._admits = welcome, wake, guard, admits
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
        """Take a peer out of the unproven ones: it has proven itself, or its handshake has failed. Idempotent. Call it before
        the socket is closed."""
        with self._lock:
            self._unproven.pop(sock, None)

    @contextlib.contextmanager
    def limited(self, sock: socket.socket, deadline: float) -> Iterator[None]:
        """Inside the block the peer has until ``deadline`` (``time.monotonic``); then the stream is ended."""
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        with self._lock:
            self._deadlines[sock] = deadline
        self._wake()
        try:
            yield
        finally:
            with self._lock:
                self._deadlines.pop(sock, None)

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


def dial(where: str, timeout: float, *, device: str) -> socket.socket:
    """Connect to ``HOST:PORT`` within ``timeout`` seconds. Raises ``PeerLost`` if nobody listens there, ``TimeoutError``, and
    ``OSError`` if this process lacks something, such as file descriptors."""
    host, _, port = where.rpartition(":")
    try:
        return socket.create_connection((host.strip("[]"), int(port)), timeout)
    except OSError as error:
        if isinstance(error, TimeoutError) or hint_for(error):
            raise
        status = "NOBODY" if isinstance(error, ConnectionRefusedError) else ""
        why = "this system forbids the connection" if error.errno in REFUSED else "nobody listens there"
        raise PeerLost(f"{why}: {error}", peer=where, device=device, status=status) from None


def reach(dial: Callable[[float], socket.socket], prove: Callable[..., Stream], deadline: float) -> Stream:
    """Connect until both ends have proven themselves, and return the stream that ``prove`` returns. ``dial(seconds)`` connects,
    ``prove(sock, deadline=)`` does the handshake. If the peer hangs up meanwhile, to make way for others or because its Python
    is held up, both are tried again until the ``deadline`` (``time.monotonic``); then ``TransferTimeout`` has the status
    ``BUSY``. So they are after half of the time: one that was accepted before Python was held up is not hung up on."""
    pause, hung_up = _FIRST_PAUSE_S, False
    while True:
        left = max(deadline - time.monotonic(), 0.001)
        sock, limit = dial(left), time.monotonic() + (left / 2 if left > _HALVES_S else left)
        try:
            return prove(sock, deadline=limit)
        except BaseException as error:
            sock.close()
            again = isinstance(error, (ConnectionError, PeerLost, TransferTimeout)) and getattr(error, "status", "") not in GONE
            late = time.monotonic() + pause > deadline
            if late and hung_up and again:
                raise TransferTimeout("the peer hangs up again and again", status="BUSY") from None
            if late or not again:
                raise
        hung_up = hung_up or time.monotonic() < limit
        time.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE_S)
