"""How the members of a group meet in its store: each tells where it can be reached, then where its peers may write.

A rank is a number, and processes come and go under it: what a killed one has told may still be in the store, and a new one may
take its place while the others meet. So each process claims its rank with random digits first, and what it tells after that
stands under a digest of all claims. Whoever waits looks at the claims again, and begins anew with those that there are then.
After a meeting its ranks take back what they have told."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from ..links.group.job_secret import INSECURE, USERS, Claim, agree, claim
from ..links.group.restarts import restarted_by_launcher, runs
from ..options import RpcBackendOptions
from ..transport import Channel, PeerLost, RdmaError, TransferTimeout, exchange, nobody
from . import domain as domains
from .domain import Domain
from .signature import Mismatch

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
_LOOK_S, _LAST_LOOK_S = 0.0005, 0.02
_LAST = "open"
"""What ranks tell last."""
_CLAIMS_S = 0.1
"""How often a rank that waits looks at the claims."""


class _Changed(Exception):
    """Another process has claimed a rank: the meeting begins again."""


@contextlib.contextmanager
def _naming_its_end() -> Iterator[None]:
    """``PeerLost`` if the store ends."""
    try:
        yield
    except dist.DistError as error:
        raise PeerLost("the group's store ended before every rank had joined", hint=str(error).partition("\n")[0]) from None


def named(ranks: Sequence[int]) -> str:
    """Ranks, for people: 0-3, 8."""
    parts: list[str] = []
    for _, run in itertools.groupby(enumerate(ranks), lambda each: each[1] - each[0]):
        found = [rank for _, rank in run]
        parts.append(f"{found[0]}-{found[-1]}" if len(found) > 1 else str(found[0]))
    return ", ".join(parts)


class Meeting:
    """The members of one group at its store. ``timeout`` in seconds."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: Sequence[int],
        timeout: float,
        options: RpcBackendOptions,
        known: Mapping[int, Channel],
    ) -> None:
        """``ranks``: what torch calls the members; texts call them so, too. ``rank``: the place of this one among them.
        ``known``: channels to the processes that are members for sure, by what torch calls them."""
        self.rank, self.size, self.timeout, self.options = rank, len(ranks), timeout, options
        self._ranks = ranks
        self._base = self._store = store
        """The store, and the part of it that is for the processes that meet."""
        self._known = {place: known[each] for place, each in enumerate(ranks) if each in known}
        self.channels = dict(self._known)
        """To members, by place, as far as there are any yet."""
        self._claims: list[Claim] = []
        self._texts: list[str] = []
        self._told: list[str] = []
        self._look_again = 0.0

    def all(self, kind: str, mine: str) -> list[bytes]:
        """What every member tells as ``kind``, in rank order. Raises ``TransferTimeout`` that names who is missing."""
        self._tell(f"{kind}/{self.rank}", mine)
        # When ranks tell the last, others may take their claims back.
        return self._all_told(kind, nobody if kind == _LAST else self._look_at_claims)

    def _all_told(self, kind: str, meanwhile: Callable[[], None]) -> list[bytes]:
        """As ``all``, for what this rank has told already. ``meanwhile`` is called at each look that finds some missing."""
        keys = [f"{kind}/{rank}" for rank in range(self.size)]
        found: list[bytes] = []

        def told() -> bool:
            if self._store.check(keys):
                found.extend(bytes(self._store.get(key)) for key in keys)
            else:
                self._look(keys)
                meanwhile()
            return bool(found)

        self._until(told, keys)
        return found

    def _tell(self, key: str, text: str) -> None:
        self._store.set(key, text)
        self._told.append(key)

    def _look(self, keys: Sequence[str]) -> None:
        """Raise ``PeerLost`` if a member that has not told this yet was lost."""
        for place, key in enumerate(keys):
            lost = self._loss(place)
            if lost is not None and not self._store.check([key]):
                raise lost

    def _loss(self, place: int) -> PeerLost | None:
        """What to raise if a member was lost: its channel says so, or, as long as there is none, its process has ended."""
        channel, text = self.channels.get(place), f"rank {self._ranks[place]} was lost before it had joined the group"
        if channel is not None:
            error = channel.error
            return None if error is None else PeerLost(f"{text}: {error.message}", peer=channel.peer)
        if not self._claims or restarted_by_launcher():
            return None
        claim = self._claims[place]
        if claim.rank == self.rank or runs(claim, self._mine) is not False:
            return None
        return PeerLost(f"{text}: process {claim.pid} has ended", hint="its own output may say why")

    def _check_member(self, place: int) -> None:
        """Raise if a rank has told that it could not join, or this one was lost."""
        self.check()
        self._look_at_claims()
        if (lost := self._loss(place)) is not None:
            raise lost

    def _until(self, ready: Callable[[], bool], keys: Sequence[str]) -> None:
        """``keys``: what the ranks, in their order, have to tell for that."""
        deadline, pause = time.monotonic() + self.timeout, _LOOK_S
        with _naming_its_end():
            while not ready():
                self.check()
                if time.monotonic() > deadline:
                    missing = [f"rank {each}" for each, key in zip(self._ranks, keys) if not self._store.check([key])]
                    raise TransferTimeout(f"no sign of {', '.join(missing)} within {self.timeout:g} s")
                time.sleep(pause)
                pause = min(2 * pause, _LAST_LOOK_S)

    # -- failures

    @property
    def _others_failures(self) -> bool:
        """Whether what stands in the store as a failure may be one of an earlier life."""
        return self._store is self._base and restarted_by_launcher()

    def check(self) -> None:
        """Raise ``PeerLost`` if another rank has told that it could not join."""
        with _naming_its_end():
            if not self._others_failures and self._store.check([_FAILED]):
                raise PeerLost(json.loads(bytes(self._store.get(_FAILED)))[1])

    def tell_failure(self, error: BaseException) -> None:
        """Tell the ranks that wait for this one why it does not join, unless one has told already."""
        text = error.message if isinstance(error, RdmaError) else str(error)
        with contextlib.suppress(dist.DistError):
            if not self._others_failures and not self._store.check([_FAILED]):
                why = f"rank {self._ranks[self.rank]} could not join the group: {type(error).__name__}: {text}"
                self._store.set(_FAILED, json.dumps([self.rank, why]))

    # -- who meets

    def claim(self) -> bytes:
        """Claim this rank. The secret that this process would use. Raises ``AuthenticationError``, ``ValueError``."""
        with _naming_its_end():
            if self._store.check([_FAILED]) and json.loads(bytes(self._store.get(_FAILED)))[0] == self.rank:
                self._store.delete_key(_FAILED)  # of an earlier process with this rank, or an earlier try
        self._mine, secret = claim(f"rank {self.rank} of group {next(_made)}", self.rank, self.options)
        self._text = json.dumps([self._mine.dump(), named(self._ranks)])
        self._tell(f"claim/{self.rank}", self._text)
        return secret

    def begin(self) -> None:
        """Wait until every rank is claimed. What is told from now on is for these processes. Raises ``Mismatch`` for ranks that
        make another group, or another process with our rank."""
        self._store, self.channels = self._base, dict(self._known)

        def check_mine(held: bytes) -> None:
            if held.decode() != self._text:
                pids = f"{self._mine.pid} and {Claim.load(json.loads(held)[0]).pid}"
                raise Mismatch(f"two processes joined the group as rank {self._ranks[self.rank]}: {pids}")

        found = self._all_told("claim", lambda: check_mine(bytes(self._store.get(f"claim/{self.rank}"))))
        check_mine(found[self.rank])
        self._texts = [text.decode() for text in found]
        self._claims = [Claim.load(json.loads(text)[0]) for text in self._texts]
        mine, ours = self._ranks[self.rank], named(self._ranks)
        for text in self._texts:
            if (theirs := json.loads(text)[1]) != ours:
                raise Mismatch(f"rank {mine} makes a group of the ranks {ours}, and another rank one of {theirs}")
        self._store = dist.PrefixStore(hashlib.sha256("".join(self._texts).encode()).hexdigest()[:16], self._base)

    def _look_at_claims(self) -> None:
        """Raise ``_Changed`` if another process has claimed a rank since ``begin``."""
        now = time.monotonic()
        if now < self._look_again or self._store is self._base:
            return
        self._look_again = now + _CLAIMS_S
        with _naming_its_end():
            for rank, text in enumerate(self._texts):
                key = f"claim/{rank}"
                if self._base.check([key]) and bytes(self._base.get(key)).decode() != text:
                    raise _Changed

    def domain(self, secret: bytes) -> Domain:
        """The domain of this process. Ranks agree on what they prove themselves with. Raises ``AuthenticationError``."""
        agreed = agree(self._claims)
        if agreed == INSECURE:
            if self.rank == 0:
                self._tell("secret", secrets.token_hex(32))
            self._until(lambda: self._store.check(["secret"]), ["secret"])
            secret = bytes(self._store.get("secret"))
        kind = self.options.transport
        if kind == "auto" and len({each.host for each in self._claims}) == 1:
            kind = "shm"
        kind = os.environ.get("RDMARPC_COLLECTIVES_DEVICE", kind)
        return domains.enter(lambda: Domain(b"" if agreed == USERS else secret, kind, self.options))

    def _sizes(self, kind: int) -> tuple[int, tuple[int, int]]:
        """Bytes of a piece in a lane of this kind, and its slots in each direction, at first and later."""
        others, depth = self.size - 1, _DEPTHS[kind]
        near = len({each.host for each in self._claims}) == 1
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
            check = partial(self._check_member, rank)
            called = f"rank {self._ranks[rank]}"
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
        self.all(_LAST, "")
        with contextlib.suppress(RuntimeError):  # of a store that cannot, or has ended
            for key in self._told:
                store = self._base if key.startswith("claim/") else self._store
                if not key.startswith(_LAST):
                    store.delete_key(key)


def _channels(job: Any) -> dict[int, Channel]:
    """The channels to the processes of a job, by rank. Its ranks are processes for as long as it lasts; those of a group with a
    store of its own are not."""
    domain = domains.current()
    if job is None or domain is None:
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
        self,
        store: dist.Store,
        rank: int,
        ranks: Sequence[int],
        timeout: float,
        options: RpcBackendOptions | None = None,
        job: Any = None,
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
        known = _channels(job)
        meeting = Meeting(store, rank, ranks, timeout, options or RpcBackendOptions(), known)
        try:
            secret = meeting.claim()
            while not self._meet(meeting, secret):
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

    def _meet(self, meeting: Meeting, secret: bytes) -> bool:
        """``False`` if another process has come in the place of one that had claimed a rank."""
        try:
            meeting.begin()
            self.domain = meeting.domain(secret)
            self.lanes = meeting.lanes(self.domain, 2)
            self.streams = exchange.streams(self.domain.device, self.rank, self.lanes[0], self.domain.bell)
            meeting.end()
        except _Changed:
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
        domains.leave(domain)
