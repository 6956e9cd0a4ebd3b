"""The group that a worker belongs to: how the worker enters it, its other members (of a dynamic group:
``Registry``), and how the worker leaves it."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlparse

import torch.distributed as dist

from ...base import here
from ...base.here import WorkerInfo
from ...message import device_maps
from ...options import RpcBackendOptions
from ...transport import AuthenticationError, Device, NotSupported, PeerLost, RdmaError, TransferTimeout, host_id, user_secret
from .meeting import FOR_EVER_S, STORE_ENDED, Again, Rendezvous, naming_its_end, open_store, wrong_secret
from .members import Members, Record, chosen_secret, is_insecure, record_key, twins

_PREFIX = "rdmarpc/dynamic"
_MOST_JOINS = 1 << 24  # numbers of workers are part of the ids of references


class Registry:
    """The members of a dynamic group, which come and go: one document in a torch store. Any thread.

    The document is replaced as a whole by compare-and-swap. So joins and leaves are serial, no worker holds a lock, and a
    worker that dies in the middle of joining leaves nothing behind. Changes are not announced: a worker reads the document
    again when it meets an unknown name, rank or connection, and when it loses a peer.

    A worker that died without leaving is taken out by the workers that were connected with it, or by the next one that wants
    its name or rank and finds that nobody listens at its address."""

    def __init__(self, store: dist.Store, timeout: float) -> None:
        self._store = dist.PrefixStore(_PREFIX, store)
        self._timeout = timeout
        self._key = b""
        self._ended = ""

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
                    raise twins(mine.name, record.rank, mine.rank)
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
        text = self._ask("", "")
        joins, there = json.loads(text or "[0, []]")
        return text, joins, [Record.load(entry) for entry in there]

    def _swap(self, old: str, joins: int, records: list[Record]) -> bool:
        new = json.dumps([joins, [record.dump(self._key) for record in records]])
        return self._ask(old, new) == new

    def _ask(self, old: str, new: str) -> str:
        """The document, which is ``new`` now if it was ``old``. A store that has failed is asked no more: one whose host stands
        still takes seconds each time, and what it says late would be taken for the next answer."""
        if self._ended:
            raise dist.DistError(self._ended)
        try:
            return bytes(self._store.compare_set("members", old, new)).decode()
        except dist.DistError as error:
            self._ended = str(error)
            raise


_LEAVE_TIMEOUT_S, _CONNECT_TIMEOUT_S = 5.0, 10.0
_IN_A_FILE = (
    "%d hosts meet in one file (%s): where its file system has no locks that hold between hosts, workers overwrite what others "
    "wrote there, and may wait for ever; init_method='tcp://HOST:PORT' or 'env://' needs no locks"
)


def listens(device: Device, record: Record) -> bool:
    """Whether the worker of a record still runs. (It may refuse us, as we are not in the group yet.)"""
    try:
        device.connect(record.address.encode(), timeout=_CONNECT_TIMEOUT_S).close()
    except AuthenticationError:
        return False  # somebody else listens there now
    except RdmaError as error:
        return not error.gone
    return True


class Group:
    """A static group, complete before the first call, or (no ``world_size``) a dynamic one. Thread-safe after ``enter``."""

    def __init__(self, name: str, rank: int, world_size: int | None, options: RpcBackendOptions) -> None:
        self._options, self._wanted = options, (name, rank, world_size)
        self._open()
        self.dynamic = isinstance(self._way, Registry)
        self._refresh_lock = threading.Lock()
        self.missed: Callable[[int], None] = lambda number: None
        """Called with the number of each worker that is found not to be in the group any more, perhaps more than once."""
        self.lost: Container[int] = ()
        """The numbers of workers to which the connection ended. Other workers may have their names and ranks by now."""

    def _open(self) -> None:
        """See ``open_store``; and the meeting there, of a static group. A store that ends as we come is that of the life
        before, which rank 0 ends last: then the next one is waited for."""
        options, (name, rank, world_size) = self._options, self._wanted
        deadline = time.monotonic() + (options.rpc_timeout or FOR_EVER_S)
        while True:
            try:
                store, found, size = open_store(options, rank, world_size)
                here.share(store)
                self.me = WorkerInfo(name, found)
                self._way: Rendezvous | Registry
                if size:
                    self._way = Rendezvous(store, found, size, options.rpc_timeout)
                    self._way.claim(name, options)
                else:
                    self._way = Registry(store, options.rpc_timeout)
                return
            except PeerLost:
                if time.monotonic() > deadline:
                    raise

    def enter(self, opened: Callable[[bytes, str], Device]) -> Device:
        """Enter as a worker that is reached by the device that ``opened`` opens with a secret (empty: that of this user on this
        host) and of a kind, which is returned; sets ``workers`` and ``number``.

        Raises what ``Rendezvous``, ``Registry`` and ``device_maps.check`` raise."""
        while True:
            with contextlib.suppress(Again), contextlib.ExitStack() as undo:
                try:
                    device = opened(*self._begin())
                    undo.callback(device.close)
                    self._join(device)
                except PeerLost as error:
                    if isinstance(self._way, Registry) or error.status != STORE_ENDED or not self._way.too_early:
                        raise
                    # We began again at once, and found the store of the life before, which rank 0 ends only then.
                    self._open()
                    raise Again from None
                undo.pop_all()
                return device

    def _begin(self) -> tuple[bytes, str]:
        """The secret to open a device with, and the transport: a group that is complete and on one host needs nothing but
        ``shm``."""
        options = self._options
        if isinstance(self._way, Registry):
            return self._way.begin(options), options.transport
        secret, hosts = self._way.begin(), self._way.hosts
        if hosts > 1 and self.me.id == 0 and urlparse(options.init_method).scheme == "file":
            logging.getLogger("rdmarpc").warning(_IN_A_FILE, hosts, options.init_method)
        return secret, self._way.transport(options)

    def _join(self, device: Device) -> None:
        devices = device_maps.dump(self._options.device_maps, self._options.devices)
        address, key = device.address.decode(), device.memory.identity.public.hex()
        self._mine = Record(self.me.name, self.me.id, host_id(), address, number=self.me.id, devices=devices, key=key)
        try:
            if isinstance(self._way, Registry):
                with naming_its_end():
                    self._mine, records = self._way.join(self._mine, partial(listens, device))
            else:
                records = self._way.meet(self._mine)
            device_maps.check({record.name: record.devices for record in records})
        except BaseException:
            self.leave()
            raise
        self.number = self._mine.number
        """The number by which the other workers know this one (see ``Record``)."""
        self.workers = Members(records)

    # -- who is in it

    def refresh(self) -> None:
        """Read the current members of a dynamic group. Does nothing in a static one."""
        if isinstance(self._way, Rendezvous):
            return
        # Under a lock, so that later readings are entered later: a worker that is missing in one has left for good.
        with self._refresh_lock:
            try:
                records = self._way.members()
            except (RuntimeError, ValueError) as error:
                # Without the store nobody can join any more, so the members that we know stay.
                logging.getLogger("rdmarpc").info("the group's store does not answer: %s", error)
                return
            before = self.workers.records
            if self._mine not in records:  # others gave us up, or we are leaving: our own record stays all the same
                records = [self._mine, *records]
            self.workers.replace(records)
        for number in before:
            if number not in self.workers.records:
                self.missed(number)

    def record(self, number: int) -> Record | None:
        """The record of a worker that is in the group now, ``None`` for any other. Reads the members again for an unknown
        number."""
        if number not in self.workers.records:
            self.refresh()
        return self.workers.records.get(number)

    def worker(self, number: int) -> WorkerInfo:
        """The worker that has, or had, that number (see ``Record``). Raises ``PeerLost`` if it left before we heard of it."""
        if number not in self.workers.ever:
            self.refresh()
        info = self.workers.ever.get(number)
        if info is None:
            self.missed(number)
            raise self.departed(number)
        return info

    def name_of(self, number: int) -> str:
        info = self.workers.ever.get(number)
        return f"number {number}" if info is None else info.name

    def departed(self, number: int) -> PeerLost:
        name = self.name_of(number)
        return PeerLost(f"worker {name} has left the group", peer=name, status="CLOSED")

    def resolve(self, to: Any) -> WorkerInfo:
        """The worker that a name, rank or ``WorkerInfo`` means."""
        if isinstance(to, WorkerInfo):
            to = to.name
        by_name = isinstance(to, str)
        if not by_name and type(to) not in (int, bool):
            raise ValueError(f"Cannot get WorkerInfo from name {to}")
        for again in (True, False):
            found = self.workers.by_name.get(to) if by_name else self.workers.by_rank.get(to)
            if found is not None and not (again and found.number in self.lost):
                return found
            if again:
                self.refresh()
        kind = "name" if by_name else "id"
        names = list(self.workers.by_name)
        there = ", ".join(names[:20]) + ", ..." * (len(names) > 20)
        raise RuntimeError(f"name:{self.me.name},rank:{self.me.id} could not find destination {kind} {to}: there are {there}")

    # -- the end

    def part(self) -> None:
        """Leave a static group when nothing is left to do: wait here until all workers have come here."""
        assert isinstance(self._way, Rendezvous)
        self._way.leave(_LEAVE_TIMEOUT_S, self.lost)

    def leave(self) -> None:
        """Take ourselves out of a dynamic group, so that no new worker finds us. Does nothing in a static one."""
        self.take_out(self._mine)

    def take_out(self, record: Record) -> None:
        """Take a member out of a dynamic group, if it still is in. Does nothing in a static one."""
        if isinstance(self._way, Rendezvous):
            return
        try:
            self._way.remove(record, _LEAVE_TIMEOUT_S)
        except (RuntimeError, ValueError) as error:
            logging.getLogger("rdmarpc").info("the group's store does not answer: %s", error)
