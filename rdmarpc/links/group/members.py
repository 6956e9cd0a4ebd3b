"""The members of a group: what each tells of itself, and the secret that they share.

The secret is one that the user chose, or that of this user on this host, or none. A chosen one comes from the option
``secret``, the variable ``RDMARPC_SECRET``, or the file that ``RDMARPC_SECRET_FILE`` names. Without one, workers of one host
share a secret that only their user can read there (``transport/peers/auth``); it is never sent. A group beyond one host,
or of several users, is then refused, unless every worker says ``insecure``: then rank 0 draws a secret and puts it into the
store, which keeps out nobody who reaches the store.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from ...base.here import WorkerInfo
from ...options import RpcBackendOptions
from ...transport import AuthenticationError, check_secret, host_id, read_private, user_secret


@dataclass(frozen=True)
class Record:
    """The facts that a worker publishes of itself. ``number``: in a static group its rank, in a dynamic one how many workers
    had joined before. No two workers of a group ever have the same number, even if they have the same rank or name one after
    the other."""

    name: str
    rank: int
    host: str
    address: str
    number: int
    devices: str = ""
    """See ``device_maps.dump``."""
    key: str = ""
    """The public key (hexadecimal). On each connection the worker proves that it holds the private half."""

    @property
    def _text(self) -> str:
        return json.dumps([self.name, self.rank, self.host, self.address, self.number, self.devices, self.key])

    def proof(self, key: bytes) -> str:
        """An HMAC over the record, which only a process that knows the group's key (``record_key``) can compute."""
        return hmac.new(key, b"record" + self._text.encode(), hashlib.sha256).hexdigest()

    def dump(self, key: bytes) -> str:
        return json.dumps([self._text, self.proof(key)])

    @staticmethod
    def load(text: str | bytes) -> tuple[Record, str]:
        """The record and the proof it came with, which the caller compares."""
        fields, proof = json.loads(text)
        return Record(*json.loads(fields)), proof

    def proven(self, proof: str, key: bytes) -> bool:
        return hmac.compare_digest(proof, self.proof(key))


def record_key(secret: bytes, group: str) -> bytes:
    """The key of the proofs in one group of one store. Proofs of another group are not valid with it."""
    return hmac.digest(secret, b"records of " + group.encode(), hashlib.sha256)


class Members:
    """The workers that are members now, iterated in rank order. Any thread reads the tables, which never change: ``replace``
    swaps them."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.ever: dict[int, WorkerInfo] = {}
        """All workers that were members at some look, by number."""
        self.replace(records)

    def replace(self, records: Iterable[Record]) -> None:
        ordered = sorted(records, key=lambda record: record.rank)
        infos = [WorkerInfo(record.name, record.rank, record.number) for record in ordered]
        self.ever.update((info.number, info) for info in infos)
        self.records = {record.number: record for record in ordered}
        """By number."""
        self.by_rank = {info.id: info for info in infos}
        self.by_name = {info.name: info for info in infos}

    def __getitem__(self, rank: int) -> WorkerInfo:
        return self.by_rank[rank]

    def __iter__(self) -> Iterator[WorkerInfo]:
        return iter(self.by_rank.values())

    def __len__(self) -> int:
        return len(self.by_rank)


def twins(name: str, first: int, second: int) -> RuntimeError:
    """The error about two workers of one name, by their ranks."""
    return RuntimeError(f"RPC worker name {name} is not unique. Workers {first} and {second} share the same name.")


CHOSEN, USERS, INSECURE = "chosen", "users", "insecure"
HOW = (
    "every worker needs the same random text: export RDMARPC_SECRET=$(openssl rand -hex 32), once before srun, which passes it "
    "on, or with the same value on each node before torchrun; or RDMARPC_SECRET_FILE=FILE, mode 600, where all hosts see it. "
    "RDMARPC_INSECURE=1 goes without: whoever reaches the store may then have any code run in every worker"
)


def chosen_secret(options: RpcBackendOptions) -> bytes:
    """The secret that the user chose; empty if there is none. Raises ``ValueError`` if it is too short, ``AuthenticationError``
    for a file that others can read."""
    path = os.environ.get("RDMARPC_SECRET_FILE")
    if options.secret:
        found, where = options.secret.encode(), "option secret"
    elif text := os.environ.get("RDMARPC_SECRET"):
        found, where = text.encode(), "RDMARPC_SECRET"
    elif path:
        try:
            found, where = read_private(path), "RDMARPC_SECRET_FILE"
        except FileNotFoundError:
            raise AuthenticationError(f"RDMARPC_SECRET_FILE: there is no file {path}") from None
    else:
        return b""
    try:
        check_secret(found)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return found


def is_insecure(options: RpcBackendOptions) -> bool:
    return options.insecure or os.environ.get("RDMARPC_INSECURE", "") not in ("", "0")


@dataclass(frozen=True)
class Claim:
    """The facts that a rank of a group publishes first, before others can check them. They only decide which of the
    secrets that the workers have already is taken, or which error all of them raise."""

    name: str
    rank: int
    pid: int
    host: str
    pids: int
    """The namespace of ``pid``: containers on one host may have their own."""
    user: str
    """The user's number, and the namespace of that."""
    source: str
    place: str
    """The file of this user's secret, or the reason why there is none."""
    mark: str
    """A digest that tells this secret from others without revealing it; empty if there is none."""
    token: str
    """Random digits that tell apart two claims with the same content."""
    group: str
    """What all workers have to say alike: how many they are, or who."""

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str | bytes) -> Claim:
        return Claim(**json.loads(text))


