"""How workers find each other: records in a torch store, checked before any worker trusts them.

Each worker publishes its name and rank, where it listens, which key it holds, and a proof (HMAC over the record) that it knows
the job secret. The first to claim a rank has the rank. Keys of the store carry a prefix for each time that the process has met
over that store, so that a store can be used again, also beside a process group.

A static group (``Rendezvous``) is complete from the start; a dynamic one is in ``registry``. A store serves one kind.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Container, Iterable
from datetime import timedelta
from urllib.parse import urlparse

import torch.distributed as dist

from ...options import RpcBackendOptions
from ...transport import AuthenticationError, TransferTimeout
from . import slurm
from .job_secret import HOW
from .meeting import Meeting, naming_its_end, polls, restarted_by_launcher
from .members import Record, record_key, refuse_twins

_met: Counter[bytes] = Counter()
"""How often this process has met in a store, by the number that the store was given. It is counted for each store, so a process
that was in a group elsewhere before meets those that were not."""
_DIAL_S = 0.05
_KIND, _STORE = "rdmarpc/kind", "rdmarpc/store"
FOR_EVER_S = 24 * 3600.0


def open_store(options: RpcBackendOptions, rank: int, world_size: int | None) -> tuple[dist.Store, int, int]:
    """The store behind ``init_method``, our rank, and how many workers there will be: 0 in a dynamic group. Raises what torch's
    rendezvous raises, ``TransferTimeout`` if nobody hosts the store, ``PeerLost`` if it ends meanwhile, and ``RuntimeError`` if
    it belongs to a group of the other kind."""
    method, scheme = options.init_method, urlparse(options.init_method).scheme
    if scheme == "slurm":
        rank, world_size, method = slurm.this_task(method)
    if scheme == "file" and not os.path.isdir(folder := os.path.dirname(urlparse(method).path) or "."):
        raise RuntimeError(f"init_method {method} names a file in {folder}, and there is no such folder on this host")
    limit = timedelta(seconds=options.rpc_timeout or FOR_EVER_S)
    # As torchrun leaves it: everything is in the environment.
    launched = rank == -1 and scheme == "env" and "WORLD_SIZE" in os.environ
    if world_size or launched:
        store, rank, size = _static_store(method, rank, world_size or -1, limit)
    else:
        store, size = dist._create_store_from_options(options, rank), 0
        if scheme == "env":
            rank = int(os.environ.get("RANK", rank))
    if size and rank not in range(size):
        raise ValueError(f"rank {rank} is none of world_size {size}: the ranks are 0 to {size - 1}")
    store.set_timeout(limit)
    kind = b"static" if size else b"dynamic"
    with naming_its_end():
        found = store.compare_set(_KIND, "", kind.decode())
    if found != kind:
        raise RuntimeError("RPC group mixes statically and dynamically initialized members which is not supported.")
    return store, rank, size


def _static_store(method: str, rank: int, world_size: int, limit: timedelta) -> tuple[dist.Store, int, int]:
    """As torch's rendezvous, but errors name what is missing. In torch's own, rank 0 waits for the others without naming them,
    and the others wait for a store without naming its host: so here no worker waits inside of it."""
    url = urlparse(method)
    host, port = url.hostname, url.port
    if url.scheme == "env":
        host, port = os.environ.get("MASTER_ADDR"), int(os.environ.get("MASTER_PORT") or 0) or None
        rank = int(os.environ.get("RANK", -1)) if rank == -1 else rank
        world_size = int(os.environ.get("WORLD_SIZE", -1)) if world_size == -1 else world_size
    if url.scheme not in ("env", "tcp") or not host or not port or rank < 0 or world_size < 1:
        return next(dist.rendezvous(method, rank, world_size, timeout=limit))
    launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    whose = "torchrun" if launcher else "rank 0"
    if rank or launcher:
        _dial(host, port, limit.total_seconds(), whose)
    query = "&".join(filter(None, (url.query, f"rank={rank}&world_size=-1")))
    try:
        store, *_ = next(dist.rendezvous(f"tcp://{f'[{host}]' if ':' in host else host}:{port}?{query}", timeout=limit))
    except dist.DistNetworkError as error:
        if not rank and not launcher:  # the port is taken, say
            raise
        raise _no_store(host, port, limit.total_seconds(), whose, str(error).partition("\n")[0]) from None
    return store, rank, world_size


def _dial(host: str, port: int, timeout: float, whose: str) -> None:
    """Return when somebody listens there."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), max(deadline - time.monotonic(), 0.001)).close()
            return
        except OSError as error:
            if time.monotonic() + _DIAL_S > deadline:
                raise _no_store(host, port, timeout, whose, str(error)) from None
        time.sleep(_DIAL_S)


