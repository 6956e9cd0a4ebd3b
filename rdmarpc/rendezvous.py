"""How workers find each other: records in a torch store, checked before anybody trusts them.

Each worker publishes who it is, where it listens, and a proof (HMAC over the record) that it knows the job secret. Records
are JSON of plain values. Keys carry a prefix per ``init_rpc`` of the process, so that a store can be used again, also
beside a process group.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import os
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from .transport import AuthenticationError, TransferTimeout

_generation = itertools.count()
_POLL_S = 0.002


@dataclass(frozen=True)
class Record:
    name: str
    rank: int
    host: str
    address: str
    devices: str = ""
    """See ``device_maps.dump``."""

    def proof(self, secret: bytes) -> str:
        text = json.dumps([self.name, self.rank, self.host, self.address, self.devices])
        return hmac.new(secret, b"record" + text.encode(), hashlib.sha256).hexdigest()


class Rendezvous:
    """One group's meeting point. Used by one thread, at start and at the end."""

    def __init__(self, init_method: str, rank: int, world_size: int | None, timeout: float) -> None:
        size = -1 if world_size is None else world_size
        limit = timedelta(seconds=timeout or 24 * 3600)
        store, self.rank, self.world_size = next(dist.rendezvous(init_method, rank, size, timeout=limit))
        self.timeout = timeout
        self._store = dist.PrefixStore(f"rdmarpc/{next(_generation)}", store)
        self._raw = store

    def secret(self, given: str | None) -> bytes:
        """The job secret: given, from the environment, or drawn by rank 0."""
        text = given if given is not None else os.environ.get("RDMARPC_SECRET")
        if text is not None:
            return text.encode()
        if self.rank == 0:
            self._store.set("secret", secrets.token_hex(32))
        self._wait([("secret", "rank 0 (it publishes the job secret; or give every worker the same one)")])
        return bytes(self._store.get("secret"))

    def hosts(self, host: str) -> list[str]:
        """Every worker's host id, in rank order."""
        self._store.set(f"host/{self.rank}", host)
        self._wait([(f"host/{rank}", f"rank {rank}") for rank in range(self.world_size)])
        return [self._store.get(f"host/{rank}").decode() for rank in range(self.world_size)]

    def meet(self, mine: Record, secret: bytes) -> list[Record]:
        """Publish our record and return all, in rank order, once everybody is there.

        Raises the same error at every worker: ``AuthenticationError`` for a wrong secret, ``RuntimeError`` for a name used
        twice; ``TransferTimeout`` naming the ranks that did not join.
        """
        fields = [mine.name, mine.rank, mine.host, mine.address, mine.devices, mine.proof(secret)]
        self._store.set(f"worker/{self.rank}", json.dumps(fields))
        self._wait([(f"worker/{rank}", f"rank {rank}") for rank in range(self.world_size)])
        records = []
        for rank in range(self.world_size):
            name, number, host, address, devices, proof = json.loads(self._store.get(f"worker/{rank}"))
            record = Record(name, number, host, address, devices)
            if not hmac.compare_digest(proof, record.proof(secret)):
                raise AuthenticationError(
                    f"worker {name} (rank {rank}) and worker {mine.name} (rank {mine.rank}) do not hold the same job secret",
                    peer=str(name),
                    hint="give every worker the same secret (option secret, or RDMARPC_SECRET)",
                )
            records.append(record)
        first: dict[str, int] = {}
        for record in records:
            other = first.setdefault(record.name, record.rank)
            if other != record.rank:
                raise RuntimeError(
                    f"RPC worker name {record.name} is not unique. Workers {other} and {record.rank} share the same name."
                )
        return records

    def leave(self, timeout: float) -> None:
        """The last thing a worker does: nobody closes its connections before all have come here, and rank 0, which may host
        the store, stays until all others have seen that."""
        deadline = time.monotonic() + timeout
        self._store.add("left", 1)
        self._wait_count("left", self.world_size, deadline)
        if self.rank != 0:
            self._store.add("gone", 1)
        else:
            self._wait_count("gone", self.world_size - 1, deadline)

    def _wait_count(self, key: str, count: int, deadline: float) -> None:
        while self._store.add(key, 0) < count and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _wait(self, keys: list[tuple[str, str]]) -> None:
        deadline = time.monotonic() + (self.timeout or 24 * 3600)
        while not self._store.check([key for key, _ in keys]):
            if time.monotonic() > deadline:
                missing = [who for key, who in keys if not self._store.check([key])]
                raise TransferTimeout(
                    f"not every worker joined within {self.timeout} s: no sign of {', '.join(missing)}",
                    hint="are all workers started with the same init_method and world_size? rpc_timeout sets this limit",
                )
            time.sleep(_POLL_S)
