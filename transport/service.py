"""The thread of a device that accepts peers, hears them on their sockets, and looks for those that are silent."""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from .heartbeat import Looks

_MAX_HANDSHAKES = 128
_JOIN_S = 5.0


class Acceptor:
    """Takes what comes to a listener: ``welcome`` runs on a thread of its own for each connection (at most 128 at once), so
    that a silent stranger blocks nobody."""

    def __init__(self, listener: socket.socket, welcome: Callable[[socket.socket], None]) -> None:
        self._listener, self._welcome = listener, welcome
        self._handshakes = threading.BoundedSemaphore(_MAX_HANDSHAKES)

    def accept(self) -> None:
        """One connection, when there is one."""
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(0.02)  # out of descriptors: the stranger stays in the queue, and must not make us spin
            return
        if not self._handshakes.acquire(blocking=False):
            sock.close()
            return
        try:
            threading.Thread(target=self._shake_hands, args=(sock,), name="rdmarpc-handshake", daemon=True).start()
        except RuntimeError:  # no more threads
            self._handshakes.release()
            sock.close()

    def _shake_hands(self, sock: socket.socket) -> None:
        try:
            self._welcome(sock)
        finally:
            self._handshakes.release()


class Service:
    """Owns its listener, whose connections go to ``welcome`` (``Acceptor``). ``hear`` (with what was given to ``watch``) and
    ``look`` (with the seconds that this look counts for) run on the thread of the service, and must not block."""

    def __init__(
        self,
        name: str,
        listener: socket.socket,
        looks: Looks,
        *,
        welcome: Callable[[socket.socket], None],
        hear: Callable[[Any], None],
        look: Callable[[float], None],
    ) -> None:
        self._listener, self._looks = listener, looks
        self._acceptor, self._hear, self._look = Acceptor(listener, welcome), hear, look
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"rdmarpc-{name}", daemon=True)
        self._thread.start()

    def watch(self, sock: socket.socket, channel: Any) -> None:
        """Have ``hear(channel)`` called when something comes. Excluded from ``forget`` by the caller, as all of ``forget``."""
        self._selector.register(sock, selectors.EVENT_READ, channel)
        self._wake.send(b"\0")

    def forget(self, sock: socket.socket) -> bool:
        """Watch it no more, before it is closed. ``False`` if it was not watched."""
        try:
            self._selector.unregister(sock)
        except (KeyError, ValueError):
            return False
        return True

    def _run(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(self._looks.interval):
                if key.fileobj is self._listener:
                    self._acceptor.accept()
                elif key.fileobj is self._woken:
                    self._woken.recv(4096)
                else:
                    self._hear(key.data)
            if seconds := self._looks.due():
                self._look(seconds)

    def stop(self) -> None:
        """Ends the thread, and everything it listened to."""
        self._stopping = True
        self._wake.send(b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)
        self.drop()

    def drop(self) -> None:
        """Close our own sockets: the last thing, and all that a forked child does."""
        self._selector.close()
        for sock in (self._listener, self._wake, self._woken):
            sock.close()
