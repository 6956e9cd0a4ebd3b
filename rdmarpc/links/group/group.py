"""The group that a worker belongs to: how the worker enters it, its other members, and how the worker leaves it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Container
from functools import partial
from typing import Any
from urllib.parse import urlparse

from ...base import forked
from ...base.worker_info import WorkerInfo
from ...message import device_maps
from ...options import RpcBackendOptions
from ...transport import GONE, AuthenticationError, Device, PeerLost, RdmaError, host_id
from .meeting import STORE_ENDED, Again
from .members import Members, Record
from .registry import Registry
from .rendezvous import FOR_EVER_S, Rendezvous, open_store

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
        return error.status not in GONE
    return True


class Group:
    """A static group, complete before the first call, or (no ``world_size``) a dynamic one. Thread-safe after ``enter``."""

    def __init__(self, name: str, rank: int, world_size: int | None, options: RpcBackendOptions) -> None:
        self._options, self._wanted = options, (name, rank, world_size)
        self._open()
        self._registry = None if self._meeting else Registry(self._store, options.rpc_timeout)
        self.dynamic = self._registry is not None
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
                self._store, found, size = open_store(options, rank, world_size)
                forked.share(self._store)
                self.me = WorkerInfo(name, found)
                self._meeting = Rendezvous(self._store, found, size, options.rpc_timeout) if size else None
                if self._meeting is not None:
                    self._meeting.claim(name, options)
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
                    if self._meeting is None or error.status != STORE_ENDED or not self._meeting.too_early:
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
        if self._meeting is None:
            assert self._registry is not None
            return self._registry.begin(options), options.transport
        secret, hosts = self._meeting.begin(), self._meeting.hosts
        if hosts > 1 and self.me.id == 0 and urlparse(options.init_method).scheme == "file":
            logging.getLogger("rdmarpc").warning(_IN_A_FILE, hosts, options.init_method)
        return secret, self._meeting.transport(options)

    def _join(self, device: Device) -> None:
        devices = device_maps.dump(self._options.device_maps, self._options.devices)
        address, key = device.address.decode(), device.memory.identity.public.hex()
        self._mine = Record(self.me.name, self.me.id, host_id(), address, number=self.me.id, devices=devices, key=key)
        try:
            if self._meeting is not None:
                records = self._meeting.meet(self._mine)
            else:
                assert self._registry is not None
                self._mine, records = self._registry.join(self._mine, partial(listens, device))
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
        if self._registry is None:
            return
        # Under a lock, so that later readings are entered later: a worker that is missing in one has left for good.
        with self._refresh_lock:
            try:
                records = self._registry.members()
            except (RuntimeError, ValueError) as error:
                # Without the store nobody can join any more, so the members that we know stay.
                logging.getLogger("rdmarpc").info("the group's store does not answer: %s", error)
                return
            before = self.workers.records()
            if self._mine not in records:  # others gave us up, or we are leaving: our own record stays all the same
                records = [self._mine, *records]
            self.workers.replace(records)
        for record in before:
            if self.workers.record(record.number) is None:
                self.missed(record.number)

    def record(self, number: int) -> Record | None:
        """The record of a worker that is in the group now, ``None`` for any other. Reads the members again for an unknown
        number."""
        record = self.workers.record(number)
        if record is None:
            self.refresh()
            record = self.workers.record(number)
        return record

    def worker(self, number: int) -> WorkerInfo:
        """The worker that has, or had, that number (see ``Record``). Raises ``PeerLost`` if it left before we heard of it."""
        info = self.workers.ever.get(number)
        if info is None:
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
            found = self.workers.by_name.get(to) if by_name else self.workers.get(to)
            if found is not None and not (again and found.number in self.lost):
                return found
            if again:
                self.refresh()
        kind = "name" if by_name else "id"
        raise RuntimeError(f"name:{self.me.name},rank:{self.me.id} could not find destination {kind} {to}")

    # -- the end

    def part(self) -> None:
        """Leave a static group when nothing is left to do: wait here until all workers have come here."""
        assert self._meeting is not None
        self._meeting.leave(_LEAVE_TIMEOUT_S, self.lost)

    def leave(self) -> None:
        """Take ourselves out of a dynamic group, so that no new worker finds us. Does nothing in a static one."""
        self.take_out(self._mine)

    def take_out(self, record: Record) -> None:
        """Take a member out of a dynamic group, if it still is in. Does nothing in a static one."""
        if self._registry is None:
            return
        try:
            self._registry.remove(record, _LEAVE_TIMEOUT_S)
        except (RuntimeError, ValueError) as error:
            logging.getLogger("rdmarpc").info("the group's store does not answer: %s", error)
