"""One worker: its device, its links to the others, and its two sides of calling."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler

from ..base import here, streams
from ..base.here import WorkerInfo
from ..base.recursion import ROOM
from ..gradients import local
from ..gradients.context import Contexts
from ..gradients.context import current as _current_context
from ..links import frames, messages
from ..links.connecting import Connections
from ..links.group.group import Group
from ..links.losses import Losses, own_end
from ..links.messages import Post, tell
from ..links.polling.modes import check_real, dispatch_modes, function_modes, tracing, unseen
from ..links.polling.pool import Pool
from ..links.polling.progress import Progress
from ..links.ring import Link
from ..links.table import Handler, Links
from ..message import gpu, permits, serialize
from ..message.device_maps import DeviceMap, Targets
from ..options import RpcBackendOptions, open_by
from ..references.context import RRefContext
from ..references.forks import Fork
from ..references.mail import Carrier
from ..references.store import LOCAL_BITS
from ..transport import Channel, Device, Guard, NotSupported, PeerLost, RdmaError, TransferTimeout, processors, timeouts
from ..transport import cuda_driver as driver
from . import environment, profiled
from .callee import Callee
from .caller import Caller
from .memory import Patience
from .pending import Future, Pending, timed_out
from .termination import Termination

_CONNECT_TIMEOUT_S = 10.0
_GOODBYE_S, _PAUSE_S = 5.0, 0.001
_PASSED_S = 1e-9
_CONNECT_S = 1.0

PeerLostCallback = Callable[[str, RdmaError], None]


class Agent:
    """Made by ``init_rpc``, one a process. Thread-safe."""

    timeline: Any = None
    """The timeline (``Timeline``) of the whole run, if one is recorded. ``init_rpc`` sets it, and ``get_debug_info``, which
    torch's agents have too."""
    get_debug_info: Callable[[], dict[str, int]] = dict

    def __init__(
        self, name: str, rank: int, world_size: int | None, options: RpcBackendOptions, undo: contextlib.ExitStack
    ) -> None:
        """``undo`` collects the calls that undo this, the last first, if it raises."""
        self.since, self.guard = time.monotonic(), Guard("rdmarpc")
        self.options, self.rpc_timeout = options, options.rpc_timeout
        # These hold for the whole process.
        serialize.use_cloudpickle(options.pickler == "cloudpickle")
        permits.use(None if options.allow is None else permits.Permits(options.allow))
        local.first_call()
        self.ready = threading.Event()  # peers may connect before we are complete
        self.before_leaving: list[Callable[[], None]] = []
        """Called once, the last first, when no call is under way any more and all workers are still there; then those of
        ``before_closing``, before its connections end, and of ``at_close``, when all of them have ended for good."""
        self.before_closing: list[Callable[[], None]] = []
        self.at_close: list[Callable[[], None]] = []
        self._lost_callbacks: list[Callable[[], PeerLostCallback | None]] = []
        """For each callback a function that returns it, or ``None`` once its owner has died."""

        # The group, and the device by which its workers are reached.
        self.group = Group(name, rank, world_size, options)
        self.me, self.name = self.group.me, self.group.me.name
        self.device = self.group.enter(partial(_open_device, options, self._on_connect))
        undo.callback(self.device.close)
        undo.callback(self.group.leave)
        self.number, self.workers, self.resolve = self.group.number, self.group.workers, self.group.resolve
        self.get_worker_infos: Callable[[], list[WorkerInfo]] = partial(list, self.workers)
        """All workers, in rank order (torch's name for it)."""
        _warn_of_crowds(self.group)
        _check_ways(self.group, self.device, options)
        poller = self.device.poller()
        self.progress = Progress(poller)
        self.pool = Pool(self.progress, options.num_worker_threads, "rdmarpc")
        undo.callback(self.pool.stop)

        # What outlives calls: references and contexts; then the links, and what goes over them.
        self.new_id: Callable[[], int] = itertools.count(self.number << LOCAL_BITS).__next__
        """Draws numbers unique in the group: our own above 40 bits of count."""
        self.rrefs = RRefContext(
            self.number,
            names=self.group.name_of,
            new_id=self.new_id,
            run=self.pool.owe,
            under_way=lambda rref, worker: self.caller.creates(rref, worker),
            knows=self.workers.ever.__contains__,
        )
        self.garbage = self.rrefs.garbage
        self.links = Links(poller, self.group, self.rrefs.lost)
        self.losses = Losses(self.device, self.progress, self.group, self.pool, self.links, self.ended)
        self.connections = Connections(self.device, self.group, self.links, self.losses, options.peer_timeout)
        self._links = self.links.by_worker
        self._carrier = Carrier(self.number, self.device.name, self.links, self.connections.to, self.rrefs)
        self.contexts = Contexts(self.number, partial(_tell_end, self.links))
        self._open_gpus()
        self.memory = Patience(self)
        self.post = Post(self.memory)

        # Both sides of calling; from here on peers are heard.
        distrust = self.losses.distrust
        self.caller: Caller = Caller(self.device, self.progress, self.pool, self.post, self.rrefs, distrust)
        undo.callback(self.caller.stop)
        self.callee: Callee = Callee(self.device, self.pool, self.post, self.me, self.rrefs, self.contexts, distrust)
        self.termination = Termination(self)
        resume = partial(messages.resume, self.callee)
        self.links.listen(self.losses.refuse, self.progress.completed, resume, _takes(self))
        self.progress.read = self.links.read
        self.pool.start()
        self.caller.timeouts.on_tick = self._look_after

    def _open_gpus(self) -> None:
        gpu.current = streams.current = None
        if not driver.count():
            return
        group = self.group

        def plan(number: int) -> tuple[str, str]:
            record = group.record(number)
            if record is None:
                raise group.departed(number)
            return record.name, record.devices

        def call(worker: int, function: Any, args: tuple[Any, ...], timeout: float) -> Any:
            return self.call(group.worker(worker), function, args, None, timeout, control=True)

        targets = Targets(self.me.name, self.options.device_maps, plan)
        gpu.current = gpu.Gpus(self.number, self.device, targets, self.connections.to, call)
        streams.current = gpu.current.streams
        self.losses.at_once = gpu.current.let_go

    # -- for the layers above

    def worker_names(self) -> list[str]:
        """All workers, in rank order."""
        self.group.refresh()
        return [info.name for info in self.workers]

    def get_worker_info(self, worker: Any = None) -> WorkerInfo:
        if not isinstance(worker, str | int | None):
            raise TypeError(
                f"get_worker_info(): incompatible function arguments: {worker!r} is no name and no rank of a worker"
            )
        return self.me if worker is None else self.resolve(worker)

    # What programs ask torch's agents for.

    def get_metrics(self) -> dict[str, str]:
        return {name: str(value) for name, value in self.get_debug_info().items()}

    def _get_backend_options(self) -> RpcBackendOptions:
        return self.options

    def _get_device_map(self, to: WorkerInfo) -> DeviceMap:
        return self.options.device_maps.get(to.name, {})

    def link(self, worker: str) -> Link:
        """The link to a worker. Its channel is the same one at both ends. Connects if need be. The connection to this worker
        itself has both ends here: this is the one that asks, ``serving`` the other."""
        return self.connections.to(self.resolve(worker).number)

    def channel(self, worker: str) -> Channel:
        return self.link(worker).channel

    def serving(self, worker: str) -> Link:
        """The link by which a worker reaches us."""
        found = self.link(worker)
        return found if worker != self.name else self.links.other_end(self.number)

    def on_peer_lost(self, callback: PeerLostCallback) -> None:
        """Have ``callback(worker, error)`` called once for each worker that is lost. It must not block. A bound method is
        called for as long as its object lives: the agent outlives the models that listen."""
        callbacks = self._lost_callbacks
        if isinstance(callback, MethodType):
            callbacks.append(weakref.WeakMethod(callback, callbacks.remove))
        else:
            callbacks.append(lambda: callback)

    def counters(self) -> dict[str, int]:
        """The device's counters, and ``rpc_messages`` (frames sent), ``rpc_calls`` (requests of users sent), ``rpc_reads``
        (messages received of which something large had to be READ, for want of a landing place), ``rpc_queued`` (frames that
        had to wait for a peer to read what was before them), ``rpc_dropped`` (frames that were not sent because the peer was
        lost), ``rpc_held`` (requests that were not begun at once, because data of theirs had to come, or answers to be taken,
        first), ``rpc_failures`` (functions that failed here for others), ``rrefs``, ``autograd_contexts``, ``autograd_surveys``
        (backward passes that had to find out which calls take part), and what came and was not its sender's to say, which has
        had no effect: see ``refused``."""
        sent, requests, _, reads, queued, dropped, held, _ = self.links.counts
        return {
            **self.device.counters(),
            "rpc_messages": sent,
            "rpc_calls": requests,
            "rpc_reads": reads,
            "rpc_failures": self.callee.failures.total,
            "rpc_queued": queued,
            "rpc_dropped": dropped + self.callee.dropped,
            "rpc_held": held,
            "bytes_handed": self.callee.handovers.nbytes,
            "rrefs": len(self.rrefs),
            "autograd_contexts": len(self.contexts.live),
            "autograd_surveys": self.contexts.surveys,
            **self.refused(),
        }

    def refused(self) -> dict[str, int]:
        """The numbers of messages that their senders had no right to (docs/protocols.md, 13): answers to calls that were made
        to others, messages about references that others hold, ends of others' autograd contexts, gradients of tensors that
        others got, landing places that others hold, and names that ``allow`` does not have."""
        *_, refused_grants = self.links.counts
        return {
            "refused_answers": self.caller.refused,
            "refused_references": self.rrefs.refused,
            "refused_ends": self.contexts.refused,
            "refused_gradients": self.contexts.refused_gradients,
            "refused_grants": refused_grants + self.callee.refused_grants,
            "refused_names": 0 if permits.current is None else permits.current.refused,
        }

    # -- calls

    def start(
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
        """Send a call. ``timeout`` in seconds: -1 = the default, 0 = none; ``flags``: see ``links/frames``. ``rref``, ``fork``:
        of a value that the call creates. Raises what pickling raises; all other errors are the answer's."""
        if not callable(function):
            raise TypeError("function should be callable.")
        if not flags & frames.CONTROL and (tracing() or dispatch_modes()):
            check_real()
            here.refuse("it calls a function of a worker")
        link = self._links.get(to.number)
        if link is None:
            return self._start_first(to, function, args, kwargs, timeout, flags, future, rref, fork)
        limit = self.rpc_timeout if timeout == -1.0 else self.limit(timeout)
        if self.garbage:
            self.rrefs.collect()
        context = None
        if self.contexts.live and (not flags & frames.CONTROL or hasattr(function, "_carries_context")):
            context = _current_context.context
            if context is not None and context.ended:
                context = None
        request: Callable[..., Pending] = self.caller.request
        if function_modes() or dispatch_modes():
            request = unseen()(request)
        if self.post.observer is not None:
            request = partial(self.post.observer.sending, request)
        if torch_profiler._is_profiler_enabled:
            request = partial(profiled.sending, request, self.name)
        args = args if type(args) is tuple else positional(args)
        return request(link, function, args, kwargs, limit, flags, future, rref, fork, context)

    def _start_first(
        self, to: WorkerInfo, function: Any, args: Any, kwargs: Any, timeout: float, flags: int, future: bool, *numbers: int
    ) -> Pending:
        """``start`` a call to a worker that has to be connected to first. Connecting takes of the call's time, but has at least
        ``_CONNECT_S``, so that a call with less time is made too."""
        limit = self.limit(timeout)
        begun = time.monotonic()
        try:
            self.connections.to(to.number, begun + max(limit, _CONNECT_S) if limit else None)
        except TransferTimeout:
            return self.caller.failed(timed_out(limit, to.name), limit, future=future)
        except RdmaError as error:
            return self.caller.failed(error, limit, future=future)
        spent = time.monotonic() - begun
        pending = self.start(to, function, args, kwargs, timeout, flags, future, *numbers)
        if pending.deadline is not None:
            pending.deadline -= spent
        return pending

    def limit(self, timeout: float) -> float:
        """The seconds that a call with this argument ``timeout`` has: 0 for no limit; what is negative has passed already."""
        if timeout == -1.0:
            return self.rpc_timeout
        found = timeouts.seconds(timeout)
        return found if found >= 0 else _PASSED_S

    def call(self, to: WorkerInfo, function: Any, args: Any, kwargs: Any, timeout: float, *, control: bool = False) -> Any:
        """Call a function and wait for its result. ``control``: the call is our own, not counted as a user's."""
        return self.start(to, function, args, kwargs, timeout, frames.CONTROL if control else 0).result()

    def call_async(
        self, to: WorkerInfo, function: Any, args: Any, kwargs: Any, timeout: float, *, control: bool = False
    ) -> Future:
        future = self.start(to, function, args, kwargs, timeout, frames.CONTROL if control else 0, True).future
        assert future is not None
        return future

    def create(self, to: WorkerInfo, function: Any, args: Any, kwargs: Any, timeout: float) -> Fork:
        """Have ``to`` call a function and keep the result, for ``remote``. Returns the reference to the result at once."""
        isinstance(None, ROOM)
        rref = self.new_id()
        fork = rref if to.number == self.number else self.new_id()
        pending = self.start(to, function, args, kwargs, timeout, frames.REMOTE, True, rref, fork)
        return self.rrefs.forks.created(to.number, rref, fork, pending)

    # -- links

    def _on_connect(self, channel: Channel) -> bytes:
        self.ready.wait(_CONNECT_TIMEOUT_S)
        return self.connections.on_connect(channel)

    def ended(self, link: Link, error: RdmaError) -> list[Any]:
        """A worker is lost, or has left: see ``Losses``."""
        touched = [*self.caller.lost(link, error), *self.callee.lost(link)]
        self.rrefs.lost(link.worker, error)
        if link.worker != self.number:
            self.contexts.lost(link.worker)
        if gpu.current is not None:
            gpu.current.lost(link.worker)
        self.termination.fail(error)
        for find in list(self._lost_callbacks):
            try:
                if (callback := find()) is not None:
                    callback(link.name, error)
            except BaseException as reason:  # the others have to hear of it too
                self.guard.note(reason, "telling of a lost worker")
        return touched

    def _look_after(self) -> None:
        """Tidy up, about every second: free memory, and go on with what waits."""
        self.tidy()
        for link in list(self.links.rows.values()):
            if link.behind:  # where the device's own queue was full, no frame of the peer need follow
                link.flush()
                self.pool.submit(partial(messages.resume, self.callee, link))
        if gpu.current is not None:
            gpu.current.sweep()

    def tidy(self) -> None:
        """Let go what dead references and dead peers left, and what was released."""
        self.rrefs.collect()
        self.callee.handovers.sweep()
        self.losses.sweep()

    # -- the end

    @property
    def idle(self) -> bool:
        """Whether no user's call is outstanding here, and no function runs."""
        held = any(link.held.any for link in list(self.links.rows.values()))
        return not (held or self.pool.busy) and self.caller.idle

    def shutdown(self, graceful: bool, timeout: float) -> None:
        """Leave the group. The local part is always done, whatever is raised. ``graceful``: after ``termination.begin``."""
        parted, leaves = False, partial(_call_all, self.before_leaving, self.guard)
        try:
            if graceful:
                self.termination.part(time.monotonic() + timeout if timeout else None, leaves)
                parted = True
        finally:
            leaves()
            if not parted:
                self.say_goodbye()
            try:
                self.group.leave()
                self.close()
            finally:
                self.termination.over.set()

    def say_goodbye(self) -> None:
        """Tell every peer which exception ends this process, if one does: their ``PeerLost`` names it. Workers that connect
        from now on are told so too, and get no link. The call waits only for rings that were never written to; a peer with a
        full ring is not told."""
        kind, text = own_end()
        self.callee.leaving = True
        links = self.connections.leave(kind, text)
        links = links if kind else []
        for link in links:
            with suppress(RuntimeError):  # lost, or no thread can be had any more to find its ring
                link.post(frames.GOODBYE, 0, frames.CONTROL, 0, (kind.encode(), text.encode(), b"", b""))
        limit = time.monotonic() + _GOODBYE_S
        while (not self.connections.parted or any(link.looked_up for link in links)) and time.monotonic() < limit:
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """End everything that runs here, and have our parts let go of each other: what peers could touch is given back when the
        last tensor over it dies, without Python's collector."""
        error = PeerLost("RPC was shut down here", peer=self.name, status="CLOSED")
        self.device.why_closed = "RPC was shut down here: what was made before cannot be used any more"
        self._carrier.stop()
        self.rrefs.closed = True
        self.device.on_lost = lambda channel: None
        self.caller.stop()
        self.termination.fail(error)
        self._fail_calls(error)
        self.pool.stop()
        self.losses.stop()
        _call_all(self.before_closing, self.guard)
        self.device.close()
        self.contexts.clear()  # only now: those that still ask for one have to hear that we are gone, not that it is
        self._fail_calls(error)  # those begun meanwhile; from here on sending fails
        if gpu.current is not None:
            gpu.current.close()
            gpu.current = streams.current = None
        self.rrefs.close(error)
        _call_all(self.at_close, self.guard)
        self.pool.end()
        self.progress.end()
        self.losses.close()
        self.links.close()
        self._lost_callbacks.clear()
        if self.timeline is not None:
            self.timeline.close()

    def forked(self) -> object:
        """Make every use of this agent's references, futures and models in a forked child an error. Takes no lock. Returns what
        has to be kept for ever."""
        kept = self, self._links
        self._links = self.links.by_worker = {}  # so that every call comes to ``Connections.to``, which refuses it
        self.caller.forked(RdmaError(here.FORKED))
        self.callee.forked = True
        self.garbage.clear()
        gpu.current = streams.current = None
        return kept

    def _fail_calls(self, error: RdmaError) -> None:
        for link in list(self.links.rows.values()):
            link.lost = link.lost or error
            link.explained.set()
            self.caller.lost(link, error)


def _call_all(callbacks: list[Callable[[], None]], guard: Guard) -> None:
    while callbacks:
        try:
            callbacks.pop()()
        except Exception as reason:  # the rest has to be closed, too
            guard.note(reason, "closing what this worker had")


def _takes(agent: Agent) -> dict[int, Handler]:
    """The handlers of received frames, by kind."""
    callee, rrefs, contexts, jobs = agent.callee, agent.rrefs, agent.contexts, agent.pool.jobs
    return {
        frames.REQUEST: callee.accept,
        frames.GRADIENTS: callee.accept,
        frames.RESPONSE: agent.caller.answer,
        frames.ERROR: agent.caller.answer,
        frames.RELEASE: lambda link, frame: callee.release(link, frame.call),
        frames.FORGO: callee.forgo,
        frames.REFERENCES: lambda link, frame: rrefs.receive(link.worker, frame.body),
        frames.ENDED: lambda link, frame: jobs.append(partial(contexts.end, frame.call, link.worker)),
    }


def _open_device(options: RpcBackendOptions, on_connect: Callable[[Channel], bytes], secret: bytes, kind: str) -> Device:
    if kind == "shm" and driver.count():
        kind = "cuda"  # it extends ``shm`` by GPU memory
    device = open_by(options, kind, secret, on_connect)
    device.pin()
    return device


def _check_ways(group: Group, device: Device, options: RpcBackendOptions) -> None:
    """Raise ``NotSupported`` now, not at the first call, if a worker cannot be reached in the way that ``require`` asks for."""
    for record in group.workers.records.values() if options.require else ():
        if record.number != group.number and (why := device.why_not(record.address.encode())):
            group.leave()
            hint = "`rdmarpc doctor` at both workers says what is missing"
            raise NotSupported(f"not reached by what is required: {why}", peer=record.name, hint=hint)


def _warn_of_crowds(group: Group) -> None:
    """Say once a host that its workers take the cores from each other. In a dynamic group the first workers meet nobody yet."""
    record = group.record(group.number)
    beside = [each.number for each in group.workers.records.values() if record is not None and each.host == record.host]
    why = environment.crowded(len(beside), torch.get_num_threads(), len(processors()))
    if why and group.number == min(beside):
        logging.getLogger("rdmarpc").warning("%s", why)


def _tell_end(links: Links, worker: int, context: int) -> None:
    """Tell a worker to which we brought an autograd context that the context is over."""
    link = links.by_worker.get(worker)
    if link is not None:  # else lost, and its part with it
        tell(link, frames.ENDED, context)


def positional(args: Any) -> tuple[Any, ...]:
    """``args`` of a call. Raises ``TypeError`` for a tensor or an array, whose rows would pass for arguments."""
    if hasattr(args, "__array__"):
        raise TypeError(f"args should be a tuple, as in args=(x,), but is of type {type(args).__name__}")
    return tuple(args) if args else ()


# Typed for the rooms above, which may know all of the agent.
current: Callable[..., Agent] = here.current
found: Callable[[], Agent | None] = here.found
