"""The members of a group: names, ranks, addresses."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ...base.here import WorkerInfo


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
    """The workers by number (``Record``) and rank, iterated in rank order. Any thread reads; ``replace`` swaps whole tables."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.ever: dict[int, WorkerInfo] = {}
        """All workers that were members at some look, by number."""
        self.replace(records)

    def replace(self, records: Iterable[Record]) -> None:
        ordered = sorted(records, key=lambda record: record.rank)
        infos = [WorkerInfo(record.name, record.rank, record.number) for record in ordered]
        self.ever.update((info.number, info) for info in infos)
        self._records = {record.number: record for record in ordered}
        self._infos = {info.id: info for info in infos}
        self.by_name = {info.name: info for info in infos}

    def record(self, number: int) -> Record | None:
        """The record of a worker that is a member now; ``None`` for any other number."""
        return self._records.get(number)

    def records(self) -> list[Record]:
        return list(self._records.values())

    def get(self, rank: int) -> WorkerInfo | None:
        return self._infos.get(rank)

    def __getitem__(self, rank: int) -> WorkerInfo:
        return self._infos[rank]

    def __iter__(self) -> Iterator[WorkerInfo]:
        return iter(list(self._infos.values()))

    def __len__(self) -> int:
        return len(self._infos)


def refuse_twins(records: Iterable[Record]) -> None:
    """Raise ``RuntimeError`` if two workers have the same name."""
    first: dict[str, int] = {}
    for record in records:
        other = first.setdefault(record.name, record.rank)
        if other != record.rank:
            raise RuntimeError(
                f"RPC worker name {record.name} is not unique. Workers {other} and {record.rank} share the same name."
            )
