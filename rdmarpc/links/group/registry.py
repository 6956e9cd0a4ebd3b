"""The members of a dynamic group, which come and go: one document in a torch store.

The document is replaced as a whole by compare-and-swap. So joins and leaves are serial, no worker holds a lock, and a worker
that dies in the middle of joining leaves nothing behind. Changes are not announced: a worker reads the document again when it
meets an unknown name, rank or connection, and when it loses a peer.

A worker that died without leaving is taken out by the workers that were connected with it, or by the next one that wants its
name or rank and finds that nobody listens at its address.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist

from ...options import RpcBackendOptions
from ...transport import NotSupported, TransferTimeout, user_secret
from .job_secret import chosen_secret, is_insecure
from .members import Record, record_key
from .rendezvous import FOR_EVER_S, wrong_secret

_PREFIX = "rdmarpc/dynamic"
_MOST_JOINS = 1 << 24  # numbers of workers are part of the ids of references


class Registry:
    """The table of the members in the store. Any thread."""

    def __init__(self, store: dist.Store, timeout: float) -> None:
        self._store = dist.PrefixStore(_PREFIX, store)
        self._timeout = timeout
        self._key = b""

    def begin(self, options: RpcBackendOptions) -> bytes:
        """The secret to open a device with; empty: the secret of this user on this host, which then is the group's. It is not
        known yet which workers will join; one with another secret is refused then (``join``). Raises the errors of
        ``chosen_secret`` and ``user_secret``."""
        secret = chosen_secret(options)
        if not secret and is_insecure(options):
            secret = bytes(self._store.compare_set("secret", "", secrets.token_hex(32)))
        self._key = record_key(secret or user_secret()[0], _PREFIX)
        return secret

    def join(self, mine: Record, alive: Callable[[Record], bool]) -> tuple[Record, list[Record]]:
        """Enter ourselves; returns our record as entered, and all. ``alive``: whether somebody listens at an address.

        Raises ``RuntimeError`` if the name or the rank is taken, ``AuthenticationError`` for another secret,
        ``TransferTimeout``."""
        deadline = time.monotonic() + (self._timeout or FOR_EVER_S)
        dead: set[Record] = set()
        while time.monotonic() < deadline:
            text, joins, there = self._load()
            for record, proof in there:
                if not record.proven(proof, self._key):
                    raise wrong_secret(record, mine.name, mine.rank)
            others = [record for record, _ in there if record not in dead]
            rivals = [record for record in others if record.name == mine.name or record.rank == mine.rank]
            if rivals and not alive(rivals[0]):
                dead.add(rivals[0])
                continue
            for record in rivals:
                if record.name == mine.name:
                    raise RuntimeError(
                        f"RPC worker name {mine.name} is not unique. Workers {record.rank} and {mine.rank} share the same name."
                    )
                raise RuntimeError(f"rank {mine.rank} is taken by {record.name}")
            if joins == _MOST_JOINS:
                raise NotSupported(f"{joins} workers have joined this dynamic group", hint="let the next ones meet elsewhere")
            entered = replace(mine, number=joins)
            if self._swap(text, joins + 1, [*others, entered]):
                return entered, [*others, entered]
        raise TransferTimeout(f"could not enter the group within {self._timeout} s: its members kept changing")

    def members(self) -> list[Record]:
        """The records of the current members. Records without a valid proof that their writer knows the secret are left out."""
        return [record for record, proof in self._load()[2] if record.proven(proof, self._key)]

    def remove(self, gone: Record, timeout: float) -> None:
        """Take a member out, if it is still in."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            text, joins, there = self._load()
            rest = [record for record, _ in there if record != gone]
            if len(rest) == len(there) or self._swap(text, joins, rest):
                return

    def _load(self) -> tuple[str, int, list[tuple[Record, str]]]:
        """The document's text, how many workers have joined so far, and the records with their proofs."""
        if not self._store.check(["members"]):
            return "", 0, []
        text = bytes(self._store.get("members")).decode()
        joins, there = json.loads(text)
        return text, joins, [Record.load(entry) for entry in there]

    def _swap(self, old: str, joins: int, records: list[Record]) -> bool:
        new = json.dumps([joins, [record.dump(self._key) for record in records]])
        return bytes(self._store.compare_set("members", old, new)).decode() == new
