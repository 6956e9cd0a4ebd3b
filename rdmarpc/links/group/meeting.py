"""How workers find each other in a torch store: each rank tells what it is, waits for what the others tell, and checks that
before it trusts them.

A rank is a number, and processes come and go under it: what a killed one has told may still be in the store, and a new one may
take its place while the others meet. So each process claims its rank with random digits first, and what it tells after that
stands under a digest of all claims. Whoever waits looks at the claims again, and begins anew with those that there are then.

So workers meet that a launcher starts again in the same store (torchrun's ``--max-restarts``): all workers of a life have ended
before the first of the next one starts. ``TORCHELASTIC_RESTART_COUNT`` does not tell the lives apart: each host counts the
failures that it saw itself, so that the counts of two hosts differ.

A worker of a static group (``Rendezvous``) publishes its name and rank, where it listens, which key it holds, and a proof (HMAC
over the record) that it knows the job secret. Keys of the store carry a prefix for each time that the process has met over that
store, so that a store can be used again, also beside a process group. A dynamic group is in ``group``. A store serves one kind.

``open_store`` finds the store that ``init_method`` names, and ``slurm_task`` (``"slurm://"``) the one of a SLURM step.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import secrets
import socket
import struct
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from urllib.parse import parse_qsl, urlparse

import torch.distributed as dist

from ...options import RpcBackendOptions
from ...transport import AuthenticationError, PeerLost, TransferTimeout, process_runs
from .members import HOW, INSECURE, USERS, Claim, Record, agree, claim, record_key, twins

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
        ``members.claim`` raises."""
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
        """The ranks of one user on one host need nothing but ``shm``; between containers it may be forbidden."""
        alike = len({(each.host, each.pids, each.user) for each in self.claims}) == 1
        return "shm" if options.transport == "auto" and alike else options.transport

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


_met: Counter[bytes] = Counter()
"""How often this process has met in a store, by the number that the store was given. It is counted for each store, so a process
that was in a group elsewhere before meets those that were not."""
_of_files: dict[str, dist.Store] = {}
"""The last store of this process in each file. Torch removes a file when nobody has it open, and never comes back from a read
of one that was removed since it was opened: so between two lives it stays open, until this process ends."""
_DIAL_S, _ONE_ADDRESS_S, _SILENCE_S = 0.05, 3.0, 5.0
_STORE_BYTES = 1 << 20
"""So much has to be free for a store in a file: torch never comes back from a read of one whose last record was cut off."""
_KIND, _STORE = "rdmarpc/kind", "rdmarpc/store"
FOR_EVER_S = 24 * 3600.0


def open_store(options: RpcBackendOptions, rank: int, world_size: int | None) -> tuple[dist.Store, int, int]:
    """The store behind ``init_method``, our rank, and how many workers there will be: 0 in a dynamic group. Raises what torch's
    rendezvous raises, ``TransferTimeout`` if nobody hosts the store, ``PeerLost`` if it ends meanwhile, and ``RuntimeError`` if
    it belongs to a group of the other kind."""
    method, scheme = options.init_method, urlparse(options.init_method).scheme
    if scheme == "slurm":
        rank, world_size, method = slurm_task(method)
    if scheme == "file":
        folder = os.path.dirname(urlparse(method).path) or "."
        if not os.path.isdir(folder):
            raise RuntimeError(f"init_method {method} names a file in {folder}, and there is no such folder on this host")
        if (disk := os.statvfs(folder)).f_blocks and disk.f_bavail * disk.f_frsize < _STORE_BYTES:
            raise RuntimeError(f"init_method {method} names a file in {folder}, and the disk of that folder is full")
    limit = timedelta(seconds=options.rpc_timeout or FOR_EVER_S)
    # As torchrun leaves it: everything is in the environment.
    launched = rank == -1 and scheme == "env" and "WORLD_SIZE" in os.environ
    silence, before = math.ceil(max(options.peer_timeout, _SILENCE_S)) if options.peer_timeout else 0, _sockets()
    if world_size or launched:
        store, rank, size = _rendezvous(options, method, rank, world_size or -1, limit)
    else:  # as torch has it, the environment comes first; of how many workers it tells does not count
        store, rank, size = _rendezvous(options, method, _number("RANK", rank) if scheme == "env" else rank, 0, limit)
    # Torch waits for ever for a host that is stopped or cut off.
    port = _number("MASTER_PORT", 0) if scheme == "env" else urlparse(method).port
    for fd, _ in _sockets() - before:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as ours:
            if ours.getpeername()[1:2] == (port,):
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", silence, 0))
    if size and rank not in range(size):
        raise ValueError(f"rank {rank} is none of world_size {size}: the ranks are 0 to {size - 1}")
    store.set_timeout(limit)
    if scheme == "file":
        if not _of_files:
            Finalize(None, _of_files.clear, exitpriority=0)
        _of_files[method] = store
    kind = b"static" if size else b"dynamic"
    with naming_its_end():
        found = store.compare_set(_KIND, "", kind.decode())
    if found != kind:
        raise RuntimeError("RPC group mixes statically and dynamically initialized members which is not supported.")
    return store, rank, size


