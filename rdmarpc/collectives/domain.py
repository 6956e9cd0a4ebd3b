"""The device by which this process's groups reach their members, and the channels to them. It opens with the first group and
closes with the last."""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from ..links.group.meeting import LOST
from ..options import RpcBackendOptions, open_by
from ..transport import Channel, PeerLost, TransferTimeout, exchange

_CONNECT_S = 20.0
_LOOK_S = 0.05


class Domain:
    """One a process. Thread-safe. Two members have one channel, whatever groups they share; the one whose token is smaller
    opens it."""

    def __init__(self, secret: bytes, kind: str, options: RpcBackendOptions) -> None:
        """``secret``: empty for that of this user on this host."""
        self.token = secrets.token_hex(8)
        self.secret, self.kind = secret, kind
        self.jobs: weakref.WeakKeyDictionary[Any, dict[int, Channel]] = weakref.WeakKeyDictionary()
        """By the group of a whole job: the channels to its ranks that its subgroups have met."""
        self._channels: dict[str, Channel] = {}
        self._kept: list[exchange.Lane] = []
        """Closed lanes whose memory and numbers the peer may still write."""
        self._numbers: weakref.WeakKeyDictionary[Channel, list[int]] = weakref.WeakKeyDictionary()
        """By channel: first numbers of lanes that nobody writes any more."""
        self._changed = threading.Condition()
        self.device = open_by(options, kind, secret, self._arrived)
        self.device.pin()
        self.bell = self.device.memory.take_bell()
        """Number of the bell that all news of groups ring."""
        self.users = 0

    def _arrived(self, channel: Channel) -> bytes:
        with self._changed:
            self._channels[channel.peer_hello.decode()] = channel
            self._changed.notify_all()
        return self.token.encode()

    def channel(self, token: str, address: bytes, name: str, timeout: float, check: Callable[[], None]) -> Channel:
        """The channel to a member. ``timeout`` in seconds. ``check`` is called while the member is waited for, and may raise.
        Raises ``PeerLost``, ``TransferTimeout``."""
        deadline = time.monotonic() + timeout
        with self._changed:
            found = self._channels.get(token)
        if found is not None and found.error is None:
            return found
        if self.token < token:
            made = self._connect(address, name, min(timeout, _CONNECT_S))
            made.peer = f"{name} ({made.peer})"
            with self._changed:
                other = self._channels.get(token)
                if other is None or other.error is not None:
                    self._channels[token] = made
                return self._channels[token]
        while (found := self._come(token)) is None:
            check()
            if time.monotonic() > deadline:
                raise TransferTimeout(f"{name} did not connect within {timeout:g} s", peer=name, device=self.device.name)
        if found.error is not None:
            raise PeerLost(f"the connection of {name} has ended", peer=name, device=self.device.name)
        if name not in found.peer:
            found.peer = f"{name} ({found.peer})"
        return found

    def take_numbers(self, channel: Channel) -> int:
        """The first of a lane's numbers. Raises ``ValueError`` when too few are left."""
        self.keep(())
        with self._changed:
            if spare := self._numbers.get(channel):
                return spare.pop()
        return channel.take_numbers(exchange.NUMBERS)

    def keep(self, lanes: Iterable[exchange.Lane]) -> None:
        """Hold closed lanes until their peers write them no more, and let go of those that are so far."""
        with self._changed:
            kept, self._kept = [*self._kept, *lanes], []
            for lane in kept:
                if not lane.released:
                    self._kept.append(lane)
                elif lane.channel.error is None:
                    self._numbers.setdefault(lane.channel, []).append(lane.first)

    def _connect(self, address: bytes, name: str, timeout: float) -> Channel:
        try:
            return self.device.connect(address, hello=self.token.encode(), timeout=timeout)
        except PeerLost as error:
            text = f"{name} {LOST}: {error.message}"
            raise PeerLost(text, peer=name, device=error.device, status=error.status) from None

    def _come(self, token: str) -> Channel | None:
        """The channel that this member opens, if it comes within a moment."""
        with self._changed:
            if token not in self._channels:
                self._changed.wait(_LOOK_S)
            return self._channels.get(token)

    def close(self) -> None:
        self.device.memory.return_bell(self.bell)
        self.device.close()
        self._channels.clear()
        self._kept.clear()


_lock = threading.Lock()
_domain: Domain | None = None


def enter(make: Callable[[], Domain]) -> Domain:
    """The domain of this process, made if there is none. Every ``enter`` needs one ``leave``."""
    global _domain
    with _lock:
        if _domain is None or _domain.device.closed:
            _domain = make()
        _domain.users += 1
        return _domain


def current() -> Domain | None:
    return _domain


def leave(domain: Domain) -> None:
    """A group has ended: the last one closes the device."""
    global _domain
    with _lock:
        domain.users -= 1
        if domain.users > 0:
            return
        if _domain is domain:
            _domain = None
    domain.close()
