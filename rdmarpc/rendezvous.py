"""How workers find each other: records in a torch store, checked before anybody trusts them.

Each worker publishes who it is, where it listens, and a proof (HMAC over the record) that it knows the job secret. Keys carry
a prefix per ``init_rpc`` of the process, so that a store can be used again, also beside a process group.

A static group (``Rendezvous``) is complete from the start; a dynamic one is in ``registry``. A store serves one kind.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlparse

import torch.distributed as dist

from . import slurm
from .members import Record, refuse_twins
from .transport import AuthenticationError, TransferTimeout

if TYPE_CHECKING:
    from .options import RpcBackendOptions

_generation = itertools.count()
_FIRST_POLL_S, _LAST_POLL_S = 0.0002, 0.005
_KIND = "rdmarpc/kind"
FOR_EVER_S = 24 * 3600.0


def open_store(options: RpcBackendOptions, rank: int, world_size: int | None) -> tuple[dist.Store, int, int]:
    """The store behind ``init_method``, our rank, and how many workers there will be: 0 in a dynamic group. Raises what torch's
    rendezvous raises, and ``RuntimeError`` if the store belongs to a group of the other kind."""
    method, scheme = options.init_method, urlparse(options.init_method).scheme
    if scheme == "slurm":
        task = slurm.this_task(method)
        rank, world_size, method = task.rank, task.world_size, task.init_method
    limit = timedelta(seconds=options.rpc_timeout or FOR_EVER_S)
    # As torchrun leaves it: everything is in the environment.
    launched = rank == -1 and scheme == "env" and "WORLD_SIZE" in os.environ
    if world_size or launched:
        store, rank, size = next(dist.rendezvous(method, rank, world_size or -1, timeout=limit))
    else:
        store, size = dist._create_store_from_options(options, rank), 0
        if scheme == "env":
            rank = int(os.environ.get("RANK", rank))
    store.set_timeout(limit)
    kind = b"static" if size else b"dynamic"
    if store.compare_set(_KIND, "", kind.decode()) != kind:
        raise RuntimeError("RPC group mixes statically and dynamically initialized members which is not supported.")
    return store, rank, size


def given_secret(given: str | None) -> str | None:
    """The job secret if the user chose one."""
    return given if given is not None else os.environ.get("RDMARPC_SECRET")


def wrong_secret(record: Record, name: str, rank: int) -> AuthenticationError:
    return AuthenticationError(
        f"worker {record.name} (rank {record.rank}) and worker {name} (rank {rank}) do not hold the same job secret",
        peer=str(record.name),
        hint="give every worker the same secret (option secret, or RDMARPC_SECRET)",
    )


class Rendezvous:
    """One static group's meeting point. Used by one thread, at start and at the end."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: float) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self._store = dist.PrefixStore(f"rdmarpc/{next(_generation)}", store)

    def begin(self, host: str, given: str | None) -> tuple[bytes, list[str]]:
        """The job secret (given, from the environment, or drawn by rank 0) and every worker's host id, in rank order."""
        self._store.set(f"host/{self.rank}", host)
        hosts = [f"host/{rank}" for rank in range(self.world_size)]
        wanted = [(key, f"rank {rank}") for rank, key in enumerate(hosts)]
        text = given_secret(given)
        if text is None:
            if self.rank == 0:
                self._store.set("secret", secrets.token_hex(32))
            wanted.append(("secret", "rank 0 (it publishes the job secret; or give every worker the same one)"))
        self._wait(wanted)
        found = [value.decode() for value in self._store.multi_get([key for key, _ in wanted])]
        if text is None:
            text = found.pop()
        return text.encode(), found

    def meet(self, mine: Record, secret: bytes) -> list[Record]:
        """Publish our record and return all, in rank order, once everybody is there.

        Raises the same error at every worker: ``AuthenticationError`` for a wrong secret, ``RuntimeError`` for a name used
        twice; ``TransferTimeout`` naming the ranks that did not join.
        """
        self._store.set(f"worker/{self.rank}", mine.dump(secret))
        keys = [f"worker/{rank}" for rank in range(self.world_size)]
        self._wait([(key, f"rank {rank}") for rank, key in enumerate(keys)])
        records = []
        for text in self._store.multi_get(keys):
            record, proof = Record.load(text)
            if not record.proven(proof, secret):
                raise wrong_secret(record, mine.name, mine.rank)
            records.append(record)
        refuse_twins(records)
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
        pause = _FIRST_POLL_S
        while self._store.add(key, 0) < count and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_S)

    def _wait(self, keys: Sequence[tuple[str, str]]) -> None:
        deadline = time.monotonic() + (self.timeout or FOR_EVER_S)
        pause = _FIRST_POLL_S
        while not self._store.check([key for key, _ in keys]):
            if time.monotonic() > deadline:
                missing = [who for key, who in keys if not self._store.check([key])]
                raise TransferTimeout(
                    f"not every worker joined within {self.timeout} s: no sign of {', '.join(missing)}",
                    hint="are all workers started with the same init_method and world_size? rpc_timeout sets this limit",
                )
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_S)
