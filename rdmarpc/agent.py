"""One worker: its device, its links to the others, and its two sides of calling."""

from __future__ import annotations

import itertools
import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

from torch.autograd import profiler as torch_profiler

from . import device_maps, profiling, serialize, timeline
from .callee import Callee
from .caller import REMOTE, Caller
from .future import Future, Pending, fresh
from .link import CONTROL, CREDIT, ERROR, FORGO, REFERENCES, RELEASE, REQUEST, RESPONSE, RING, Link
from .members import Members, Record
from .options import RpcBackendOptions, WorkerInfo
from .progress import Progress
from .registry import Registry
from .rendezvous import Rendezvous, open_store
from .rref_context import RRefContext
from .rref_mail import Carrier
from .rref_store import LOCAL_BITS
from .termination import Termination
from .transport import GONE, AuthenticationError, Channel, PeerLost, Poller, RdmaError, TransferTimeout, host_id, open_device

if TYPE_CHECKING:
    from .rref import RRef

_HELLO = struct.Struct("<4sQ")  # magic, number
_HELLO_MAGIC = b"rpc3"
_CONNECT_TIMEOUT_S = 10.0
_LEAVE_TIMEOUT_S = 5.0
_IDLE_POLL_S = 0.005
_CROSSING_S = 2.0
_READ_OUT_S = 1.0
_ABORT_TIMEOUT_S = 1.0
_PASSED_S = 1e-9
_NOT_INITIALIZED = "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first."

PeerLostCallback = Callable[[str, RdmaError], None]


