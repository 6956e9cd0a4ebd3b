"""Connecting to the others: one connection a worker, made when first used.

If two workers connect to each other at the same time, the connection made by the one with the lower number counts.
"""

from __future__ import annotations

import struct
import time
from functools import partial
from typing import NoReturn

from ..transport import (
    AuthenticationError,
    Channel,
    Device,
    NotSupported,
    PeerLost,
    TransferTimeout,
    broken_by,
    fresh,
    hint_for,
    host_id,
    kept,
)
from .group.group import Group
from .group.members import Record
from .losses import ITS_OUTPUT, Losses, lost_by
from .ring import Link
from .table import Links

_HELLO = struct.Struct("<4sQ")  # magic, number
_HELLO_MAGIC = b"rpc5"
_FAREWELL_MAGIC = b"bye5"
"""The magic of a hello by which a worker says that it is leaving. If an exception ends it, its type and text follow."""
_SEPARATOR = "\0"
_CROSSING_MAGIC = b"own5"
"""The magic of a hello by which a worker refuses a connection, because its own connection to us counts: it has made one, or is
making it."""
_CONNECT_TIMEOUT_S = 10.0
_LOOK_S = 0.1
_AGAIN_S = 1.0
_BUSY_S = 60.0
_HANDSHAKE_S = 2.0  # what a living peer that is at work may need for its answer


