"""The thread of a device that accepts peers, hears them on their sockets, and looks for those that are silent."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import RdmaError
from ..sandboxed import REFUSED, naming
from .ended import nobody
from .guard import Guard, broken_by
from .handshakes import Handshakes
from .heartbeat import Looks

_JOIN_S = 5.0
_RETRY_S = 0.05


class Service:
    """Owns its listener, whose connections go to ``welcome`` (``Handshakes``). ``hear`` (with what was given to ``watch``) and
    ``look`` (the same, and the seconds that this look counts for) run on the thread of the service, and must not block. What
    they raise is an end of that channel alone: ``lost`` is called with it and why."""

    def __init__(
        self,
        name: str,
        listener: socket.socket,
        looks: Looks,
        *,
        welcome: Callable[[socket.socket], None],
        hear: Callable[[Any], None],
        look: Callable[[Any, float], None],
        lost: Callable[[Any, RdmaError], None],
        guard: Guard,
        admits: Callable[[socket.socket], bool] = lambda sock: True,
    ) -> None:
        self._name, self._looks = name, looks
        self._hear, self._look, self._lost = hear, look, lost
        self._guard = guard
        with naming("socketpair", device=name):
            self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._selector = _selector(listener, self._woken)
        self._watched: dict[socket.socket, Any] = {}
        self._stopping = False
        self.handshakes = Handshakes(listener, welcome, wake=self.wake, guard=guard, admits=admits)
        self._thread = threading.Thread(target=self._run, name=f"rdmarpc-{name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Have the thread look again how long it may sleep."""
        with contextlib.suppress(OSError):  # it has enough to wake it, or has ended
            self._wake.send(b"\0")

    def watch(self, sock: socket.socket, channel: Any) -> None:
        """Have ``hear(channel)`` called when something comes. Excluded from ``forget`` by the caller, as all of ``forget``."""
        self._selector.register(sock, selectors.EVENT_READ, channel)
        self._watched[sock] = channel
        self.wake()

    def forget(self, sock: socket.socket) -> bool:
        """Watch it no more, before it is closed. ``False`` if it was not watched."""
        if self._watched.pop(sock, None) is None:
            return False
        try:
            self._selector.unregister(sock)
        except (KeyError, ValueError):
            return False
        return True

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._serve()
            except BaseException as error:
                if self._stopping:
                    return
                self._guard.note(error, "serving peers")
                time.sleep(_RETRY_S)

    def _serve(self) -> None:
        pauses = [pause for pause in (self._looks.interval, self.handshakes.pause) if pause is not None]
        for key, _ in self._selector.select(min(pauses, default=None)):
            if key.fileobj is self.handshakes.listener:
                self.handshakes.accept()
            elif key.fileobj is self._woken:
                self._woken.recv(4096)
            else:
                self._attend(key.fileobj, "hearing a peer", self._hear, key.data)
        self.handshakes.hang_up_on_the_slow()
        if seconds := self._looks.due():
            for sock, channel in list(self._watched.items()):
                self._attend(sock, "looking after a peer", self._look, channel, seconds)

    def _attend(self, sock: Any, doing: str, step: Callable[..., None], channel: Any, *args: Any) -> None:
        """Whatever goes wrong with one peer ends its channel and nothing else."""
        try:
            step(channel, *args)
        except BaseException as error:
            if not isinstance(error, RdmaError):
                self._guard.note(error, doing)
            try:
                self._lost(channel, broken_by(error, doing, peer=channel.peer, device=self._name))
            except BaseException as another:
                self._guard.note(another, "ending a channel")
                self.forget(sock)

    def stop(self) -> None:
        """Ends the thread, and everything it listened to. What it was given to call is let go."""
        self._stopping = True
        self.handshakes.hang_up()
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)
        self.drop()
        self.handshakes.end()
        self._hear = self._look = self._lost = nobody

    def drop(self) -> None:
        """Close our own sockets: the last thing, and all that a forked child does."""
        self._selector.close()
        self.handshakes.drop()
        for sock in (self._wake, self._woken):
            sock.close()


def _selector(*socks: socket.socket) -> selectors.BaseSelector:
    """What listens to these: Linux's epoll, or POSIX's poll where that is forbidden."""
    for kind in (selectors.EpollSelector, selectors.PollSelector):
        selector = None
        try:
            selector = kind()
            for sock in socks:
                selector.register(sock, selectors.EVENT_READ)
            selector.select(0)
            return selector
        except OSError as error:
            if selector is not None:
                selector.close()
            if error.errno not in REFUSED or kind is selectors.PollSelector:
                raise
    raise AssertionError