class Agent:
    """Made by ``init_rpc``, one a process. Thread-safe."""

    def __init__(self, name: str, rank: int, world_size: int | None, options: RpcBackendOptions) -> None:
        store, rank, world_size = open_store(options, rank, world_size)
        self.me = WorkerInfo(name, rank)
        self.options, self.rpc_timeout = options, options.rpc_timeout
        self.since = time.monotonic()
        serialize.use_cloudpickle(options.pickler == "cloudpickle")
        self._ready = threading.Event()  # peers may connect before we are complete
        self._meeting = Rendezvous(store, rank, world_size, options.rpc_timeout) if world_size else None
        self._registry = None if world_size else Registry(store, options.rpc_timeout)
        host = host_id()
        if self._meeting is not None:
            secret, hosts = self._meeting.begin(host, options.secret)
            kind = options.transport
            if kind == "auto":
                kind = "shm" if len(set(hosts)) == 1 else "tcp"
        else:
            assert self._registry is not None
            secret, kind = self._registry.begin(host, options.secret, options.transport)
        self.device = open_device(
            kind, secret=secret, arena_limit=options.arena_limit, on_connect=self._on_connect, peer_timeout=options.peer_timeout
        )
        devices = device_maps.dump(options.device_maps, options.devices)
        self._record = Record(name, rank, host, self.device.address.decode(), number=rank, devices=devices)
        try:
            if self._meeting is not None:
                records = self._meeting.meet(self._record, secret)
            else:
                assert self._registry is not None
                self._record, records = self._registry.join(self._record, self._listens)
            device_maps.check({record.name: record.devices for record in records})
        except BaseException:
            self._take_out(self._record)
            self.device.close()
            raise
        self.workers = Members(records)
        self.number = self._record.number
        """See ``Record``: what the others know us by."""
        self._ids = itertools.count()
        self._carrier = Carrier(self)
        self.rrefs = RRefContext(
            self.number,
            names=self._name_of,
            new_id=self.new_id,
            transmit=self._carrier.transmit,
            run=lambda job: self.progress.submit(job),
            under_way=lambda rref: self.caller.creates(rref),
        )
        self.garbage = self.rrefs.garbage
        self._links: dict[int, Link] = {}
        """By the number of the peer, and so are ``_connecting``, ``_connect_locks`` and ``_lost``."""
        self._rows: dict[int, Link] = {}
        self._connecting: set[int] = set()
        self._gone_rows: deque[Link] = deque()
        self._past = [0, 0, 0]
        """Frames, requests and answers of links that are gone."""
        self._kept: list[tuple[Channel, list[Any]]] = []
        """What a peer that stopped in the middle of a copy may still touch."""
        self._link_lock = threading.Condition()
        self._connect_locks: dict[int, threading.Lock] = {}
        self._lost: dict[int, RdmaError] = {}
        self._refresh_lock = threading.Lock()
        self._lost_callbacks: list[PeerLostCallback] = []
        self._poller = self.device.poller()
        self.progress = Progress(self._poller, self._read, options.num_worker_threads, "rdmarpc")
        self.caller = Caller(self.device, self.progress, self.rrefs)
        self.callee = Callee(self.device, self.caller, self.me, self.rrefs)
        self.caller.on_tick = self._look_after
        self.progress.outstanding = self.caller.futures
        self.termination = Termination(self)
        self.device.on_lost = self._on_lost
        self.timeline = timeline.for_run(self)

    # -- for the layers above

    @property
    def name(self) -> str:
        return self.me.name

    def worker_names(self) -> list[str]:
        """All workers, in rank order."""
        self.refresh()
        return [info.name for info in self.workers]

    def refresh(self) -> None:
        """In a dynamic group: find out who is in it now."""
        if self._registry is None:
            return
        # What is read is entered in the same order: who seems to have left has left for good.
        with self._refresh_lock:
            try:
                records = self._registry.members()
            except (RuntimeError, ValueError) as error:
                # The store is gone, and with it everybody who could still join: what we know stands.
                logging.getLogger("rdmarpc").info("the group's store does not answer: %s", error)
                return
            before = self.workers.records()
            self.workers.replace(records)
        for record in before:
            if self.workers.record(record.number) is None:
                self._miss(record.number)

    def _miss(self, number: int) -> None:
        """A worker is not in the group any more. What it still answers over a connection that we have is taken."""
        with self._link_lock:
            if number in self._links or number in self._lost:
                return
            self._lost[number] = error = self._departed(self._name_of(number))
        self.rrefs.lost(number, error)

    def _departed(self, name: str) -> PeerLost:
        return PeerLost(f"worker {name} has left the group", peer=name, status="CLOSED")

    def get_worker_infos(self) -> list[WorkerInfo]:
        """All workers, in rank order (torch's name for it)."""
        return list(self.workers)

    def get_debug_info(self) -> dict[str, int]:
        from .debug import debug_info

        return debug_info()

    def get_worker_info(self, worker: Any = None) -> WorkerInfo:
        return self.me if worker is None else self.resolve(worker)

    def channel(self, worker: str) -> Channel:
        """The channel to a worker, the same one at both ends. Connects if need be."""
        return self.link(self.resolve(worker).number).channel

    def on_peer_lost(self, callback: PeerLostCallback) -> None:
        """Have ``callback(worker, error)`` called once for each worker that is lost. It must not block."""
        self._lost_callbacks.append(callback)

    def counters(self) -> dict[str, int]:
        """The device's counters, and ``rpc_messages`` (frames sent), ``rpc_calls`` (requests of users sent), ``rpc_reads``
        (messages received of which something large had to be READ, for want of a landing place), ``rrefs``."""
        links = list(self._rows.values())
        return {
            **self.device.counters(),
            "rpc_messages": self._past[0] + sum(link.sent for link in links),
            "rpc_calls": self._past[1] + sum(link.requests for link in links),
            "rpc_reads": sum(link.reads for link in links),
            "bytes_handed": self.callee.handovers.nbytes,
            "rrefs": len(self.rrefs),
        }

    def _name_of(self, number: int) -> str:
        info = self.workers.ever(number)
        return f"number {number}" if info is None else info.name

    def worker(self, number: int) -> WorkerInfo:
        """Who has, or had, that number (see ``Record``). ``PeerLost`` if it left before we heard of it."""
        info = self.workers.ever(number)
        if info is None:
            self.refresh()
            info = self.workers.ever(number)
        if info is None:
            self._miss(number)
            raise self._departed(self._name_of(number))
        return info

    def new_id(self) -> int:
        """A number unique in the group: our own above 40 bits of count."""
        return self.number << LOCAL_BITS | next(self._ids)

    def resolve(self, to: Any) -> WorkerInfo:
        """The worker that a name, rank or ``WorkerInfo`` means."""
        if isinstance(to, WorkerInfo):
            to = to.name
        if isinstance(to, str):
            found = self.workers.by_name.get(to)
            if found is None:
                self.refresh()
                found = self.workers.by_name.get(to)
            if found is None:
                raise RuntimeError(f"name:{self.name},rank:{self.me.id} could not find destination name {to}")
            return found
        if type(to) in (int, bool):
            found = self.workers.get(to)
            if found is None:
                self.refresh()
                found = self.workers.get(to)
            if found is None:
                raise RuntimeError(f"name:{self.name},rank:{self.me.id} could not find destination id {to}")
            return found
        raise ValueError(f"Cannot get WorkerInfo from name {to}")

    # -- calls

    def _start(
        self,
        to: WorkerInfo,
        function: Any,
        args: Any,
        kwargs: Any,
        timeout: float,
        flags: int = 0,
        future: bool = False,
        rref: int = 0,
        fork: int = 0,
    ) -> Pending:
        if not callable(function):
            raise TypeError("function should be callable.")
        event = None
        if torch_profiler._is_profiler_enabled:
            event = profiling.begin(function, args, flags, future, self.name, to.name)
        limit = self.rpc_timeout if timeout == -1.0 else _seconds(timeout)
        if self.garbage:
            self.rrefs.collect()
        link = self._links.get(to.number)
        if link is None:
            try:
                link = self.link(to.number)
            except RdmaError as error:
                return self.caller.failed(error, limit, future=future)
        pending = self.caller.request(link, function, tuple(args) if args else (), kwargs, limit, flags, future, rref, fork)
        if event is not None:
            profiling.follow(event, pending)
        return pending

    def call(self, to: WorkerInfo, function: Any, args: Any, kwargs: Any, timeout: float, *, control: bool = False) -> Any:
        """Call and wait. ``control``: of our own, not counted as a user's."""
        return self.caller.result(self._start(to, function, args, kwargs, timeout, CONTROL if control else 0))

    def call_async(
        self, to: WorkerInfo, function: Any, args: Any, kwargs: Any, timeout: float, *, control: bool = False
    ) -> Future:
        future = self._start(to, function, args, kwargs, timeout, CONTROL if control else 0, True).future
        assert future is not None
        return future

    def create(self, to: WorkerInfo, function: Any, args: Any, kwargs: Any, timeout: float) -> RRef[Any]:
        """``remote``: have ``to`` keep the result of a call; a handle to it at once."""
        from .rref import RRef

        rref = self.new_id()
        fork = rref if to.number == self.number else self.new_id()
        pending = self._start(to, function, args, kwargs, timeout, REMOTE, True, rref, fork)
        pending.rref = rref
        return RRef._over(self, self.rrefs.forks.created(to.number, rref, fork, pending))

    # -- links

    def link(self, number: int) -> Link:
        """The link to a worker, connecting if there is none yet. Raises ``PeerLost`` (for good, once lost)."""
        with self._connect_locks.setdefault(number, threading.Lock()):
            record = self.workers.record(number)
            if record is None:
                self.refresh()
                record = self.workers.record(number)
            if record is None:
                self._miss(number)
            with self._link_lock:
                found = self._links.get(number)
                if found is not None:
                    return found
                if number in self._lost:
                    raise fresh(self._lost[number])
                assert record is not None
                self._connecting.add(number)
            link = Link(self.device, None, number)
            hello = self._hello() + link.inbox
            try:
                channel = self.device.connect(record.address.encode(), hello=hello, timeout=_CONNECT_TIMEOUT_S)
            except PeerLost as error:
                with self._link_lock:
                    self._connecting.discard(number)
                    # Both ends connected at once, and the other one's connection counts (``_on_connect``).
                    limit = 0.0 if error.status in GONE else _CROSSING_S
                    if self._link_lock.wait_for(lambda: number in self._links, timeout=limit):
                        return self._links[number]
                self.refresh()
                raise self._lost.get(number) or PeerLost(
                    f"worker {record.name} cannot be reached: {error.message}", peer=record.name, status=error.status
                ) from None
            except RdmaError:
                with self._link_lock:
                    self._connecting.discard(number)
                raise
            if not channel.peer_hello.startswith(_HELLO.pack(_HELLO_MAGIC, number)):
                channel.close()
                raise PeerLost(f"worker {record.name} cannot be reached: another one listens there now", peer=record.name)
            link.channel, link.peer_inbox = channel, channel.peer_hello[_HELLO.size :]
            self._supersede(record)
            with self._link_lock:
                self._connecting.discard(number)
                if number not in self._lost:
                    self._enter(link, record, serve_only=False)
                    return link
            channel.close()
            raise fresh(self._lost[number])

    def _hello(self) -> bytes:
        return _HELLO.pack(_HELLO_MAGIC, self.number)

    def _listens(self, record: Record) -> bool:
        """Whether a worker of that record still runs (it may refuse us, who are not in the group yet)."""
        try:
            self.device.connect(record.address.encode(), timeout=_CONNECT_TIMEOUT_S).close()
        except AuthenticationError:
            return False  # somebody else listens there now
        except RdmaError as error:
            return error.status not in GONE
        return True

    def _on_connect(self, channel: Channel) -> bytes:
        """A peer connects (device's handshake thread). Of two crossing connections the one from the lower number counts."""
        self._ready.wait(_CONNECT_TIMEOUT_S)
        if len(channel.peer_hello) <= _HELLO.size:
            raise PeerLost("the peer's hello is not one of RPC")
        magic, number = _HELLO.unpack_from(channel.peer_hello)
        if magic != _HELLO_MAGIC:
            raise PeerLost("the peer's hello is not one of this group")
        record = self.workers.record(number)
        if record is None:
            self.refresh()
            record = self.workers.record(number)
        if record is None or number in self._lost:
            raise PeerLost("the peer's hello is not one of this group")
        itself = number == self.number
        self._supersede(record)
        with self._link_lock:
            if not itself and (number in self._links or (number in self._connecting and self.number < number)):
                raise PeerLost("a connection to this worker exists or is being made")
            link = Link(self.device, channel, number)
            link.peer_inbox = channel.peer_hello[_HELLO.size :]
            self._enter(link, record, serve_only=itself)
        return self._hello() + link.inbox

    def _supersede(self, record: Record) -> None:
        """Before a worker is linked: one that had its name has left, even if its goodbye is still under way. So whoever knows
        workers by name hears of the old one's end first."""
        for before in list(self._links.values()):
            if before.name == record.name and before.worker < record.number:
                self._cut_off(before, self._departed(before.name))

    def _enter(self, link: Link, record: Record, *, serve_only: bool) -> None:
        """With ``_link_lock`` held."""
        link.name = link.channel.peer = record.name
        link.rank = record.rank
        link.row = self._poller.add(link.channel, RING)
        self._rows[link.row] = link
        # Who polls now looks at as many rows as there were when it began: it begins again, else it sleeps through news here.
        self._poller.kick()
        if not serve_only:
            self._links[link.worker] = link
        self._link_lock.notify_all()

    def _read(self, row: int, fresh: int) -> None:
        """Read the frames that were announced (holder of the polling role)."""
        if row == Poller.KICK:
            while self._gone_rows:
                self._forget_row(self._gone_rows.popleft())
            return
        link = self._rows.get(row)
        while link is None:  # added a moment ago by another thread
            time.sleep(0)
            link = self._rows.get(row)
        for _ in range(fresh):
            try:
                frame = link.read()
            except RdmaError as error:
                self._forget_row(link)
                self.progress.jobs.append(partial(self._cut_off, link, error))
                return
            if frame is None:
                continue
            kind = frame.kind
            try:
                if kind == REQUEST:
                    self.callee.accept(link, frame)
                elif kind == RESPONSE or kind == ERROR:
                    self.caller.answer(frame)
                elif kind == RELEASE:
                    self.callee.release(link, frame.call)
                elif kind == FORGO:
                    self.callee.forgo(link, frame)
                elif kind == REFERENCES:
                    self.rrefs.receive(link.worker, frame.body)
            except struct.error as reason:
                text = f"what came is no message (frame of kind {kind}: {reason})"
                self._forget_row(link)
                self.progress.jobs.append(partial(self._cut_off, link, RdmaError(text, peer=link.name)))
                return
        if link.owes_credit:
            try:
                link.try_send(CREDIT, 0)
            except PeerLost:
                pass

    def _forget_row(self, link: Link) -> None:
        """Look at this ring no longer (holder of the polling role)."""
        if self._rows.pop(link.row, None) is not None:
            self._poller.drop(link.row)
            self._past = [past + now for past, now in zip(self._past, (link.sent, link.requests, link.answers), strict=True)]

    def _on_lost(self, channel: Channel) -> None:
        """A connection ended (device's thread): let the pool settle what depended on it."""
        link = next((link for link in list(self._rows.values()) if link.channel is channel), None)
        if link is not None:
            self.progress.submit(partial(self._settle, link))

    def _cut_off(self, link: Link, error: RdmaError) -> None:
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
        with self._link_lock:
            if link.settled:
                return
            link.settled = True
        self._read_out(link)
        left = self._registry is not None and error.status == "CLOSED"
        named = (
            self._departed(link.name)
            if left
            else PeerLost(f"worker {link.name} is lost: {error.message}", device=error.device, status=error.status)
        )
        named.peer = link.name
        with self._link_lock:
            if self._links.get(link.worker) is link or link.worker not in self._links:
                self._lost[link.worker] = named
                self._links.pop(link.worker, None)
        touched = [*self.caller.lost(link, named), *self.callee.lost(link)]
        self.rrefs.lost(link.worker, named)
        if link.channel.peer_copies:
            self._kept.append((link.channel, [link, *touched]))
        self._gone_rows.append(link)
        self._poller.kick()
        self.termination.fail(named)
        for callback in self._lost_callbacks:
            callback(link.name, named)
        record = self.workers.record(link.worker)
        if self._registry is not None and record is not None:
            if not left:
                self._take_out(record)
            self.refresh()

    def _read_out(self, link: Link) -> None:
        """Have the frames read that came before the connection ended: answers, mostly."""
        limit = time.monotonic() + _READ_OUT_S
        while self._poller.unread(link.row) and time.monotonic() < limit:
            self._poller.kick()
            time.sleep(_IDLE_POLL_S / 10)

    def _look_after(self) -> None:
        """Every second or so: what dead references and dead peers left, and what was released."""
        self.rrefs.collect()
        self.callee.handovers.sweep()
        if self._kept:
            self._kept = [entry for entry in self._kept if entry[0].peer_copies]

    # -- the end

    @property
    def idle(self) -> bool:
        """Whether no user's call is outstanding here, and no function runs."""
        return not self.progress.busy and all(pending.control for pending in list(self.caller.pending.values()))

    @property
    def counts(self) -> tuple[int, int]:
        """Requests of users sent, and answered, ever."""
        links = list(self._rows.values())
        _, requests, answers = self._past
        return requests + sum(link.requests for link in links), answers + sum(link.answers for link in links)

    def shutdown(self, graceful: bool, timeout: float) -> None:
        """Leave the group. The local part is always done, whatever is raised."""
        deadline = time.monotonic() + timeout if timeout else None
        try:
            if graceful:
                self.rrefs.collect()
                if self._meeting is None:
                    self._leave(deadline)
                else:
                    self.termination.wait(deadline)
                    if self.timeline is not None:
                        self.timeline.gather(deadline)
                    self._meeting.leave(_LEAVE_TIMEOUT_S)
        except RdmaError:
            # Others may still wait for functions that run here.
            self._finish(deadline)
            raise
        finally:
            self._take_out(self._record)
            self.close()

    def _leave(self, deadline: float | None) -> None:
        """A dynamic group: our own calls end first; then no new caller finds us, and who called gets its answer."""
        while any(not pending.control for pending in list(self.caller.pending.values())):
            if deadline is not None and time.monotonic() > deadline:
                raise TransferTimeout("calls of this worker are still under way", hint="shutdown(timeout=) sets the limit")
            time.sleep(_IDLE_POLL_S)
        self._take_out(self._record)
        self._finish(deadline)

    def _take_out(self, record: Record) -> None:
        """Of the members of a dynamic group; nobody new finds that worker afterwards."""
        if self._registry is None:
            return
        try:
            self._registry.remove(record, _LEAVE_TIMEOUT_S)
        except (RuntimeError, ValueError) as error:
            logging.getLogger("rdmarpc").info("the group's store does not answer: %s", error)

    def _finish(self, deadline: float | None) -> None:
        """Let functions that run here for others end, and their results be fetched: for seconds, not for ever."""
        limit = time.monotonic() + _LEAVE_TIMEOUT_S
        limit = limit if deadline is None else min(limit, deadline)
        while not (self.idle and self.callee.settled) and time.monotonic() < limit:
            time.sleep(_IDLE_POLL_S)

    def close(self) -> None:
        error = PeerLost("RPC was shut down here", peer=self.name)
        self._carrier.stop()
        self.rrefs.closed = True
        self.device.on_lost = lambda channel: None
        self.caller.stop()
        for link in list(self._rows.values()):
            self.caller.lost(link, error)
        self.progress.stop()
        self.device.close()
        self.rrefs.close(error)
        self._rows.clear()
        self._links.clear()
        if self.timeline is not None:
            self.timeline.close()


def _seconds(timeout: float) -> float:
    """A call's own limit: 0 for none, and what is negative has passed already."""
    if not isinstance(timeout, Real):
        raise TypeError(f"a timeout is a number of seconds, got {type(timeout).__name__}")
    return float(timeout) if timeout >= 0 else _PASSED_S


_current: Agent | None = None


def current() -> Agent:
    """This process's agent. ``RuntimeError`` before ``init_rpc`` and after ``shutdown``."""
    if _current is None:
        raise RuntimeError(_NOT_INITIALIZED)
    return _current


def require(message: str) -> Agent:
    if _current is None:
        raise RuntimeError(message)
    return _current


def set_current(agent: Agent | None) -> None:
    global _current
    _current = agent