class Connections:
    """Makes the connections of one worker, and enters them in the table of links. Thread-safe."""

    def __init__(self, device: Device, group: Group, links: Links, losses: Losses, peer_timeout: float) -> None:
        """``peer_timeout``: seconds after which a worker that gives no sign is lost, 0: never."""
        self._device, self._group, self._links, self._losses = device, group, links, losses
        self._own_pool = device.pool()
        """The pool of a connection to ourselves. Both ends share it, because both lie in this process."""
        self._lock = links.changed
        self._farewell: bytes | None = None
        """The hello for workers that connect while this one is leaving; ``None`` before that."""
        self._parting: list[Channel] = []
        """The connections of workers that were answered with ``_farewell``."""
        self._connecting: set[int] = set()
        """The numbers of the workers that are being connected to. The tables below are by these numbers too."""
        self._attempts: dict[int, list[Link | BaseException]] = {}
        """The attempts to connect that are under way: each gets one entry, the link or why there is none."""
        self._patience = min(_CONNECT_TIMEOUT_S, peer_timeout + _HANDSHAKE_S) if peer_timeout else _CONNECT_TIMEOUT_S
        self._failed: dict[int, tuple[float, PeerLost]] = {}
        """For each worker the last attempt that failed because it took too long: when it ended, and its error."""

    def to(self, number: int, deadline: float | None = None) -> Link:
        """The link to a worker; connects if there is none yet. Raises ``PeerLost`` for good once the worker is lost. If the
        worker does not answer, all calls that wait for the same attempt, or come within ``_AGAIN_S`` after it, raise
        ``PeerLost``: so many calls to a silent worker take as long as one. Raises ``TransferTimeout`` at the ``deadline``
        (``time.monotonic``); the attempt goes on, for later calls."""
        self._device.check()
        with self._lock:
            if number in self._links.lost:
                raise fresh(self._links.lost[number])
            attempt = self._attempts.get(number)
            new = attempt is None
            if attempt is None:
                attempt = self._attempts[number] = []
        job = partial(self._try, number, attempt)
        if new and not self._losses.spawn(job, "rdmarpc-connect"):
            job()
        with self._lock:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._lock.wait_for(lambda: attempt or number in self._links.by_worker, left)
            found = self._links.by_worker.get(number) or next(iter(attempt), None)
        if isinstance(found, BaseException):
            raise fresh(found)
        if found is not None:
            return found
        name = self._group.name_of(number)
        raise TransferTimeout(f"worker {name} has not been connected to yet", peer=name, device=self._device.name)

    def _try(self, number: int, attempt: list[Link | BaseException]) -> None:
        found: Link | BaseException
        try:
            found = self._link(number)
        except BaseException as reason:
            found = kept(reason)
        with self._lock:
            attempt.append(found)
            del self._attempts[number]
            self._lock.notify_all()

    def _link(self, number: int) -> Link:
        """One attempt, on a thread of its own: callers have deadlines, which the system's ``connect`` does not know."""
        record = self._group.record(number)
        if record is None:
            self._links.miss(number)
        with self._lock:
            found = self._links.by_worker.get(number)
            if found is not None:
                return found
            if number in self._links.lost:
                raise fresh(self._links.lost[number])
            ended, error = self._failed.get(number, (0.0, None))
            if error is not None and time.monotonic() - ended < _AGAIN_S:
                raise fresh(error)
            assert record is not None
            pool = self._own_pool if number == self._group.number else self._device.pool()
            try:
                link = Link(self._device, None, number, pool)
            except BaseException:
                pool.close()
                raise
            self._connecting.add(number)
        other = self._connect(link, record)
        if other is not None:
            return other
        channel, limit = link.channel, time.monotonic() + self._patience
        said = channel.peer_hello if channel.peer_key.hex() == record.key else b""
        if said.startswith(_HELLO.pack(_FAREWELL_MAGIC, number)):
            self._take_leave(link, record)
        if said.startswith(_HELLO.pack(_CROSSING_MAGIC, number)):
            return self._await_theirs(link, record, limit)
        if said.startswith(_HELLO.pack(_HELLO_MAGIC, number)):
            self._supersede(record)
            with self._lock:
                self._connecting.discard(number)
                if number not in self._links.lost:
                    self._enter(link, record, serve_only=False)
                    return link
        with self._lock:
            self._connecting.discard(number)
        channel.close()
        raise fresh(self._links.lost.get(number) or _unreachable(record, "another one listens there now"))

    def _connect(self, link: Link, record: Record) -> Link | None:
        """Give a new link its channel; or another one, by which the peer has connected to us meanwhile."""
        number = record.number
        try:
            channel = self._dial(link, record)
        except (PeerLost, TransferTimeout) as error:
            link.pool.close()
            with self._lock:
                self._connecting.discard(number)
                if number in self._links.by_worker:
                    return self._links.by_worker[number]
                if isinstance(error, TransferTimeout):
                    raise self._silent(record, error.peer) from None
                hints = [ITS_OUTPUT] if error.gone else []
                hint = error.hint or "; or ".join(hints + _elsewhere(record, error.peer))
                why = _unreachable(record, error.message, error.status, hint)
                if not error.gone and not hint_for(error):
                    self._failed[number] = time.monotonic(), why
            self._group.refresh()
            raise fresh(self._links.lost.get(number) or why) from error.__cause__
        except BaseException as error:
            link.pool.close()
            with self._lock:
                self._connecting.discard(number)
            if isinstance(error, OSError):  # this process, or host, lacks something
                raise broken_by(error, "connecting", peer=record.name, device=self._device.name) from error
            if isinstance(error, AuthenticationError | NotSupported):  # they speak of the address, if of anybody
                text = f"worker {record.name} cannot be reached: {error.message}"
                raise type(error)(text, peer=record.name, status=error.status, hint=error.hint) from error.__cause__
            raise
        link.channel, link.peer_inbox = channel, channel.peer_hello[_HELLO.size :]
        return None

    def _dial(self, link: Link, record: Record) -> Channel:
        """A worker that hangs up runs, so it has time anew: something may hold the GIL there."""
        address, hello, limit = record.address.encode(), self._hello() + link.inbox, time.monotonic() + _BUSY_S
        while True:
            try:
                return self._device.connect(address, hello=hello, timeout=self._patience, pool=link.pool)
            except TransferTimeout as error:
                if error.status != "BUSY" or time.monotonic() > limit:
                    raise

    def _silent(self, record: Record, where: str = "") -> PeerLost:
        """Note that an attempt to connect took too long, and return its error. Call it with the lock held."""
        why, hint = f"no answer within {self._patience:g} s: stopped, frozen or cut off?", "".join(_elsewhere(record, where))
        silent = _unreachable(record, why, "SILENT", hint)
        self._failed[record.number] = time.monotonic(), silent
        return silent

    def _await_theirs(self, link: Link, record: Record, limit: float) -> Link:
        """Wait for the other end's connection, which counts because both ends connected at the same time. Our own connection
        shows meanwhile whether the peer still runs."""
        number, ours = link.worker, link.channel
        with self._lock:
            self._connecting.discard(number)
            while number not in self._links.by_worker and ours.error is None and time.monotonic() < limit:
                self._lock.wait(_LOOK_S)
            found, error = self._links.by_worker.get(number), ours.error
            if found is None:
                why = self._silent(record) if error is None else _unreachable(record, error.message, error.status)
        ours.close()
        if found is None:
            raise fresh(self._links.lost.get(number) or why)
        return found

    def _take_leave(self, link: Link, record: Record) -> NoReturn:
        """Enter a worker as lost that answered with a farewell. Raises ``PeerLost`` with the reason that it gave."""
        number, said = link.worker, link.channel.peer_hello[_HELLO.size :].decode(errors="replace")
        kind, _, text = said.partition(_SEPARATOR)
        link.name, link.goodbye = record.name, (kind, text)
        link.channel.close()
        closed = PeerLost("it is leaving", peer=record.name, device=self._device.name, status="CLOSED")
        left = self._group.dynamic and not kind
        why = self._group.departed(number) if left else lost_by(link, closed, self._group.me.name)
        with self._lock:
            self._connecting.discard(number)
            error = self._links.lost.setdefault(number, why)
        self._links.missed(number, error)
        self._group.refresh()
        raise fresh(error)

    def _hello(self) -> bytes:
        return _HELLO.pack(_HELLO_MAGIC, self._group.number)

    def on_connect(self, channel: Channel) -> bytes:
        """Answer a peer that connects (device's handshake thread). Returns our half of the hello."""
        if len(channel.peer_hello) <= _HELLO.size:
            raise PeerLost("the peer's hello is not one of RPC")
        magic, number = _HELLO.unpack_from(channel.peer_hello)
        record = self._group.record(number) if magic == _HELLO_MAGIC else None
        if record is None or number in self._links.lost:
            raise PeerLost("the peer's hello is not one of this group")
        if channel.peer_key.hex() != record.key:
            raise AuthenticationError(f"the peer calls itself {record.name}, but does not hold its key")
        mine = self._group.number
        self._supersede(record)
        with self._lock:
            if self._farewell is not None:
                self._parting.append(channel)
                return self._farewell
            if number != mine and (number in self._links.by_worker or (number in self._connecting and mine < number)):
                return _HELLO.pack(_CROSSING_MAGIC, mine)
            if number == mine:
                channel.own_pool = self._own_pool
            link = Link(self._device, channel, number, channel.pool)
            link.peer_inbox = channel.peer_hello[_HELLO.size :]
            self._enter(link, record, serve_only=number == mine)
        return self._hello() + link.inbox

    def _supersede(self, record: Record) -> None:
        """Cut off an earlier worker of the same name before the new one is linked. The old one has left, even if its goodbye is
        still under way. So code that knows workers by name hears of the old one's end first."""
        for before in list(self._links.by_worker.values()):
            if before.name == record.name and before.worker < record.number:
                self._losses.cut_off(before, self._group.departed(before.worker))

    def _enter(self, link: Link, record: Record, *, serve_only: bool) -> None:
        """Enter a link in the table. Call it with the lock held."""
        link.refuse = lambda link, error: self._losses.cut_off(link, link.channel.error or error)
        self._links.enter(link, record, serve_only=serve_only)

    def leave(self, kind: str, text: str) -> list[Link]:
        """Answer all workers that connect from now on with a farewell: this worker leaves, and which exception ends it, if one
        does. Returns the links to the workers that are connected already."""
        with self._lock:
            if self._farewell is None or kind:
                hello = _HELLO.pack(_FAREWELL_MAGIC, self._group.number)
                self._farewell = hello + (_SEPARATOR.join((kind, text)).encode() if kind else b"")
            return list(self._links.by_worker.values())

    @property
    def parted(self) -> bool:
        """Whether all workers that were answered with a farewell have hung up."""
        with self._lock:
            return all(channel.error is not None for channel in self._parting)


def _elsewhere(record: Record, where: str) -> list[str]:
    """What to look at, if a worker that cannot be reached is on another host: ``where`` it listens, others may not get to."""
    if not where or record.host == host_id():
        return []
    names = "TP_SOCKET_IFNAME or transport='tcp://INTERFACE' names another interface there"
    return [f"it is on another host, and listens at {where}: does that lead there from here? {names}"]


def _unreachable(record: Record, reason: str, status: str = "", hint: str = "") -> PeerLost:
    return PeerLost(f"worker {record.name} cannot be reached: {reason}", peer=record.name, status=status, hint=hint)
