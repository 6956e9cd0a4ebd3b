"""One worker's end of all bundles of one model: a poller, and who of its peers is lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..transport import GIVEN_UP, PeerLost, Poller, RdmaError

if TYPE_CHECKING:
    from ..transport import Channel, Device

_GRACE_S, _REASON_S, _LOOK_S = 0.5, 0.05, 0.002
_SLICE_S = 0.25
"""Between two looks at whether the peers still live (their loss is usually announced before)."""


class Station:
    """``poll`` and everything that sends belong to one thread at a time; ``lost`` to any."""

    def __init__(self, name: str, device: Device, channels: Callable[[str], Channel], timeout: float) -> None:
        self.name, self.device, self.timeout = name, device, timeout
        self._channels = channels
        self.peers: dict[str, Channel] = {}
        self.poller: Poller = device.poller()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self.expected: set[str] = set()
        """Workers that are to become peers: their loss is one already."""
        self._lost: dict[str, RdmaError] = {}
        self._lost_since = 0.0
        """When a loss was first seen (``time.monotonic``); 0: none is known."""
        self.closed = False

    def channel(self, worker: str) -> Channel:
        if worker not in self.peers:
            self.peers[worker] = self._channels(worker)
        return self.peers[worker]

    def take_number(self, channel: Channel, handler: Callable[[int], None]) -> int:
        """A number that the peer of this channel may notify from now on. ``handler`` runs on the thread that polls, with the
        count of new notifications."""
        number = channel.take_numbers(1)
        self._handlers[self.poller.add(channel, number)] = handler
        return number

    def poll(self, timeout: float) -> None:
        """Handle everything that has come, or what comes first within ``timeout`` seconds (at most a quarter of one). Raises
        ``PeerLost`` when a peer is."""
        news = self.poller.wait(min(timeout, _SLICE_S))
        if news is None:
            self.check()
        while news is not None:
            row, count = news
            if row == Poller.KICK:
                self.check()
            elif row in self._handlers:
                self._handlers[row](count)
            news = self.poller.take()

    # -- losses

    def check(self) -> None:
        """Raise ``PeerLost``, with the worker's name, if the connection to any peer broke."""
        first = self._first_lost()
        if first is None:
            return
        worker, error = first
        why = error.message.removeprefix(f"worker {worker} is lost: ").replace(f"worker {worker} cannot", "it cannot", 1)
        if error.status == GIVEN_UP:
            why = why.replace("this worker", self.name)
        text, device = f"worker {worker!r} is lost: {why}", self.device.name
        raise PeerLost(text, peer=worker, device=device, status=error.status, hint=error.hint)

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """In the block, a ``PeerLost`` names the worker that was lost first, not the address of a connection: the error of a
        post names its own peer, which may have left because another one died."""
        try:
            yield
        except PeerLost as error:
            # Channels know their peer by its address.
            named = next((worker for worker, channel in list(self.peers.items()) if channel.peer == error.peer), error.peer)
            if all(worker != named for worker, _ in self._lost_peers()):
                self.lost(named, error)  # a post finds the end of a connection before the device's thread has heard of it
            try:
                self.check()
            except PeerLost as lost:
                if lost.peer != error.peer:
                    raise lost from error
            raise

    def _first_lost(self) -> tuple[str, RdmaError] | None:
        """A worker that leaves because another one died may be heard first, and the reason of either a moment later."""
        while lost := self._lost_peers():
            self._lost_since = self._lost_since or time.monotonic()  # once for each loss, however often it is looked at
            worker, error = min(lost, key=lambda item: item[1].status == "CLOSED")
            waited = time.monotonic() - self._lost_since
            known = error.status != "CLOSED" and (worker in self._lost or waited > _REASON_S)
            if known or waited > _GRACE_S:
                return worker, error
            time.sleep(_LOOK_S)
        self._lost_since = 0.0
        return None

    def _lost_peers(self) -> list[tuple[str, RdmaError]]:
        broken = {worker: channel.error for worker, channel in list(self.peers.items()) if channel.error is not None}
        return list({**broken, **self._lost}.items()) if broken or self._lost else []

    def lost(self, worker: str, error: RdmaError) -> None:
        """Somebody noticed that a worker is gone. Any thread."""
        if (worker in self.peers or worker in self.expected) and not self.closed:
            self._lost[worker] = error
            self.poller.kick()

    def forget(self, worker: str) -> None:
        """A peer that has done its part: its loss is none any more."""
        self.expected.discard(worker)
        self.peers.pop(worker, None)
        self._lost.pop(worker, None)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.poller.close()