def claim(name: str, rank: int, options: RpcBackendOptions, group: str) -> tuple[Claim, bytes]:
    """The claim of this worker, and the secret that it would use."""
    secret, place, mark = chosen_secret(options), "", ""
    source = CHOSEN if secret else INSECURE if is_insecure(options) else USERS
    if not secret:
        try:
            secret, path = user_secret()
            place, mark = f"{path} of user {os.geteuid()}", hmac.digest(secret, b"mark", hashlib.sha256)[:8].hex()
        except AuthenticationError as error:
            place = error.message
    process = os.getpid(), host_id(), _namespace("pid"), f"{os.geteuid()}/{_namespace('user')}"
    return Claim(name, rank, *process, source, place, mark, secrets.token_hex(8), group), secret


def _namespace(kind: str) -> int:
    """A number of it; 0 where a sandbox hides it."""
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


def agree(claims: Sequence[Claim]) -> str:
    """The kind of secret that the group takes: ``CHOSEN``, ``USERS``, or ``INSECURE`` (one from the store). All workers find
    the same kind, or all raise the same ``AuthenticationError``."""
    without = [each for each in claims if each.source != CHOSEN]
    if not without:
        return CHOSEN
    if len(without) < len(claims):
        given = next(each for each in claims if each.source == CHOSEN)
        raise AuthenticationError(
            f"worker {given.name} (rank {given.rank}) was given a job secret, and {_names(without)} not", hint=HOW
        )
    hosts = {each.host for each in claims}
    if len(hosts) == 1 and len({each.mark for each in claims}) == 1 and claims[0].mark:
        return USERS
    strict = [each for each in claims if each.source != INSECURE]
    if not strict:
        return INSECURE
    if len(strict) < len(claims):
        raise AuthenticationError(f"some workers go without a job secret (insecure), but not {_names(strict)}", hint=HOW)
    if len(hosts) > 1:
        raise AuthenticationError(f"this group is on {len(hosts)} hosts, or networks, and was given no job secret", hint=HOW)
    places = {each.mark: f"{each.name}: {each.place}" for each in claims}
    raise AuthenticationError(
        "no job secret was given, and the workers of this host share none: they are of several users, or in containers with "
        f"file systems of their own ({'; '.join(places.values())})",
        hint=HOW,
    )


def _names(claims: Iterable[Claim]) -> str:
    return ", ".join(f"{each.name} (rank {each.rank})" for each in claims)
