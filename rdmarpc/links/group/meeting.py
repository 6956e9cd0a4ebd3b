"""How the ranks of a group meet in a torch store: each tells what it is, and waits for what the others tell.

A rank is a number, and processes come and go under it: what a killed one has told may still be in the store, and a new one may
take its place while the others meet. So each process claims its rank with random digits first, and what it tells after that
stands under a digest of all claims. Whoever waits looks at the claims again, and begins anew with those that there are then.

So workers meet that a launcher starts again in the same store (torchrun's ``--max-restarts``): all workers of a life have
ended before the first of the next one starts. ``TORCHELASTIC_RESTART_COUNT`` does not tell the lives apart: each host counts
the failures that it saw itself, so that the counts of two hosts differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from ...options import RpcBackendOptions
from ...transport import PeerLost, TransferTimeout, process_runs
from .job_secret import INSECURE, USERS, Claim, agree, claim

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.0002, 0.01
_FIRST_LOOK_S, _LAST_LOOK_S = 0.1, 2.0
"""A look at who is missing, and why, costs the store an operation for each rank, and all ranks look."""
LOST, STORE_ENDED = "was lost before it had joined the group", "STORE_ENDED"


class Again(Exception):
    """Another process has claimed a rank: the meeting begins again."""


def restarted_by_launcher() -> bool:
    return "TORCHELASTIC_RESTART_COUNT" in os.environ


def runs(claim: Claim, mine: Claim) -> bool | None:
    """Whether the process of a claim has not ended; None: its number says nothing here, on another host or in another
    container."""
    if (claim.host, claim.pids) != (mine.host, mine.pids):
        return None
    if claim.pid == mine.pid:
        return False  # an earlier process with our number, or an earlier try of ours
    return process_runs(claim.pid)


@contextlib.contextmanager
def naming_its_end(missing: Sequence[str] = ()) -> Iterator[None]:
    """``PeerLost`` if the store ends. ``missing``: the ranks that had not come at the last look."""
    try:
        yield
    except dist.DistError:
        whom = f"; a moment before there was no sign of {', '.join(missing)}" if missing else ""
        why = f"rank 0 (or torchrun), which hosts it, gave up or died{whom}"
        text = f"the group's store ended before every rank had joined: {why}"
        raise PeerLost(text, status=STORE_ENDED, hint="the output of rank 0 says why") from None


def polls() -> Iterator[float]:
    """Seconds since the first look, with longer and longer pauses between looks."""
    start, pause = time.monotonic(), _FIRST_PAUSE_S
    while True:
        yield time.monotonic() - start
        time.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE_S)


class Meeting:
    """The meeting of one group, for one thread. What waits raises ``TransferTimeout`` that names who is missing, ``PeerLost``
    for a rank that was lost or a store that ended, and ``Again``: then ``begin`` again."""

    hint = ""

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], group: str, timeout: float) -> None:
        """``ranks``: what texts call the members; ``rank``: the place of this one among them. ``group``: what all have to give
        alike. ``timeout``: seconds for each wait."""
        self.rank, self.size, self.timeout = rank, len(ranks), timeout
        self.ranks, self.group = ranks, group
        self.base = self.store = store
        """The store, and the part of it that is for the processes that meet."""
        self.claims: list[Claim] = []
        self.missing: list[str] = []
        """The ranks that had not come at the last look."""
        self.settled = False
        """Whether claims may change."""

    # -- who meets

    def claim(self, name: str, options: RpcBackendOptions) -> None:
        """Claim this rank, as a process that texts call ``name``. Raises ``RuntimeError`` if another one has it, and what
        ``job_secret.claim`` raises."""
        self.mine, self._secret = claim(name, self.rank, options, self.group)
        key, mine = f"claim/{self.rank}", self.mine.dump()
        with naming_its_end():
            held = bytes(self.base.compare_set(key, "", mine)).decode()
            while held != mine:
                if not self.gives_way(first := Claim.load(held)):
                    self._check_group(first)
                    raise self.taken(first)
                held = bytes(self.base.compare_set(key, held, mine)).decode()

    def gives_way(self, first: Claim) -> bool:
        """Whether the process that has our rank has to leave it to this one: so an earlier try of this process does, and,
        where a launcher starts all workers again, every one that is not seen running."""
        running = runs(first, self.mine)
        return (running is False and first.pid == self.mine.pid) or (not running and restarted_by_launcher())

    def taken(self, other: Claim) -> Exception:
        """The error about another process that has our rank."""
        running, who = runs(other, self.mine), f"rank {self.rank} is taken by {other.name}"
        if running is None:
            return RuntimeError(f"{who}, on another host or in another container")
        if running:
            return RuntimeError(f"{who} (process {other.pid})")
        once = "a group meets once; start all workers again, with a fresh store"
        return RuntimeError(f"{who} (process {other.pid}, which has ended): {once}")

    def misfit(self, theirs: str) -> Exception:
        """The error about a rank of another group."""
        return RuntimeError(f"rank {self.rank} came with world_size {self.group}, another worker with {theirs}")

    def _check_group(self, other: Claim) -> None:
        if other.group != self.group:
            raise self.misfit(other.group)

    def _check_mine(self, held: bytes) -> None:
        if (found := Claim.load(held)) != self.mine:
            raise self.taken(found)

    def begin(self) -> bytes:
        """Wait until every rank is claimed. The secret that all of them take; empty: that of this user on this host. What is
        told from now on is for these processes. Raises what ``agree``, ``taken`` and ``misfit`` say."""
        self.store, self.claims = self.base, []
        texts = self._told(self._keys("claim"))
        self._check_mine(texts[self.rank])
        self.digest = hashlib.sha256(b"".join(texts)).hexdigest()[:32]
        self.store = dist.PrefixStore(self.digest, self.base)
        self.claims = [Claim.load(text) for text in texts]
        for each in self.claims:
            self._check_group(each)
        agreed = agree(self.claims)
        if agreed != INSECURE:
            return b"" if agreed == USERS else self._secret
        if self.rank == 0:  # it draws one, which everybody who reaches the store can read there
            self.tell("secret", secrets.token_hex(32))
        return self._told(["secret"])[0]

    @property
    def hosts(self) -> int:
        """How many hosts the ranks are on."""
        return len({each.host for each in self.claims})

    def transport(self, options: RpcBackendOptions) -> str:
        """The ranks of one host need nothing but ``shm``."""
        return "shm" if options.transport == "auto" and self.hosts == 1 else options.transport

    # -- what they tell

    def tell(self, key: str, text: str) -> None:
        with naming_its_end():
            self.store.set(key, text)

    def all(self, kind: str, mine: str) -> list[bytes]:
        """What every member tells as ``kind``, in rank order."""
        self.tell(f"{kind}/{self.rank}", mine)
        return self._told(self._keys(kind))

    def _keys(self, kind: str) -> list[str]:
        return [f"{kind}/{rank}" for rank in range(self.size)]

    def _told(self, keys: list[str]) -> list[bytes]:
        """``keys``: what the ranks, in their order, have to tell."""
        next_look = _FIRST_LOOK_S
        self.missing.clear()
        with naming_its_end(self.missing):
            for waited in polls():
                if self.store.check(keys):
                    break
                if waited <= min(next_look, self.timeout):
                    continue
                next_look = waited + min(waited, _LAST_LOOK_S)
                absent = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                self.missing[:] = [f"rank {self.ranks[rank]}" for rank in absent]
                self.look(absent)
                if absent and waited > self.timeout:
                    whom = f"no sign of {', '.join(self.missing)}{self.others()}"
                    raise TransferTimeout(f"not every rank joined within {self.timeout:g} s: {whom}", hint=self.hint)
            return [bytes(text) for text in self.store.multi_get(keys)]

    def look(self, absent: Sequence[int]) -> None:
        """Raise if there is no need to wait longer for these ranks."""
        if not self.settled:
            self._check_mine(bytes(self.base.get(f"claim/{self.rank}")))
            keys = self._keys("claim") if self.claims else []
            if self.claims != [Claim.load(bytes(text)) for text in self.base.multi_get(keys)]:
                raise Again
        for rank in absent:
            if (lost := self.lost(rank)) is not None:
                raise lost

    def lost(self, rank: int) -> PeerLost | None:
        """What to raise if a rank's process has ended, as far as that can be told."""
        if not self.claims or rank == self.rank or restarted_by_launcher():
            return None
        if runs(first := self.claims[rank], self.mine) is not False:
            return None
        why = f"process {first.pid} has ended"
        return PeerLost(f"rank {self.ranks[rank]} {LOST}: {why}", hint="its own output may say why")

    def others(self) -> str:
        """A text about what the missing ranks may have done instead."""
        return ""
