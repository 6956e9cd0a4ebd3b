"""Several RDMA ports as one: large copies are parted over all of them, everything else goes by the first.

``verbs://mlx5_0,mlx5_1``: a ``VerbsDevice`` for each port, on one memory, and a channel for each between two peers, which have
to name as many. Descriptors, notifications and small copies are those of the first, the *main* channel. A copy of
``STRIPE_MIN`` bytes or more is one part a port, side by side; its notification follows when all parts are done, from a thread
that waits for them (nothing orders packets of one port after those of another, so none of them can carry it). That costs some
0.1 ms, which is why small copies are not parted.

A connection is the side channels first, each with the *token* of the connection in its hello, then the main one with the same:
so its ``on_connect`` finds the others there. When one port's channel is lost, all are.
"""

from __future__ import annotations

import queue
import secrets
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from ..channel import Channel, Local, Pair, Transfer, Window, Work, check_notify, sort_pair
from ..device import Device, DeviceOptions
from ..errors import AuthenticationError, NotSupported, PeerLost, RdmaError, TransferTimeout, fresh, kept
from ..memory.arena import Pool
from ..region import RemoteRegion, local_bytes
from ..timeouts import of_socket
from .channel import VerbsChannel
from .device import VerbsDevice

STRIPE_MIN = 4 << 20
"""Bytes of a transfer from which on it is parted."""
_PAGE = 4096
_SCHEME = b"stripes:"
_HELLO = struct.Struct("<QB")  # token, and which channel it is: 0 is the main one


class StripedDevice(Device):
    """See the module, and ``Device``. ``places``: the ports (``nic/ports``), the main one first."""

    def __init__(
        self,
        places: Sequence[str],
        options: DeviceOptions,
    ) -> None:
        super().__init__("verbs", options)
        self._sides: dict[int, dict[int, VerbsChannel]] = {}  # of connections that are being made, by token
        self._striped: dict[VerbsChannel, StripedChannel] = {}
        self.rails: list[VerbsDevice] = []
        each = replace(options, memory=self.memory, arena_limit=None, on_connect=self._met)
        try:
            for place in places:
                self.rails.append(VerbsDevice(place, each))
        except BaseException:
            self.close()
            raise
        self.port = self.rails[0].port
        for rail in self.rails:
            rail.door.join(self._arrived, self._gone)

    @property
    def address(self) -> bytes:
        return _SCHEME + b",".join(rail.address for rail in self.rails)

    def explain(self) -> str:
        head = f"verbs: {len(self.rails)} ports side by side; copies of {STRIPE_MIN >> 20} MiB and more are parted over them"
        return "\n".join([head, *self.memory.explain(), *(rail.explain() for rail in self.rails)])

    def counters(self) -> dict[str, int]:
        """As ``Device.counters``; ``posts`` are those of all ports."""
        totals = super().counters()
        for each in (rail.counters() for rail in self.rails):
            for name in ("posts", "bytes_direct"):
                totals[name] += each[name]
        return totals

    # -- connections

    def why_not(self, peer: bytes) -> str:
        parts = peer.removeprefix(_SCHEME).split(b",")
        if not peer.startswith(_SCHEME) or len(parts) != len(self.rails):
            return f"the peer has not {len(self.rails)} ports side by side, as we have"
        return next(filter(None, (rail.why_not(part) for rail, part in zip(self.rails, parts))), "")

    def connect(self, peer: bytes, *, hello: bytes = b"", timeout: float = 5.0, pool: Pool | None = None) -> Channel:
        """As ``Device.connect``, over all ports. ``hello`` may have at most 64 KiB less 9 bytes."""
        self.check()
        if why := self.why_not(peer):
            raise NotSupported(f"verbs cannot reach {peer!r}: {why}", device="verbs")
        parts, token = peer.removeprefix(_SCHEME).split(b","), secrets.randbits(64)
        deadline = time.monotonic() + of_socket(timeout)
        made: list[VerbsChannel] = []
        try:
            for index in [*range(1, len(parts)), 0]:
                text = _HELLO.pack(token, index) + (b"" if index else hello)
                left = max(deadline - time.monotonic(), 0.001)
                made.append(self.rails[index].connect(parts[index], hello=text, timeout=left, pool=pool))
            striped = self._bind(made[-1], made[:-1], made[-1].peer_hello)
        except BaseException:
            for channel in made:
                channel.close()
            raise
        return striped

    def _met(self, channel: Channel) -> bytes:
        """A peer opens a channel of one port (its handshake's thread)."""
        assert isinstance(channel, VerbsChannel)
        if len(channel.peer_hello) < _HELLO.size:
            raise PeerLost("the peer's hello is not one of ports side by side", device="verbs", status="PROTOCOL")
        token, index = _HELLO.unpack_from(channel.peer_hello)
        with self._lock:
            if index:
                self._sides.setdefault(token, {})[index] = channel
                return b""
            sides = self._sides.pop(token, {})
        if sorted(sides) != list(range(1, len(self.rails))):
            raise PeerLost("the channels of the other ports are not there", device="verbs", status="PROTOCOL")
        striped = self._bind(channel, [sides[at] for at in sorted(sides)], channel.peer_hello[_HELLO.size :])
        return self.door.greet(striped)

    def _bind(self, main: VerbsChannel, sides: Sequence[VerbsChannel], hello: bytes) -> StripedChannel:
        if any(side.peer_key != main.peer_key for side in sides):
            raise AuthenticationError("the channels of one connection are of several peers", device="verbs", status="PROTOCOL")
        striped = StripedChannel(self, [main, *sides], hello)
        striped.own_pool = main.pool
        with self._lock:
            self._striped.update(dict.fromkeys(striped.rails, striped))
            self._channels.add(striped)
        for channel in striped.rails:
            if channel.error is not None:  # before anybody could tell us
                self._lose(striped, channel.error)
                raise fresh(channel.error)
        return striped

    def _arrived(self, channel: Channel) -> None:
        striped = self._striped.get(channel)  # type: ignore[call-overload]
        if striped is not None and striped.rails[0] is channel:
            self.door.arrived(striped)

    def _gone(self, channel: Channel) -> None:
        striped = self._striped.get(channel)  # type: ignore[call-overload]
        if striped is None:
            with self._lock:
                self._sides = {t: sides for t, sides in self._sides.items() if channel not in sides.values()}
        elif channel.error is not None and self._lose(striped, channel.error):
            self.on_lost(striped)

    def _lose(self, striped: StripedChannel, error: RdmaError) -> bool:
        """End all channels of a striped channel, because one of them is lost. ``False`` if it had ended before."""
        ended = striped.end(error)
        for channel in striped.rails:
            channel.end(error)
        return ended

    def forget(self, striped: StripedChannel) -> None:
        with self._lock:
            for channel in striped.rails:
                self._striped.pop(channel, None)
            self._retire(striped)

    def _shut(self) -> None:
        for rail in self.rails:
            rail.close()

    def _forked(self) -> None:
        """Each rail hears of it."""


