"""One worker: its device, its links to the others, and its two sides of calling."""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.autograd import profiler as torch_profiler

from . import profiling, timeline
from .callee import Callee
from .caller import REMOTE, Caller
from .future import Future, Pending
from .link import CONTROL, CREDIT, ERROR, FORGO, REFERENCES, RELEASE, REQUEST, RESPONSE, RING, Link
from .options import RpcBackendOptions, WorkerInfo
from .progress import Progress
from .rendezvous import Record, Rendezvous
from .rref_context import RRefContext
from .rref_mail import Carrier
from .termination import Termination
from .transport import Channel, PeerLost, Poller, RdmaError, host_id, open_device

if TYPE_CHECKING:
    from .rref import RRef

_HELLO = struct.Struct("<4sI")
_HELLO_MAGIC = b"rpc1"
_CONNECT_TIMEOUT_S = 10.0
_LEAVE_TIMEOUT_S = 5.0
_IDLE_POLL_S = 0.005
_CROSSING_S = 2.0
_ABORT_TIMEOUT_S = 1.0
_NOT_INITIALIZED = "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first."

PeerLostCallback = Callable[[str, RdmaError], None]


class Agent:
    """Made by ``init_rpc``, one a process. Thread-safe."""

    def __init__(self, name: str, rank: int, world_size: int | None, options: RpcBackendOptions) -> None:
        meeting = Rendezvous(options.init_method, rank, world_size, options.rpc_timeout)
        self.me = WorkerInfo(name, meeting.rank)
        self.options, self.rpc_timeout = options, options.rpc_timeout
        self.since = time.monotonic()
        self._ready = threading.Event()  # peers may connect before we are complete
        secret = meeting.secret(options.secret)
        host = host_id()
        kind = options.transport
        if kind == "auto":
            kind = "shm" if len(set(meeting.hosts(host))) == 1 else "tcp"
        self.device = open_device(kind, secret=secret, arena_limit=options.arena_limit, on_connect=self._on_connect)
        try:
            records = meeting.meet(Record(name, meeting.rank, host, self.device.address.decode()), secret)
        except BaseException:
            self.device.close()
            raise
        self._meeting = meeting
        self.workers = [WorkerInfo(record.name, record.rank) for record in records]
        self._by_name = {info.name: info for info in self.workers}
        self._addresses = [record.address.encode() for record in records]
        self._ids = itertools.count()
        self._carrier = Carrier(self)
        self.rrefs = RRefContext(
            self.me.id,
            names=lambda rank: self.workers[rank].name,
            new_id=self.new_id,
            transmit=self._carrier.transmit,
            run=lambda job: self.progress.submit(job),
            under_way=lambda rref: self.caller.creates(rref),
        )
        self.garbage = self.rrefs.garbage
        self._links: dict[int, Link] = {}
        self._rows: dict[int, Link] = {}
        self._connecting: set[int] = set()
        self._link_lock = threading.Condition()
        self._connect_locks = [threading.Lock() for _ in self.workers]
        self._lost: dict[int, RdmaError] = {}
        self._lost_callbacks: list[PeerLostCallback] = []
        self._poller = self.device.poller()
        self.progress = Progress(self._poller, self._read, options.num_worker_threads, "rdmarpc")
        self.caller = Caller(self.device, self.progress, self.rrefs)
        self.callee = Callee(self.device, self.caller, self.me, self.rrefs)
        self.caller.on_tick = self.rrefs.collect
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
        return [info.name for info in self.workers]

    def channel(self, worker: str) -> Channel:
        """The channel to a worker, the same one at both ends. Connects if need be."""
        return self.link(self.resolve(worker).id).channel

    def on_peer_lost(self, callback: PeerLostCallback) -> None:
        """Have ``callback(worker, error)`` called once for each worker that is lost. It must not block."""
        self._lost_callbacks.append(callback)

    def counters(self) -> dict[str, int]:
        """The device's counters, and ``rpc_messages`` (frames sent), ``rpc_calls`` (requests of users sent), ``rrefs``."""
        links = list(self._rows.values())
        return {
            **self.device.counters(),
            "rpc_messages": sum(link.sent for link in links),
            "rpc_calls": sum(link.requests for link in links),
            "rrefs": len(self.rrefs),
        }

    def new_id(self) -> int:
        """A number unique in the group: our rank above 48 bits of count."""
        return self.me.id << 48 | next(self._ids)

    def resolve(self, to: Any) -> WorkerInfo:
        """The worker that a name, rank or ``WorkerInfo`` means."""
        if isinstance(to, WorkerInfo):
            to = to.name
        if isinstance(to, str):
            found = self._by_name.get(to)
            if found is None:
                raise RuntimeError(f"name:{self.name},rank:{self.me.id} could not find destination name {to}")
            return found
        if type(to) in (int, bool):
            if not 0 <= to < len(self.workers):
                raise RuntimeError(f"name:{self.name},rank:{self.me.id} could not find destination id {to}")
            return self.workers[to]
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
        limit = self.rpc_timeout if timeout == -1.0 else float(timeout)
        if self.garbage:
            self.rrefs.collect()
        link = self._links.get(to.id)
        if link is None:
            try:
                link = self.link(to.id)
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
        fork = rref if to.id == self.me.id else self.new_id()
        pending = self._start(to, function, args, kwargs, timeout, REMOTE, True, rref, fork)
        pending.rref = rref
        return RRef._over(self, self.rrefs.forks.created(to.id, rref, fork, pending))

    # -- links

    def link(self, rank: int) -> Link:
        """The link to a worker, connecting if there is none yet. Raises ``PeerLost`` (for good, once lost)."""
        with self._connect_locks[rank]:
            with self._link_lock:
                found = self._links.get(rank)
                if found is not None:
                    return found
                if rank in self._lost:
                    raise self._lost[rank]
                self._connecting.add(rank)
            link = Link(self.device, None, rank)
            hello = _HELLO.pack(_HELLO_MAGIC, self.me.id) + link.inbox
            try:
                channel = self.device.connect(self._addresses[rank], hello=hello, timeout=_CONNECT_TIMEOUT_S)
            except PeerLost:
                with self._link_lock:
                    self._connecting.discard(rank)
                    # Both ends connected at once, and the other one's connection counts (``_on_connect``).
                    if self._link_lock.wait_for(lambda: rank in self._links, timeout=_CROSSING_S):
                        return self._links[rank]
                raise
            link.channel, link.peer_inbox = channel, channel.peer_hello[_HELLO.size :]
            with self._link_lock:
                self._connecting.discard(rank)
                self._enter(link, serve_only=False)
            return link

    def _on_connect(self, channel: Channel) -> bytes:
        """A peer connects (device's handshake thread). Of two crossing connections the one from the lower rank counts."""
        self._ready.wait(_CONNECT_TIMEOUT_S)
        if len(channel.peer_hello) <= _HELLO.size:
            raise PeerLost("the peer's hello is not one of RPC")
        magic, rank = _HELLO.unpack_from(channel.peer_hello)
        if magic != _HELLO_MAGIC or rank >= len(self.workers):
            raise PeerLost("the peer's hello is not one of this group")
        itself = rank == self.me.id
        with self._link_lock:
            if not itself and (rank in self._links or (rank in self._connecting and self.me.id < rank)):
                raise PeerLost("a connection to this worker exists or is being made")
            link = Link(self.device, channel, rank)
            link.peer_inbox = channel.peer_hello[_HELLO.size :]
            self._enter(link, serve_only=itself)
        return _HELLO.pack(_HELLO_MAGIC, self.me.id) + link.inbox

    def _enter(self, link: Link, *, serve_only: bool) -> None:
        """With ``_link_lock`` held."""
        link.name = link.channel.peer = self.workers[link.rank].name
        row = self._poller.add(link.channel, RING)
        self._rows[row] = link
        if not serve_only:
            self._links[link.rank] = link
        self._link_lock.notify_all()

    def _read(self, row: int, fresh: int) -> None:
        """Read the frames that were announced (holder of the polling role)."""
        if row == Poller.KICK:
            return
        link = self._rows.get(row)
        while link is None:  # added a moment ago by another thread
            time.sleep(0)
            link = self._rows.get(row)
        for _ in range(fresh):
            try:
                frame = link.read()
            except RdmaError as error:
                self._poller.drop(row)
                self.progress.jobs.append(partial(self._cut_off, link, error))
                return
            if frame is None:
                continue
            kind = frame.kind
            if kind == REQUEST:
                self.callee.accept(link, frame)
            elif kind == RESPONSE or kind == ERROR:
                self.caller.answer(frame)
            elif kind == RELEASE:
                self.callee.release(link, frame.call)
            elif kind == FORGO:
                self.callee.forgo(link, frame)
            elif kind == REFERENCES:
                self.rrefs.receive(link.rank, frame.body)
        if link.owes_credit:
            try:
                link.try_send(CREDIT, 0)
            except PeerLost:
                pass

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
        error = error or link.channel.error
        assert error is not None
        named = PeerLost(f"worker {link.name} is lost: {error.message}", device=error.device, status=error.status)
        named.peer = link.name
        self._lost[link.rank] = named
        self._links.pop(link.rank, None)
        self.caller.lost(link, named)
        self.callee.lost(link)
        self.rrefs.lost(link.rank, named)
        self.termination.fail(named)
        for callback in self._lost_callbacks:
            callback(link.name, named)

    # -- the end

    @property
    def idle(self) -> bool:
        """Whether no user's call is outstanding here, and no function runs."""
        return not self.progress.busy and all(pending.control for pending in list(self.caller.pending.values()))

    @property
    def counts(self) -> tuple[int, int]:
        """Requests of users sent, and answered, ever."""
        links = list(self._rows.values())
        return sum(link.requests for link in links), sum(link.answers for link in links)

    def shutdown(self, graceful: bool, timeout: float) -> None:
        """Leave the group. The local part is always done, whatever is raised."""
        deadline = time.monotonic() + timeout if timeout else None
        try:
            if graceful:
                self.rrefs.collect()
                self.termination.wait(deadline)
                if self.timeline is not None:
                    self.timeline.gather(deadline)
                self._meeting.leave(_LEAVE_TIMEOUT_S)
        except RdmaError:
            # Others may still wait for functions that run here.
            limit = time.monotonic() + _LEAVE_TIMEOUT_S
            limit = limit if deadline is None else min(limit, deadline)
            while not self.idle and time.monotonic() < limit:
                time.sleep(_IDLE_POLL_S)
            raise
        finally:
            self.close()

    def close(self) -> None:
        error = PeerLost("RPC was shut down here", peer=self.name)
        self._carrier.stop()
        self.rrefs.close(error)
        self.device.on_lost = lambda channel: None
        self.caller.stop()
        for link in list(self._rows.values()):
            self.caller.lost(link, error)
        self.progress.stop()
        self.device.close()
        self._rows.clear()
        self._links.clear()
        if self.timeline is not None:
            self.timeline.close()


_current: Agent | None = None


def current() -> Agent:
    """This process's agent. ``RuntimeError`` before ``init_rpc`` and after ``shutdown``."""
    return require(_NOT_INITIALIZED)


def require(message: str) -> Agent:
    if _current is None:
        raise RuntimeError(message)
    return _current


def set_current(agent: Agent | None) -> None:
    global _current
    _current = agent
