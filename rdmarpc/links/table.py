"""The connections to the others: made when first used, one a worker, and settled once when they end.

Workers are known by their numbers (``members.Record``), which are never used twice: a connection that ended does so for good.
Of two that cross, because both ends wanted one at once, that of the lower number counts.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from ..ground import exits
from ..group.group import Group
from ..group.members import Record
from ..polling.pool import Pool
from ..transport import (
    GIVEN_UP,
    GONE,
    AuthenticationError,
    Channel,
    Device,
    PeerLost,
    Poller,
    RdmaError,
    TransferTimeout,
    fresh,
    kept,
)
from ..transport.peers.ended import nobody
from ..transport.peers.guard import Guard, broken_by, hint_for
from .ring import RING, Link

_HELLO = struct.Struct("<4sQ")  # magic, number
_HELLO_MAGIC = b"rpc3"
_FAREWELL_MAGIC = b"bye3"
"""Of the hello of a worker that is leaving; the type and the text of what ends it follow, if something does."""
_SEPARATOR = "\0"
_CROSSING_MAGIC = b"own3"
"""Of the hello of a worker that has connected to us, or is just doing so, which counts."""
_CONNECT_TIMEOUT_S = 10.0
_LOOK_S = 0.1
_AGAIN_S = 1.0
_HANDSHAKE_S = 2.0  # what a living peer that is at work may need for its answer
_READ_OUT_S = 1.0
_READ_OUT_POLL_S = 0.0005
_ABORT_TIMEOUT_S = 1.0
_NOT_ITS_OWN_END = ("SILENT", GIVEN_UP, "ABORTED")
_STOP_S = 1.0
_ITS_OUTPUT = "that worker's own output has the reason"
_OF_ITS_PROCESS = ("SILENT", "RETRY_EXC_ERR")
"""Ends of a connection that tell of the process, or the host, behind it. Others may be of this connection alone: one of us had
enough of the other."""


def listens(device: Device, record: Record) -> bool:
    """Whether a worker of that record still runs (it may refuse us, who are not in the group yet)."""
    try:
        device.connect(record.address.encode(), timeout=_CONNECT_TIMEOUT_S).close()
    except AuthenticationError:
        return False  # somebody else listens there now
    except RdmaError as error:
        return error.status not in GONE
    return True


class _Attempt:
    """To connect to a worker."""

    __slots__ = ("error", "link")

    def __init__(self) -> None:
        self.link: Link | None = None
        self.error: BaseException | None = None

    @property
    def over(self) -> bool:
        return self.link is not None or self.error is not None


class Links:
    """Thread-safe. ``ended(link, error)`` is called once for each link that ended, when all that came over it was read; it
    returns what the peer may still touch if it stopped in the middle of a copy. ``missed(number, error)`` is called for workers
    that left before there was a link."""

    def __init__(
        self,
        device: Device,
        poller: Poller,
        group: Group,
        pool: Pool,
        ended: Callable[[Link, RdmaError], list[Any]],
        missed: Callable[[int, RdmaError], None],
        peer_timeout: float,
    ) -> None:
        self._device, self._poller, self._group, self._pool = device, poller, group, pool
        self._ended, self._missed = ended, missed
        self._own_pool = device.pool()
        """For a connection to ourselves: both ends have the same, as one process's words lie in it for either."""
        self.by_worker: dict[int, Link] = {}
        """By the number of the peer, and so are ``lost``, ``_connecting`` and ``_attempts``."""
        self.rows: dict[int, Link] = {}
        """By the row of the poller: these are read."""
        self.gone_rows: deque[Link] = deque()
        """To be forgotten by the holder of the polling role."""
        self.lost: dict[int, RdmaError] = {}
        self.kept: list[tuple[Channel, list[Any]]] = []
        """What a peer that stopped in the middle of a copy may still touch."""
        self._past = [0] * 7
        self._apart_now: set[threading.Thread] = set()
        self._guard = Guard("rdmarpc-loss")
        self._lock = threading.Condition()
        self._farewell: bytes | None = None
        """What whoever connects now is told: we are leaving."""
        self._parting: list[Channel] = []
        """Who was told so, and has not hung up."""
        self._connecting: set[int] = set()
        self._attempts: dict[int, _Attempt] = {}
        self._patience = min(_CONNECT_TIMEOUT_S, peer_timeout + _HANDSHAKE_S) if peer_timeout else _CONNECT_TIMEOUT_S
        self._failed: dict[int, tuple[float, RdmaError]] = {}
        """The last attempt at each worker that took its time and led to no link: when it ended, and how."""
        group.missed, group.lost = self.miss, self.lost
        self.at_once: Callable[[int], None] = lambda worker: None
        """Told of a worker whose connection has ended before anything else is done about it, by the device's thread: it must
        wait for nothing."""
        device.on_lost = self._on_lost

    # -- connecting

    def to(self, number: int, deadline: float | None = None) -> Link:
        """The link to a worker, connecting if there is none yet. Raises ``PeerLost``: for good once it is lost; if it does not
        answer, for all who wait for the same attempt, or ask within ``_AGAIN_S`` after it. So many calls to a worker that is
        silent take as long as one. ``TransferTimeout`` at the ``deadline`` (``time.monotonic``): the attempt goes on, for
        whoever asks later."""
        self._device.check()
        with self._lock:
            if number in self.lost:
                raise fresh(self.lost[number])
            attempt = self._attempts.get(number)
            new = attempt is None
            if attempt is None:
                attempt = self._attempts[number] = _Attempt()
        job = partial(self._try, number, attempt)
        if new and not self._spawn(job, "rdmarpc-connect"):
            job()
        with self._lock:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._lock.wait_for(lambda: attempt.over or number in self.by_worker, left)
            link = attempt.link or self.by_worker.get(number)
        if link is not None:
            return link
        if attempt.error is not None:
            raise fresh(attempt.error)
        name = self._group.name_of(number)
        raise TransferTimeout(f"worker {name} has not been connected to yet", peer=name, device=self._device.name)

    def _try(self, number: int, attempt: _Attempt) -> None:
        link, error = None, None
        try:
            link = self._link(number)
        except BaseException as reason:
            error = kept(reason)
        with self._lock:
            attempt.link, attempt.error = link, error
            del self._attempts[number]
            self._lock.notify_all()

    def _link(self, number: int) -> Link:
        """One attempt, on a thread of its own: callers have deadlines, which the system's ``connect`` does not know."""
        record = self._group.record(number)
        if record is None:
            self.miss(number)
        with self._lock:
            found = self.by_worker.get(number)
            if found is not None:
                return found
            if number in self.lost:
                raise fresh(self.lost[number])
            ended, error = self._failed.get(number, (0.0, None))
            if error is not None and time.monotonic() - ended < _AGAIN_S:
                raise fresh(error)
            assert record is not None
            link = self._new_link(number)
            self._connecting.add(number)
        limit = time.monotonic() + self._patience
        other = self._connect(link, record)
        if other is not None:
            return other
        channel = link.channel
        known = channel.peer_key.hex() == record.key
        if known and channel.peer_hello.startswith(_HELLO.pack(_FAREWELL_MAGIC, number)):
            self._take_leave(link, record)
        if known and channel.peer_hello.startswith(_HELLO.pack(_CROSSING_MAGIC, number)):
            return self._await_theirs(link, record, limit)
        if known and channel.peer_hello.startswith(_HELLO.pack(_HELLO_MAGIC, number)):
            self._supersede(record)
            with self._lock:
                self._connecting.discard(number)
                if number not in self.lost:
                    self._enter(link, record, serve_only=False)
                    return link
        with self._lock:
            self._connecting.discard(number)
        channel.close()
        raise fresh(self.lost.get(number) or _unreachable(record, "another one listens there now"))

    def _connect(self, link: Link, record: Record) -> Link | None:
        """Give a new link its channel; or another one, by which the peer has connected to us meanwhile."""
        number = record.number
        try:
            channel = self._device.connect(
                record.address.encode(), hello=self._hello() + link.inbox, timeout=self._patience, pool=link.pool
            )
        except TransferTimeout:
            link.pool.close()
            with self._lock:
                self._connecting.discard(number)
                if number in self.by_worker:
                    return self.by_worker[number]
                silent = self._silent(record)
            raise silent from None
        except PeerLost as error:
            link.pool.close()
            with self._lock:
                self._connecting.discard(number)
                if number in self.by_worker:
                    return self.by_worker[number]
                hint = error.hint or (_ITS_OUTPUT if error.status in GONE else "")
                why = _unreachable(record, error.message, error.status, hint)
                if error.status not in GONE and not hint_for(error):
                    self._failed[number] = time.monotonic(), why
            self._group.refresh()
            raise fresh(self.lost.get(number) or why) from error.__cause__
        except BaseException as error:
            link.pool.close()
            with self._lock:
                self._connecting.discard(number)
            if isinstance(error, OSError):  # this process, or host, lacks something
                raise broken_by(error, "connecting", peer=record.name, device=self._device.name) from error
            raise
        link.channel, link.peer_inbox = channel, channel.peer_hello[_HELLO.size :]
        return None

    def _silent(self, record: Record) -> PeerLost:
        """An attempt to connect took too long. With the lock held."""
        silent = _unreachable(record, f"no answer within {self._patience:g} s: stopped, frozen or cut off?", "SILENT")
        self._failed[record.number] = time.monotonic(), silent
        return silent

    def _await_theirs(self, link: Link, record: Record, limit: float) -> Link:
        """Both ends connected at once, and the connection of the other one counts: wait for it. Ours shows meanwhile whether
        the peer still runs."""
        number, ours = link.worker, link.channel
        with self._lock:
            self._connecting.discard(number)
            while number not in self.by_worker and ours.error is None and time.monotonic() < limit:
                self._lock.wait(_LOOK_S)
            found, error = self.by_worker.get(number), ours.error
            if found is None:
                why = self._silent(record) if error is None else _unreachable(record, error.message, error.status)
        ours.close()
        if found is None:
            raise fresh(self.lost.get(number) or why)
        return found

    def _take_leave(self, link: Link, record: Record) -> NoReturn:
        """Where we connected is a worker that is leaving: it is lost. Raises that, with the reason that it gave."""
        number, said = link.worker, link.channel.peer_hello[_HELLO.size :].decode(errors="replace")
        kind, _, text = said.partition(_SEPARATOR)
        link.name, link.goodbye = record.name, (kind, text)
        link.channel.close()
        closed = PeerLost("it is leaving", peer=record.name, device=self._device.name, status="CLOSED")
        left = self._group.dynamic and not kind
        why = self._group.departed(number) if left else _lost(link, closed, self._group.me.name)
        with self._lock:
            self._connecting.discard(number)
            error = self.lost.setdefault(number, why)
        self._missed(number, error)
        self._group.refresh()
        raise fresh(error)

    def _new_link(self, number: int) -> Link:
        pool = self._own_pool if number == self._group.number else self._device.pool()
        try:
            return Link(self._device, None, number, pool)
        except BaseException:
            pool.close()
            raise

    def _hello(self) -> bytes:
        return _HELLO.pack(_HELLO_MAGIC, self._group.number)

    def on_connect(self, channel: Channel) -> bytes:
        """A peer connects (device's handshake thread). Returns our half of the hello."""
        if len(channel.peer_hello) <= _HELLO.size:
            raise PeerLost("the peer's hello is not one of RPC")
        magic, number = _HELLO.unpack_from(channel.peer_hello)
        record = self._group.record(number) if magic == _HELLO_MAGIC else None
        if record is None or number in self.lost:
            raise PeerLost("the peer's hello is not one of this group")
        if channel.peer_key.hex() != record.key:
            raise AuthenticationError(f"the peer calls itself {record.name}, but does not hold its key")
        mine = self._group.number
        self._supersede(record)
        with self._lock:
            if self._farewell is not None:
                self._parting.append(channel)
                return self._farewell
            if number != mine and (number in self.by_worker or (number in self._connecting and mine < number)):
                return _HELLO.pack(_CROSSING_MAGIC, mine)
            if number == mine:
                channel.own_pool = self._own_pool
            link = Link(self._device, channel, number, channel.pool)
            link.peer_inbox = channel.peer_hello[_HELLO.size :]
            self._enter(link, record, serve_only=number == mine)
        return self._hello() + link.inbox

    def _supersede(self, record: Record) -> None:
        """Before a worker is linked: one that had its name has left, even if its goodbye is still under way. So whoever knows
        workers by name hears of the old one's end first."""
        for before in list(self.by_worker.values()):
            if before.name == record.name and before.worker < record.number:
                self.cut_off(before, self._group.departed(before.worker))

    def _enter(self, link: Link, record: Record, *, serve_only: bool) -> None:
        """With the lock held."""
        link.name = link.channel.peer = record.name
        link.rank = record.rank
        link.refuse = lambda link, error: self.cut_off(link, link.channel.error or error)
        link.row = self._poller.add(link.channel, RING)
        self.rows[link.row] = link
        # Who polls now looks at as many rows as there were when it began: it begins again, else it sleeps through news here.
        self._poller.kick()
        if not serve_only:
            self.by_worker[link.worker] = link
        self._lock.notify_all()

    # -- ending

    def leave(self, kind: str, text: str) -> list[Link]:
        """From now on whoever connects is told that we leave, and which exception ends us, if one does. Returns the links to
        all who have connected before."""
        with self._lock:
            if self._farewell is None or kind:
                hello = _HELLO.pack(_FAREWELL_MAGIC, self._group.number)
                self._farewell = hello + (_SEPARATOR.join((kind, text)).encode() if kind else b"")
            return list(self.by_worker.values())

    @property
    def parted(self) -> bool:
        """Whether all who were told in this way have heard it."""
        with self._lock:
            return all(channel.error is not None for channel in self._parting)

    def miss(self, number: int) -> None:
        """A worker is not in the group any more. What it still answers over a link that there is, is taken."""
        with self._lock:
            if number in self.by_worker or number in self.lost:
                return
            self.lost[number] = error = self._group.departed(number)
        self._missed(number, error)

    def _on_lost(self, channel: Channel) -> None:
        """A connection ended (device's thread)."""
        link = next((link for link in list(self.rows.values()) if link.channel is channel), None)
        if link is not None:
            self.at_once(link.worker)
            self._apart(partial(self._settle, link))

    def refuse(self, link: Link, error: RdmaError) -> None:
        """What came over it cannot be trusted (holder of the polling role)."""
        self.forget_row(link)
        self._apart(partial(self.cut_off, link, error))

    def _apart(self, job: Callable[[], None]) -> None:
        """Deal with a loss on a thread of its own: those of the pool may all be inside functions of users, for as long as they
        like, and one loss need not wait for the callbacks of another."""
        if not self._spawn(job, "rdmarpc-loss"):
            self._pool.submit(job)

    def _spawn(self, job: Callable[[], None], name: str) -> bool:
        """Run it on a thread of its own. ``False``: this process may have no more threads."""
        try:
            threading.Thread(target=self._run_apart, args=(job,), name=name, daemon=True).start()
        except RuntimeError:
            return False
        return True

    def _run_apart(self, job: Callable[[], None]) -> None:
        self._apart_now.add(threading.current_thread())
        try:
            job()
        except BaseException as error:
            self._guard.note(error, "dealing with a loss")
        finally:
            self._apart_now.discard(threading.current_thread())

    def stop(self) -> None:
        """Let losses that are being dealt with be told, for a second at most."""
        limit = time.monotonic() + _STOP_S
        for thread in list(self._apart_now):
            if thread is not threading.current_thread():
                thread.join(max(0.0, limit - time.monotonic()))

    def distrust(self, link: Link, error: RdmaError) -> None:
        """``refuse``, from any thread."""
        self._apart(partial(self.cut_off, link, error))

    def cut_off(self, link: Link, error: RdmaError) -> None:
        """End a connection whose other end does not keep to the protocol."""
        try:
            link.channel.abort(_ABORT_TIMEOUT_S)
        except RdmaError as reason:
            error = RdmaError(f"{error.message}; and {reason.message}", peer=link.name)
        self._settle(link, error)

    def _settle(self, link: Link, error: RdmaError | None = None) -> None:
        """Whatever depended on a connection that ended fails now; what the peer may still touch is kept until it cannot."""
        error = error or link.channel.error
        assert error is not None
        with self._lock:
            if link.settled:
                return
            link.settled = True
        self._read_out(link)
        left = self._group.dynamic and error.status == "CLOSED" and not link.goodbye[0]
        named = link.lost = self._group.departed(link.worker) if left else _lost(link, error, self._group.me.name)
        link.explained.set()
        with self._lock:
            if self.by_worker.get(link.worker) is link or link.worker not in self.by_worker:
                self.lost[link.worker] = named
                self.by_worker.pop(link.worker, None)
        touched = self._ended(link, named)
        link.pool.close()
        if link.channel.peer_copies:
            self.kept.append((link.channel, [link, *touched]))
        self.gone_rows.append(link)
        self._poller.kick()
        record = self._group.workers.record(link.worker)
        if self._group.dynamic and record is not None:
            known = bool(link.goodbye[0]) or error.status in _OF_ITS_PROCESS
            if not left and (known or not listens(self._device, record)):  # else it is a member, for all others
                self._group.take_out(record)
            self._group.refresh()

    def _read_out(self, link: Link) -> None:
        """Have the frames read that came before the connection ended: answers, mostly."""
        limit = time.monotonic() + _READ_OUT_S
        while self._poller.unread(link.row) and time.monotonic() < limit:
            self._poller.kick()
            time.sleep(_READ_OUT_POLL_S)

    def forget_row(self, link: Link) -> None:
        """Look at this ring no longer (holder of the polling role). Comes twice for a link that was refused, and its row may be
        another one's by then."""
        if self.rows.get(link.row) is link:
            del self.rows[link.row]
            self._poller.drop(link.row)
            self._past = [past + now for past, now in zip(self._past, _counts(link), strict=True)]

    def sweep(self) -> None:
        """Let go what no peer can touch any more."""
        if self.kept:
            self.kept = [entry for entry in self.kept if entry[0].peer_copies]

    def close(self) -> None:
        """The end of this worker: forget all links, and whoever was told of theirs."""
        self.rows.clear()
        self.by_worker.clear()
        self._ended, self._missed = _nothing_touched, nobody
        self._group.missed = self.at_once = nobody

    # -- looking

    @property
    def flushed(self) -> bool:
        """Whether nothing is queued for a peer that may still take it."""
        return not any(link.behind for link in list(self.rows.values()))

    @property
    def counts(self) -> list[int]:
        """Frames sent, requests of users sent and answered, messages of which something had to be READ, frames queued, and
        frames dropped, ever."""
        return [sum(each) for each in zip(self._past, *map(_counts, list(self.rows.values())), strict=True)]


def _nothing_touched(link: Link, error: RdmaError) -> list[Any]:
    return []


def _counts(link: Link) -> tuple[int, ...]:
    return link.sent, link.requests, link.answers, link.reads, link.queued, link.dropped, link.held.ever


def _lost(link: Link, error: RdmaError, me: str) -> PeerLost:
    why, status, (kind, text) = error.message, error.status, link.goodbye
    if status == GIVEN_UP:  # who was stopped is to be known wherever this is read
        why = why.replace("this worker", me)
    if kind:
        why, status = f"it ended by {text}", "INTERRUPTED" if kind == exits.INTERRUPTED else "RAISED"
    ours = error.__cause__ is not None  # it is this process that could not go on (``guard.broken_by``)
    hint = error.hint if ours else "" if status in _NOT_ITS_OWN_END else _ITS_OUTPUT
    lost = PeerLost(f"worker {link.name} is lost: {why}", peer=link.name, device=error.device, status=status, hint=hint)
    lost.__cause__ = error.__cause__
    return lost


def _unreachable(record: Record, reason: str, status: str = "", hint: str = "") -> PeerLost:
    return PeerLost(f"worker {record.name} cannot be reached: {reason}", peer=record.name, status=status, hint=hint)
