"""How the members of a group meet in its store: each tells where it can be reached, then where its peers may write."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from dataclasses import dataclass

import torch.distributed as dist

from ..group.job_secret import INSECURE, USERS, Claim, agree, claim
from ..options import RpcBackendOptions
from ..transport import PeerLost, RdmaError, TransferTimeout
from ..transport.exchange.lane import Lane
from ..transport.exchange.streams import Streams, streams
from . import domain as domains
from .domain import Domain

_PIECES, _LEAST, _MOST = 1 << 20, 16 << 10, 128 << 10
DEPTH = 4
_LOOK_S, _LAST_LOOK_S = 0.0005, 0.02


@dataclass(frozen=True)
class Member:
    token: str
    address: bytes
    pid: int

    def dump(self) -> str:
        return json.dumps([self.token, self.address.decode(), self.pid])

    @staticmethod
    def load(text: bytes) -> Member:
        token, address, pid = json.loads(text)
        return Member(token, address.encode(), pid)


class Meeting:
    """The members of one group at its store. ``timeout`` in seconds."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._store = store

    def all(self, kind: str, mine: str) -> list[bytes]:
        """What every member tells as ``kind``, in rank order. Raises ``TransferTimeout`` that names who is missing."""
        self._store.set(f"{kind}/{self.rank}", mine)
        keys = [f"{kind}/{rank}" for rank in range(self.size)]
        deadline, pause = time.monotonic() + self.timeout, _LOOK_S
        try:
            while not self._store.check(keys):
                if time.monotonic() > deadline:
                    missing = [f"rank {rank}" for rank, key in enumerate(keys) if not self._store.check([key])]
                    raise TransferTimeout(f"no sign of {', '.join(missing)} within {self.timeout:g} s")
                time.sleep(pause)
                pause = min(2 * pause, _LAST_LOOK_S)
            return [bytes(self._store.get(key)) for key in keys]
        except dist.DistError as error:
            raise PeerLost("the group's store ended before every rank had joined", hint=str(error).partition("\n")[0]) from None

    def domain(self) -> Domain:
        """The domain of this process. Members agree on what they prove themselves with. Raises ``AuthenticationError``."""
        mine, secret = claim(f"rank {self.rank}", self.rank, RpcBackendOptions())
        claims = [Claim.load(text) for text in self.all("claim", mine.dump())]
        agreed = agree(claims)
        if agreed == INSECURE:
            if self.rank == 0:
                self._store.set("secret", secrets.token_hex(32))
            secret = bytes(self._store.get("secret"))
        kind = os.environ.get("RDMARPC_COLLECTIVES_DEVICE", "shm" if len({each.host for each in claims}) == 1 else "auto")
        return domains.enter(lambda: Domain(b"" if agreed == USERS else secret, kind))

    def lanes(self, domain: Domain, kinds: int) -> list[dict[int, Lane]]:
        """``kinds`` lanes to every other member, open."""
        me = Member(domain.token, domain.device.address, os.getpid())
        members = [Member.load(text) for text in self.all("member", me.dump())]
        piece = max(_LEAST, min(_MOST, (_PIECES // max(self.size - 1, 1)) // 4096 * 4096))
        made: list[dict[int, Lane]] = [{} for _ in range(kinds)]
        for rank, member in enumerate(members):
            if rank == self.rank:
                continue
            channel = domain.channel(member.token, member.address, f"rank {rank}", self.timeout)
            for lanes in made:
                lanes[rank] = Lane(domain.device, channel, piece, DEPTH, domain.bell)
        offers = {rank: [lanes[rank].offer() for lanes in made] for rank in made[0]}
        told = [json.loads(text) for text in self.all("lanes", json.dumps(offers))]
        for rank in made[0]:
            for lanes, offer in zip(made, told[rank][str(self.rank)], strict=True):
                lanes[rank].open(offer)
        return made


class Members:
    """A group's members as this one reaches them: lanes for collectives, and lanes for pairs."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size = rank, size
        self.domain: Domain | None = None
        self.lanes: list[dict[int, Lane]] = [{}, {}]
        self.streams: Streams | None = None
        self._told = False
        if size == 1:
            return
        meeting = Meeting(store, rank, size, timeout)
        self.domain = meeting.domain()
        try:
            self.lanes = meeting.lanes(self.domain, 2)
            self.streams = streams(self.domain.device, rank, self.lanes[0], self.domain.bell)
            meeting.all("open", "")  # nobody's memory is given back before all have opened it
        except BaseException:
            self.close("")
            raise

    def tell(self, text: str) -> None:
        """Leave a notice at every member that is there. The last one counts."""
        self._told = True
        for lane in self.lanes[0].values():
            if lane.channel.error is None:
                with contextlib.suppress(RdmaError):
                    lane.tell(text)

    def close(self, farewell: str) -> None:
        """Leave the group. Members that were told why it failed are told nothing else. Idempotent."""
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