class StripedChannel(Channel):
    """See the module, and the contract in ``channel``. ``rails``: the channels of the ports, the main one first."""

    registered_only = True

    def __init__(self, device: StripedDevice, rails: Sequence[VerbsChannel], hello: bytes) -> None:
        super().__init__(device)
        self.rails, self.peer_hello, self.peer_key = rails, hello, rails[0].peer_key
        self.port = rails[0].port
        self._device = device
        self._owed: queue.SimpleQueue[tuple[Sequence[Work], int] | None] = queue.SimpleQueue()
        self._told = threading.Condition()
        self._unannounced = 0
        self._announcer: threading.Thread | None = None

    @property
    def peer(self) -> str:
        return self.rails[0].peer

    @peer.setter
    def peer(self, name: str) -> None:
        for rail in self.rails:
            rail.peer = name

    def own(self, pool: Pool) -> None:
        for channel in (self, *self.rails):  # those that are connected already are told as it grows
            channel.own_pool = pool

    # -- copies

    def memcpy(self, dst: Local | RemoteRegion, src: Local | RemoteRegion, *, notify: int | None = None) -> Work:
        return self.prepare([(dst, src)], notify=notify, once=True).post()

    def prepare(self, pairs: Sequence[Pair], *, notify: int | None = None, once: bool = False) -> Transfer:
        self.check()
        check_notify(notify)
        sides = [sort_pair(dst, src) for dst, src in pairs]
        if sum(remote.nbytes for remote, _, _ in sides) < STRIPE_MIN:
            return self.rails[0].prepare(pairs, notify=notify, once=once)
        return StripedTransfer(self, sides, notify, once=once)

    def window(self, remote: RemoteRegion, local: torch.Tensor, *, notify: int) -> Window:
        self.check()
        return self.rails[0].window(remote, local, notify=notify)

    def record(self, imm: int) -> int:
        return self.rails[0].record(imm)

    def announce(self, works: Sequence[Work], imm: int) -> None:
        """Notify when these are done."""
        with self._told:
            self._unannounced += 1
            if self._announcer is None:
                self._announcer = threading.Thread(target=self._announce, name="rdmarpc-stripes", daemon=True)
                self._announcer.start()
        self._owed.put((works, imm))

    def _announce(self) -> None:
        while (owed := self._owed.get()) is not None:
            works, imm = owed
            try:
                for work in works:
                    work.wait()
                self.rails[0].notify(imm)
            except RdmaError:
                pass  # the channel has ended, or ends, and its waiters are told
            except BaseException as error:
                self.rails[0].break_off(error, "telling of a copy over several ports")
            with self._told:
                self._unannounced -= 1
                self._told.notify_all()

    def fence(self, timeout: float | None = None) -> None:
        self.check()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._told:
            if not self._told.wait_for(lambda: not self._unannounced or self.error is not None, timeout):
                raise TransferTimeout(f"not all arrived within {timeout} s", peer=self.peer, device="verbs")
        for rail in self.rails:
            rail.fence(None if deadline is None else max(deadline - time.monotonic(), 0.0))

    def totals(self) -> tuple[int, int]:
        return 0, 0  # the rails count

    # -- the end

    def end(self, error: RdmaError) -> bool:
        """Make every use of this channel fail with ``error`` from now on. ``False`` if it had ended before."""
        with self._told:
            if self.error is not None:
                return False
            self.error = kept(error)
            self._owed.put(None)
            self._told.notify_all()
        self._device.forget(self)
        return True

    def abort(self, timeout: float = 5.0) -> None:
        self.end(PeerLost("the channel was aborted", peer=self.peer, device="verbs", status="ABORTED"))
        for rail in self.rails:
            rail.abort(timeout)

    def close(self) -> None:
        with self._told:
            left = max(self._device.close_deadline() - time.monotonic(), 0.0)
            self._told.wait_for(lambda: not self._unannounced or self.error is not None, left)
        self.end(PeerLost("the channel was closed here", peer=self.peer, device="verbs", status="CLOSED"))
        for rail in self.rails:
            rail.close()


