"""How the members of a group meet in its store: each tells where it can be reached, then where its peers may write."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from ..group.job_secret import INSECURE, USERS, Claim, agree, claim
from ..group.lives import Lives, restarted_by_launcher, runs
from ..options import RpcBackendOptions
from ..transport import PeerLost, RdmaError, TransferTimeout
from ..transport.exchange.lane import Lane
from ..transport.exchange.streams import Streams, streams
from . import domain as domains
from .domain import Domain
from .signature import Mismatch

_made = itertools.count()
_PIECES, _LEAST, _MOST = 1 << 20, 16 << 10, 128 << 10
_SLOTS, _FEWEST, _DEEPEST = 8 << 20, 4, 32
"""Bytes of a rank's slots for one kind of lanes, and how many a lane has. Many: then a rank whose core is taken from it for a
while holds up nobody."""
ERROR, LEFT = "E", "L"
"""The first letter of a notice: the group has failed, or its sender has left it."""
_FAILED = "failed"
"""The key of what a rank tells that cannot join."""
_GRACE_S = 0.05
_LOOK_S, _LAST_LOOK_S = 0.0005, 0.02


@contextlib.contextmanager
def _naming_its_end() -> Iterator[None]:
    """``PeerLost`` if the store ends."""
    try:
        yield
    except dist.DistError as error:
        raise PeerLost("the group's store ended before every rank had joined", hint=str(error).partition("\n")[0]) from None


@dataclass(frozen=True)
class Member:
    token: str
    address: bytes
    pid: int
    group: str
    """The ranks of the group (``named``)."""

    def dump(self) -> str:
        return json.dumps([self.token, self.address.decode(), self.pid, self.group])

    @staticmethod
    def load(text: bytes) -> Member:
        token, address, pid, group = json.loads(text)
        return Member(token, address.encode(), pid, group)


def named(ranks: Sequence[int]) -> str:
    """Ranks, for people: 0-3, 8."""
    parts: list[str] = []
    for _, run in itertools.groupby(enumerate(ranks), lambda each: each[1] - each[0]):
        found = [rank for _, rank in run]
        parts.append(f"{found[0]}-{found[-1]}" if len(found) > 1 else str(found[0]))
    return ", ".join(parts)


class Meeting:
    """The members of one group at its store. ``timeout`` in seconds."""

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], timeout: float, options: RpcBackendOptions) -> None:
        """``ranks``: what torch calls the members; texts call them so, too. ``rank``: the place of this one among them."""
        self.rank, self.size, self.timeout, self.options = rank, len(ranks), timeout, options
        self._ranks = ranks
        self._store = store
        known = domains.current() if dist.is_initialized() else None  # ranks of an earlier job are no ranks of this one
        found = {place: known.known(each) for place, each in enumerate(ranks)} if known is not None else {}
        self._channels = {place: channel for place, channel in found.items() if channel is not None}
        """To members, as far as there are any yet."""
        self._claims: list[Claim] = []
        self._ours = not restarted_by_launcher()
        """Whether the store has nothing of earlier lives (``Lives``)."""

    def all(self, kind: str, mine: str) -> list[bytes]:
        """What every member tells as ``kind``, in rank order. Raises ``TransferTimeout`` that names who is missing."""
        self._store.set(f"{kind}/{self.rank}", mine)
        keys = [f"{kind}/{rank}" for rank in range(self.size)]
        found: list[bytes] = []

        def told() -> bool:
            if self._store.check(keys):
                found.extend(bytes(self._store.get(key)) for key in keys)
            else:
                self._look(keys)
            return bool(found)

        self._until(told, lambda: [f"rank {each}" for each, key in zip(self._ranks, keys) if not self._store.check([key])])
        return found

    def _look(self, keys: Sequence[str]) -> None:
        """Raise ``PeerLost`` if a member that has not told this yet was lost."""
        for place, key in enumerate(keys):
            lost = self._loss(place)
            if lost is not None and not self._store.check([key]):
                raise lost

    def _loss(self, place: int) -> PeerLost | None:
        """What to raise if a member was lost: its channel says so, or, as long as there is none, its process has ended."""
        channel, text = self._channels.get(place), f"rank {self._ranks[place]} was lost before it had joined the group"
        if channel is not None:
            error = channel.error
            return None if error is None else PeerLost(f"{text}: {error.message}", peer=channel.peer)
        if not self._claims or place == self.rank or runs(self._claims[place], self._claims[self.rank]) is not False:
            return None
        return PeerLost(f"{text}: process {self._claims[place].pid} has ended", hint="its own output may say why")

    def _check_member(self, place: int) -> None:
        """Raise if a rank has told that it could not join, or this one was lost."""
        self.check()
        if (lost := self._loss(place)) is not None:
            raise lost

    def _until(self, ready: Callable[[], bool], missing: Callable[[], list[str]]) -> None:
        deadline, pause = time.monotonic() + self.timeout, _LOOK_S
        with _naming_its_end():
            while not ready():
                self.check()
                if time.monotonic() > deadline:
                    raise TransferTimeout(f"no sign of {', '.join(missing())} within {self.timeout:g} s")
                time.sleep(pause)
                pause = min(2 * pause, _LAST_LOOK_S)

    def check(self) -> None:
        """Raise ``PeerLost`` if another rank has told that it could not join."""
        with _naming_its_end():
            if self._ours and self._store.check([_FAILED]):
                raise PeerLost(bytes(self._store.get(_FAILED)).decode())

    def tell_failure(self, error: BaseException) -> None:
        """Tell the ranks that wait for this one why it does not join, unless one has told already."""
        text = error.message if isinstance(error, RdmaError) else str(error)
        with contextlib.suppress(dist.DistError):
            if self._ours and not self._store.check([_FAILED]):
                why = f"{type(error).__name__}: {text}"
                self._store.set(_FAILED, f"rank {self._ranks[self.rank]} could not join the group: {why}")

    def domain(self) -> Domain:
        """The domain of this process. Ranks agree on what they prove themselves with. Raises ``AuthenticationError``."""
        mine, secret = claim(f"rank {self.rank} of group {next(_made)}", self.rank, self.options)
        if restarted_by_launcher():  # the store has what the workers of earlier lives told
            lives = Lives(self._store, self.size, mine)
            self._until(lives.agreed, lambda: lives.missing)
            self._store = dist.PrefixStore(str(lives.number), self._store)
            self._ours = True
        claims = self._claims = [Claim.load(text) for text in self.all("claim", mine.dump())]
        agreed = agree(claims)
        if agreed == INSECURE:
            if self.rank == 0:
                self._store.set("secret", secrets.token_hex(32))
            self._until(lambda: self._store.check(["secret"]), lambda: [f"rank {self._ranks[0]}"])
            secret = bytes(self._store.get("secret"))
        kind = self.options.transport
        if kind == "auto" and len({each.host for each in claims}) == 1:
            kind = "shm"
        kind = os.environ.get("RDMARPC_COLLECTIVES_DEVICE", kind)
        return domains.enter(lambda: Domain(b"" if agreed == USERS else secret, kind, self.options))

    def _members(self, domain: Domain) -> list[Member]:
        """Raises ``Mismatch`` unless this process is the one of its rank, and all make the same group."""
        me = Member(domain.token, domain.device.address, os.getpid(), named(self._ranks))
        members = [Member.load(text) for text in self.all("member", me.dump())]
        mine, other = self._ranks[self.rank], members[self.rank]
        if other.group == me.group and other != me:
            raise Mismatch(f"two processes joined the group as rank {mine}: {me.pid} and {other.pid}")
        for each in members:
            if each.group != me.group:
                raise Mismatch(f"rank {mine} makes a group of the ranks {me.group}, and another rank one of {each.group}")
        return members

    def lanes(self, domain: Domain, kinds: int) -> list[dict[int, Lane]]:
        """``kinds`` lanes to every other member, open."""
        members = self._members(domain)
        piece = max(_LEAST, min(_MOST, (_PIECES // max(self.size - 1, 1)) // 4096 * 4096))
        depth = max(_FEWEST, min(_DEEPEST, _SLOTS // max(self.size - 1, 1) // piece))
        made: list[dict[int, Lane]] = [{} for _ in range(kinds)]
        for rank, member in enumerate(members):
            if rank == self.rank:
                continue
            called = self._ranks[rank]
            check = partial(self._check_member, rank)
            channel = domain.channel(member.token, member.address, f"rank {called}", self.timeout, check)
            domain.tokens[called], self._channels[rank] = member.token, channel
            for lanes in made:
                lanes[rank] = Lane(domain.device, channel, piece, depth, domain.bell)
        offers = {rank: [lanes[rank].offer() for lanes in made] for rank in made[0]}
        told = [json.loads(text) for text in self.all("lanes", json.dumps(offers))]
        for rank in made[0]:
            for lanes, offer in zip(made, told[rank][str(self.rank)], strict=True):
                lanes[rank].open(offer)
        return made


def look(lanes: Mapping[int, Lane], ranks: Sequence[int], gone: Callable[[], PeerLost | None], during: str = "") -> None:
    """Raise that a member was lost, or what it says went wrong; then what ``gone`` gives, if a member has left that is needed.
    A member may leave because another was lost, and be the first to know: so a leaving is looked at twice."""
    _check(lanes, ranks, during)
    if gone() is not None:
        time.sleep(_GRACE_S)
        _check(lanes, ranks, during)
        if (error := gone()) is not None:
            raise error


def _check(lanes: Mapping[int, Lane], ranks: Sequence[int], during: str) -> None:
    for rank, lane in lanes.items():
        notice, lost = lane.notice(), lane.channel.error
        if notice.startswith(ERROR):
            kind, _, text = notice[1:].partition(":")
            raise next((each for each in RdmaError.__subclasses__() if each.__name__ == kind), RdmaError)(text)
        if lost is not None and lost.status != "CLOSED" and not notice.startswith(LEFT):
            raise PeerLost(f"rank {ranks[rank]} was lost{during}: {lost.message}", peer=lane.channel.peer)


def has_left(lane: Lane) -> bool:
    """Of a member that was not lost: whether it has left the group."""
    return lane.notice().startswith(LEFT) or lane.channel.error is not None


class Ranks:
    """A group's members as this one reaches them: lanes for collectives, and lanes for pairs."""

    def __init__(
        self, store: dist.Store, rank: int, ranks: Sequence[int], timeout: float, options: RpcBackendOptions | None = None
    ) -> None:
        """``ranks``: what torch calls the members; texts call them so, too. ``rank``: the place of this one among them."""
        self.rank, self.size, self.ranks = rank, len(ranks), ranks
        self.domain: Domain | None = None
        self.lanes: list[dict[int, Lane]] = [{}, {}]
        self.streams: Streams | None = None
        self._told = False
        if self.size == 1:
            return
        meeting = Meeting(store, rank, ranks, timeout, options or RpcBackendOptions())
        try:
            self.domain = meeting.domain()
            self.lanes = meeting.lanes(self.domain, 2)
            self.streams = streams(self.domain.device, rank, self.lanes[0], self.domain.bell)
            meeting.all("open", "")  # nobody's memory is given back before all have opened it
        except BaseException as error:
            try:
                if isinstance(error, PeerLost):
                    meeting.check()  # the peer may have told why it ended
                meeting.tell_failure(error)
            finally:
                self.close("")
            raise

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
        for lanes in self.lanes:
            for lane in lanes.values():
                lane.close()
        self.streams = None
        domains.leave(domain)