def _no_store(host: str, port: int, timeout: float, whose: str, why: str) -> TransferTimeout:
    return TransferTimeout(
        f"no store at {host}:{port} within {timeout:g} s, so no sign of {whose}, which hosts it: {why}",
        hint="does it run, and does a firewall let us there? rpc_timeout sets this limit",
    )


def wrong_secret(record: Record, name: str, rank: int) -> AuthenticationError:
    return AuthenticationError(
        f"worker {record.name} (rank {record.rank}) and worker {name} (rank {rank}) do not hold the same job secret",
        peer=str(record.name),
        hint=f"without a chosen one a group is of one user on one host; else {HOW}",
    )


_OF_TORCH = "rpc_prefix_{}/0/{}"


class Rendezvous(Meeting):
    """One static group's meeting point. Used by one thread, at start and at the end."""

    hint = "are all workers started with the same init_method and world_size? rpc_timeout sets this limit"

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: float) -> None:
        with naming_its_end():
            self._which = bytes(store.compare_set(_STORE, "", secrets.token_hex(8)))
        self._used, self._whole = _met[self._which], store
        # A launcher may start more workers again than before, or fewer: these shall not see the claims of those.
        prefix = f"rdmarpc/{self._used}" + (f"/{world_size}" if restarted_by_launcher() else "")
        super().__init__(dist.PrefixStore(prefix, store), rank, range(world_size), str(world_size), timeout or FOR_EVER_S)

    @property
    def too_early(self) -> bool:
        """Whether a store that has ended may be that of the meeting before this one: this process was in it, and rank 0, which
        hosts it, had not come to this one."""
        return self._used > 0 and (not self.missing or "rank 0" in self.missing)

    def others(self) -> str:
        """Who has come to this store with torch's own RPC, by the key under which its agents meet."""
        found = [str(rank) for rank in range(self.size) if self._whole.check([_OF_TORCH.format(self._used, rank)])]
        if not found:
            return ""
        return (
            f"; rank {', '.join(found)} came with torch.distributed.rpc itself, and all workers of a group use the same library"
        )

    def begin(self) -> bytes:
        try:
            secret = super().begin()
        except AuthenticationError:
            self._over()
            raise
        self._key = record_key(secret or self._secret, self.digest)
        return secret

    def _over(self) -> None:
        """All workers have met, or find that they do not fit: the next time they meet elsewhere in the store. A worker that
        gives up before comes again to where the others wait for it."""
        _met[self._which] = self._used + 1

    def meet(self, mine: Record) -> list[Record]:
        """Publish our record and return all, in rank order, once everybody is there.

        Raises the same error at every worker: ``AuthenticationError`` for a wrong secret, ``RuntimeError`` for a name used
        twice; else as ``Meeting``.
        """
        texts = self.all("worker", mine.dump(self._key))
        self._over()
        records = []
        for rank, text in enumerate(texts):
            record, proof = Record.load(text)
            if not record.proven(proof, self._key):
                raise wrong_secret(record, mine.name, mine.rank)
            if record.rank != rank or record.number != rank:
                raise AuthenticationError(f"worker {record.name} (rank {record.rank}) stands in the store as rank {rank}")
            records.append(record)
        refuse_twins(records)
        return records

    def leave(self, timeout: float, lost: Container[int]) -> None:
        """Wait until all workers have come here. Each worker calls this last, so that none closes its connections before. Rank
        0, which may host the store, stays until all others have seen that. Nobody waits for those that are ``lost``, which may
        become more meanwhile; rank 0 knows of all."""
        deadline = time.monotonic() + timeout
        with contextlib.suppress(dist.DistError):  # the store has ended with whoever kept it: nobody can say any more
            self._say("left", self.rank)
            self._wait_said("left", range(self.size), deadline, lost)
            if self.rank != 0:
                self._say("gone", self.rank)
                return
            for rank in range(1, self.size):
                if rank in lost:
                    self._say("left", rank)
            self._wait_said("gone", range(1, self.size), deadline, lost)

    def _say(self, word: str, rank: int) -> None:
        """Each worker has a key of its own. A count would be written by all of them, by each look at it, too: workers on hosts
        whose file locks do not hold between them would overwrite each other's in a store that is a file."""
        self.store.set(f"{word}/{rank}", "1")

    def _wait_said(self, word: str, ranks: Iterable[int], deadline: float, lost: Container[int]) -> None:
        for _ in polls():
            keys = [f"{word}/{rank}" for rank in ranks if rank not in lost]
            if not keys or self.store.check(keys) or time.monotonic() > deadline:
                return