class StripedWork(Work):
    """One post under way: a part on each rail."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Work]) -> None:
        self._parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        for part in self._parts:
            part.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))

    def exception(self) -> RdmaError | None:
        return next(filter(None, (part.exception() for part in self._parts)), None)


class StripedTransfer(Transfer):
    """Each copy in as many parts as there are rails, page by page."""

    __slots__ = ("__weakref__", "_bounds", "_channel", "_imm", "_parts")

    def __init__(
        self, channel: StripedChannel, sides: Sequence[tuple[RemoteRegion, torch.Tensor, bool]], imm: int | None, *, once: bool
    ) -> None:
        self._channel, self._imm = channel, imm
        self._bounds = [_bounds(remote.nbytes, len(channel.rails)) for remote, _, _ in sides]
        self._parts: list[Transfer] = []
        for number, rail in enumerate(channel.rails):
            pairs: list[Pair] = []
            for (remote, tensor, write), bounds in zip(sides, self._bounds):
                far, near = remote[bounds[number]], _bytes(tensor)[bounds[number]]
                pairs.append((far, near) if write else (near, far))
            self._parts.append(rail.prepare(pairs, once=once))

    def post(self) -> Work:
        works = [part.post() for part in self._parts]
        if self._imm is not None:
            self._channel.announce(works, self._imm)
        return StripedWork(works)

    def rebind(self, index: int, tensor: torch.Tensor) -> None:
        nbytes, asked = local_bytes(tensor)[1], self._bounds[index][-1].stop
        if nbytes != asked:
            raise ValueError(f"copy {index} was prepared for {asked} bytes, got {nbytes}")
        for part, piece in zip(self._parts, self._bounds[index]):
            part.rebind(index, _bytes(tensor)[piece])

    def unbind(self, index: int) -> None:
        for part in self._parts:
            part.unbind(index)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _bounds(nbytes: int, count: int) -> list[slice]:
    """``count`` ranges that make up ``nbytes``, in whole pages but for the last."""
    size = -(-nbytes // (count * _PAGE)) * _PAGE
    cuts = [min(number * size, nbytes) for number in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(cuts)]
