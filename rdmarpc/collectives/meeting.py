"""How the members of a group meet in its store, and reach each other: each tells where it can be reached, then where its peers
may write. After a meeting its ranks take back what they have told.

This process's groups reach their members by one device (``Domain``), which opens with the first group and closes with the last.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from ..links.group.meeting import LOST, Again, Meeting, naming_its_end, restarted_by_launcher
from ..links.group.members import Claim
from ..options import RpcBackendOptions, open_by
from ..transport import Channel, PeerLost, RdmaError, TransferTimeout, exchange
from .signature import Mismatch

_CONNECT_S = 20.0
_LOOK_S = 0.05


class Domain:
    """The device by which this process's groups reach their members, and the channels to them. One a process. Thread-safe. Two
    members have one channel, whatever groups they share; the one whose token is smaller opens it."""

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


def _enter(make: Callable[[], Domain]) -> Domain:
    """The domain of this process, made if there is none. Every ``_enter`` needs one ``_leave``."""
    global _domain
    with _lock:
        if _domain is None or _domain.device.closed:
            _domain = make()
        _domain.users += 1
        return _domain


def _leave(domain: Domain) -> None:
    """A group has ended: the last one closes the device."""
    global _domain
    with _lock:
        domain.users -= 1
        if domain.users > 0:
            return
        if _domain is domain:
            _domain = None
    domain.close()


_made = itertools.count()
_SLOTS = 8 << 20
"""Bytes of a rank's slots for one kind of lanes that have carried large messages. Many: then a rank whose core is taken from it
for a while holds up nobody."""
_LANE = 4 << 20
"""Bytes of those in one direction of a lane, at most."""
_FEW = 128 << 10, 256 << 10
"""Bytes of a rank's slots for collectives, and for pairs, before that."""
_DEPTHS = 2, 8
"""How many slots these are in a direction of a lane. The second is how many small messages nobody has to wait for."""
_LEAST, _FAR, _MOST = 4 << 10, 16 << 10, 128 << 10
"""Bytes of a piece: at least, at least where members are on several hosts, and at most."""
ERROR, LEFT = "E", "L"
"""The first letter of a notice: the group has failed, or its sender has left it."""
_FAILED = "failed"
"""The key of what a rank tells that cannot join."""
_GRACE_S = 0.05
_LAST = "open"
"""What ranks tell last."""