def _number(variable: str, otherwise: int) -> int:
    try:
        return int(os.environ.get(variable) or otherwise)
    except ValueError as error:
        raise ValueError(f"{variable} is not a number: {error}") from None


def _rendezvous(
    options: RpcBackendOptions, method: str, rank: int, world_size: int, limit: timedelta
) -> tuple[dist.Store, int, int]:
    """As torch's, but errors name what is missing. In torch's own, rank 0 waits for the others without naming them, and the
    others wait for a store without naming its host: so here no worker waits inside of it. -1 stands for what the environment
    tells, 0 workers for a dynamic group."""
    url = urlparse(method)
    host, port = url.hostname, url.port
    if url.scheme == "env":
        host, port = os.environ.get("MASTER_ADDR"), _number("MASTER_PORT", 0)
        rank = _number("RANK", -1) if rank == -1 else rank
        world_size = (_number("WORLD_SIZE", -1) or -1) if world_size == -1 else world_size
    if url.scheme not in ("env", "tcp") or not host or not port or rank < 0 or world_size < 0:
        if world_size == 0:
            return dist._create_store_from_options(options, rank), rank, 0
        return next(dist.rendezvous(method, rank, world_size, timeout=limit))
    # torchrun hosts a store at its own address alone (as torch has it from 2.15 on).
    own = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and own == (host, str(port))
    whose = "torchrun" if launcher else "rank 0"
    at = _dial(host, port, limit.total_seconds(), whose) if rank or launcher else host
    libuv = dict(parse_qsl(url.query)).get("use_libuv", os.environ.get("USE_LIBUV", "1")) == "1"
    try:
        store = dist.TCPStore(
            at, port, None, not (rank or launcher), limit, wait_for_workers=False, multi_tenant=True, use_libuv=libuv
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            raise
        raise _no_store(host, port, limit.total_seconds(), whose, str(error).partition("\n")[0]) from None
    return store, rank, world_size


def _sockets() -> set[tuple[int, str]]:
    """The descriptors of this process's sockets, with what tells one from a later one; none where they cannot be listed."""
    with contextlib.suppress(OSError):
        return {(int(each.name), os.path.realpath(each)) for each in Path("/proc/self/fd").iterdir() if each.is_socket()}
    return set()


def _dial(host: str, port: int, timeout: float, whose: str) -> str:
    """The address of the host at which somebody listens, once that is so. A host may have others that lead nowhere: none of
    them is tried all the time."""
    deadline = time.monotonic() + timeout
    while True:
        left = max(deadline - time.monotonic(), 0.001)
        try:
            with socket.create_connection((host, port), min(left, _ONE_ADDRESS_S)) as sock:
                return str(sock.getpeername()[0])
        except OSError as error:
            if time.monotonic() + _DIAL_S > deadline:
                raise _no_store(host, port, timeout, whose, str(error)) from None
        time.sleep(_DIAL_S)


def _no_store(host: str, port: int, timeout: float, whose: str, why: str) -> TransferTimeout:
    return TransferTimeout(
        f"no store at {host}:{port} within {timeout:g} s, so no sign of {whose}, which hosts it: {why}",
        hint="is that its address, does it run, and does a firewall let us there? rpc_timeout sets this limit",
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

    def look(self, absent: Sequence[int]) -> None:
        super().look(absent)
        if self.claims:  # which fit
            return
        for text in self.base.multi_get([f"claim/{rank}" for rank in range(self.size) if rank not in absent]):
            self._check_group(Claim.load(bytes(text)))

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
        ranks: dict[str, int] = {}
        for record in records:
            if (first := ranks.setdefault(record.name, record.rank)) != record.rank:
                raise twins(record.name, first, record.rank)
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


_FIRST_PORT, _PORTS = 20000, 12000  # below the ports that the kernel gives out by itself


def slurm_task(init_method: str) -> tuple[int, int, str]:
    """The task that this process is in its SLURM step, as ``srun`` tells each: its rank, how many there are, and (an
    ``init_method``) where rank 0 runs the store. ``slurm://:PORT`` says which port of the first host to use; else the port
    follows from the numbers of job and step. Raises ``RuntimeError`` outside of a step."""
    try:
        rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_STEP_NUM_TASKS"])
        job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ["SLURM_STEP_ID"])
        host = _first_host(os.environ["SLURM_STEP_NODELIST"])
    except KeyError as missing:
        raise RuntimeError(f"slurm://: {missing} is not set: this process was not started by srun") from None
    port = urlparse(init_method).port or _FIRST_PORT + (97 * job + step) % _PORTS
    return rank, world_size, f"tcp://{host}:{port}"


def _first_host(nodes: str) -> str:
    """The first host of a list in SLURM's notation: ``rack[01-02,7]n[3-4],login`` -> ``rack01n3``. Task 0 runs there."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())