def named(ranks: Sequence[int]) -> str:
    """Ranks, for people: 0-3, 8."""
    runs = [[rank for _, rank in run] for _, run in itertools.groupby(enumerate(ranks), lambda each: each[1] - each[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


class LaneMeeting(Meeting):
    """The members of one group at its store, and the lanes between them. ``timeout`` in seconds."""

    def __init__(
        self, store: dist.Store, rank: int, ranks: Sequence[int], timeout: float, options: RpcBackendOptions, job: Any
    ) -> None:
        """``ranks``: what torch calls the members; texts call them so, too. ``rank``: the place of this one among them.
        ``job``: see ``Ranks``."""
        known = _channels(job)
        super().__init__(store, rank, ranks, named(ranks), timeout)
        self._options = options
        self._known = {place: known[each] for place, each in enumerate(ranks) if each in known}
        self.channels = dict(self._known)
        """To members, by place, as far as there are any yet."""
        self._keys_told: list[str] = []

    def tell(self, key: str, text: str) -> None:
        super().tell(key, text)
        self._keys_told.append(key)

    # -- failures

    @property
    def _others_failures(self) -> bool:
        """Whether what stands in the store as a failure may be one of an earlier life."""
        return self.store is self.base and restarted_by_launcher()

    def look(self, absent: Sequence[int]) -> None:
        with naming_its_end(self.missing):
            self.check()
            super().look(absent)

    def check(self) -> None:
        """Raise ``PeerLost`` if another rank has told that it could not join."""
        with naming_its_end():
            if not self._others_failures and self.store.check([_FAILED]):
                raise PeerLost(json.loads(bytes(self.store.get(_FAILED)))[1])

    def lost(self, rank: int) -> PeerLost | None:
        """A member's channel says so, or, as long as there is none, its process has ended."""
        if (channel := self.channels.get(rank)) is None:
            return super().lost(rank)
        if (error := channel.error) is None:
            return None
        return PeerLost(f"rank {self.ranks[rank]} {LOST}: {error.message}", peer=channel.peer)

    def tell_failure(self, error: BaseException) -> None:
        """Tell the ranks that wait for this one why it does not join, unless one has told already."""
        text = error.message if isinstance(error, RdmaError) else str(error)
        with contextlib.suppress(dist.DistError):
            if not self._others_failures and not self.store.check([_FAILED]):
                why = f"rank {self.ranks[self.rank]} could not join the group: {type(error).__name__}: {text}"
                self.store.set(_FAILED, json.dumps([self.rank, why]))

    # -- who meets

    def enter(self) -> None:
        """Claim this rank."""
        with naming_its_end():
            if self.store.check([_FAILED]) and json.loads(bytes(self.store.get(_FAILED)))[0] == self.rank:
                self.store.delete_key(_FAILED)  # of an earlier process with this rank, or an earlier try
        self.claim(f"rank {self.rank} of group {next(_made)}", self._options)

    def gives_way(self, first: Claim) -> bool:
        return True  # the last one has the rank: another one that waits sees that

    def taken(self, other: Claim) -> Exception:
        return Mismatch(f"two processes joined the group as rank {self.ranks[self.rank]}: {self.mine.pid} and {other.pid}")

    def misfit(self, theirs: str) -> Exception:
        mine = f"rank {self.ranks[self.rank]} makes a group of the ranks {self.group}"
        return Mismatch(f"{mine}, and another rank one of {theirs}")

    def domain(self) -> Domain:
        """The domain of this process, when every rank is claimed. Raises as ``begin``."""
        self.channels = dict(self._known)
        secret = self.begin()
        kind = os.environ.get("RDMARPC_COLLECTIVES_DEVICE", self.transport(self._options))
        return _enter(lambda: Domain(secret, kind, self._options))

    def _sizes(self, kind: int) -> tuple[int, tuple[int, int]]:
        """Bytes of a piece in a lane of this kind, and its slots in each direction, at first and later."""
        others, depth = self.size - 1, _DEPTHS[kind]
        near = self.hosts == 1
        room = _FEW[kind] if near else _SLOTS // 8
        piece = max(_LEAST if near else _FAR, min(_MOST, room // others // (depth if near else 1) // 4096 * 4096))
        return piece, (depth, max(depth, min(_SLOTS // others, _LANE) // piece))

    def lanes(self, domain: Domain, kinds: int) -> list[dict[int, exchange.Lane]]:
        """``kinds`` lanes to every other member, open: for collectives, and for pairs."""
        mine = json.dumps([domain.token, domain.device.address.decode()])
        made: list[dict[int, exchange.Lane]] = [{} for _ in range(kinds)]
        for rank, text in enumerate(self.all("member", mine)):
            if rank == self.rank:
                continue
            token, address = json.loads(text)
            check = partial(self.look, [rank])
            called = f"rank {self.ranks[rank]}"
            channel = self.channels[rank] = domain.channel(token, address.encode(), called, self.timeout, check)
            for kind, lanes in enumerate(made):
                numbers = domain.take_numbers(channel)
                lanes[rank] = exchange.Lane(domain.device, channel, *self._sizes(kind), domain.bell, numbers)
        offers = {rank: [lanes[rank].offer() for lanes in made] for rank in made[0]}
        told = [json.loads(text) for text in self.all("lanes", json.dumps(offers))]
        for rank in made[0]:
            for lanes, offer in zip(made, told[rank][str(self.rank)], strict=True):
                lanes[rank].open(offer)
        return made

    def end(self) -> None:
        """Nobody's memory is given back before all have opened it. Then take back what nobody needs any more: a process that
        joins under one of these ranks later must not find it."""
        self.settled = True  # others may take their claims back
        self.all(_LAST, "")
        with contextlib.suppress(RuntimeError):  # of a store that cannot, or has ended
            self.base.delete_key(f"claim/{self.rank}")
            for key in self._keys_told:
                if not key.startswith(_LAST):
                    self.store.delete_key(key)


def _channels(job: Any) -> dict[int, Channel]:
    """The channels to the processes of a job, by rank. Its ranks are processes for as long as it lasts; those of a group with a
    store of its own are not."""
    if job is None or (domain := _domain) is None:
        return {}
    members = getattr(job, "members", None)
    lanes = members.lanes[0] if isinstance(members, Ranks) else {}
    return {**domain.jobs.get(job, {}), **{rank: lane.channel for rank, lane in lanes.items()}}


def has_left(lane: exchange.Lane) -> bool:
    """Of a member that was not lost: whether it has left the group."""
    return lane.notice().startswith(LEFT) or lane.channel.error is not None


class Ranks:
    """A group's members as this one reaches them: lanes for collectives, and lanes for pairs."""

    def __init__(
        self, store: dist.Store, rank: int, ranks: Sequence[int], timeout: float, options: RpcBackendOptions | None, job: Any
    ) -> None:
        """``ranks``: what torch calls the members; texts call them so, too. ``rank``: the place of this one among them.
        ``job``: the group whose ranks these are, ``None`` for a group that counts its own."""
        self.rank, self.size, self.ranks = rank, len(ranks), ranks
        self.domain: Domain | None = None
        self.lanes: list[dict[int, exchange.Lane]] = [{}, {}]
        self.streams: exchange.Streams | None = None
        self._told = False
        if self.size == 1:
            return
        meeting = LaneMeeting(store, rank, ranks, timeout, options or RpcBackendOptions(), job)
        try:
            meeting.enter()
            while not self._meet(meeting):
                self.close("")
        except BaseException as error:
            try:
                if isinstance(error, PeerLost):
                    meeting.check()  # the peer may have told why it ended
                meeting.tell_failure(error)
            finally:
                self.close("")
            raise
        if job is not None and self.domain is not None:
            self.domain.jobs.setdefault(job, {}).update({ranks[place]: each for place, each in meeting.channels.items()})

    def _meet(self, meeting: LaneMeeting) -> bool:
        """``False`` if another process has come in the place of one that had claimed a rank."""
        try:
            self.domain = meeting.domain()
            self.lanes = meeting.lanes(self.domain, 2)
            self.streams = exchange.streams(self.domain.device, self.rank, self.lanes[0], self.domain.bell)
            meeting.end()
        except Again:
            return False
        return True

    def look(self, gone: Callable[[], PeerLost | None], during: str = "") -> None:
        """Raise that a member was lost, or what it says went wrong; then what ``gone`` gives, if a member has left that is
        needed. A member may leave because another was lost, and be the first to know: so a leaving is looked at twice."""
        self._check(during)
        if gone() is not None:
            time.sleep(_GRACE_S)
            self._check(during)
            if (error := gone()) is not None:
                raise error

    def _check(self, during: str) -> None:
        for rank, lane in self.lanes[0].items():
            notice, lost = lane.notice(), lane.channel.error
            if notice.startswith(ERROR):
                kind, _, text = notice[1:].partition(":")
                raise next((each for each in RdmaError.__subclasses__() if each.__name__ == kind), RdmaError)(text)
            if lost is not None and lost.status != "CLOSED" and not notice.startswith(LEFT):
                raise PeerLost(f"rank {self.ranks[rank]} was lost{during}: {lost.message}", peer=lane.channel.peer)

    def cause(self, error: BaseException, during: str = "") -> BaseException:
        """What to raise for an error of the use of a channel: if that had ended, what its member had told before, or that
        another one was lost. As ``look``, which looks twice."""
        if isinstance(error, PeerLost):
            for pause in (0.0, _GRACE_S):
                time.sleep(pause)
                try:
                    self._check(during)
                except RdmaError as found:
                    return found
        return error

    def tell(self, text: str) -> None:
        """Leave a notice at every member that is there. The last one counts."""
        self._told = True
        for lane in self.lanes[0].values():
            if lane.channel.error is None:
                with contextlib.suppress(RdmaError):
                    lane.tell(text)

    def tell_failure(self, error: BaseException) -> None:
        """Leave at every member why the group has failed: they raise an error of the same class."""
        known = isinstance(error, RdmaError)
        message = error.message if isinstance(error, RdmaError) else f"{type(error).__name__}: {error}"
        if not message.startswith("rank "):
            message = f"rank {self.ranks[self.rank]}: {message}"
        self.tell(f"{ERROR}{type(error).__name__ if known else RdmaError.__name__}:{message}")

    def close(self, farewell: str) -> None:
        """Leave the group. Ranks that were told why it failed are told nothing else. Idempotent."""
        domain, self.domain = self.domain, None
        if domain is None:
            return
        if farewell and not self._told:
            self.tell(farewell)
        lanes = [lane for kind in self.lanes for lane in kind.values()]
        for lane in lanes:
            lane.close()
        self.streams, self.lanes = None, [{}, {}]
        domain.keep(lanes)
        _leave(domain)
