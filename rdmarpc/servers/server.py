"""A parameter server: it keeps some parameters of one model, adds up the workers' gradients, and steps.

Every worker has two bundles with every server: *gradients* there (one slot at the server), *weights* back (one slot at the
worker, which is the memory of the worker's parameters). They take turns, and each is the other's credit:

1. A worker writes its gradients only after the weights of the step before have landed. From then until it has seen the next
   weights land it touches neither the gradient slot nor its parameters.
2. The server writes weights to a worker only after the gradients of this step have landed, from that worker and all others.
   From the landing until that write it alone reads and writes the gradient slot; afterwards it does not touch it.
3. So each slot belongs to one side at any time, whatever is fast or slow: both are the worker's while weights k have landed and
   gradients k + 1 have not been sent, the server's else. A header of another step than the next is an error, never data.
4. Gradients are added in the order of the workers' list, whatever order they came in.
5. The parameters change only between the landing of the last worker's gradients and the first write of weights; every write
   of the step before is over by then, because its worker would not have sent gradients otherwise.

Weights 0 are those of the start: written when all workers have come and the first of them has brought the values.
"""

from __future__ import annotations

import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from ..calls import agent as _agent
from ..calls.agent import Agent
from ..message import errors
from ..transport import (
    NotSupported,
    PeerLost,
    RdmaError,
    RemoteRegion,
    Transfer,
    TransferTimeout,
    assign,
    broken_by,
    fresh,
    kept,
)
from .bundle import CHANGED, STAGED, Bundle, BundleInlet, BundleOutlet, Header, Room, Station
from .kept import ASKED, Kept


class _Client:
    """One worker, as the server sees it."""

    def __init__(self, weights: Bundle, gradients: BundleInlet | None) -> None:
        self.weights, self.inlet = weights, gradients
        self.outlet: BundleOutlet | None = None
        self.alarm: Transfer | None = None
        self.arrived: Header | None = None


class End:
    """The error that ended a server, for workers that ask after the server itself is gone."""

    def __init__(self, workers: list[str]) -> None:
        self.error: Exception | None = None
        """It holds no frames; its cause has the traceback."""
        self.awaited = set(workers)
        """The workers that have not asked to enter yet."""


class Server(threading.Thread):
    """Parameters of one model at one server. Runs from ``start`` to ``close`` or an error, which every worker is told; it never
    times out. Everything but ``ask``, ``why``, ``meet`` and ``close`` belongs to its thread."""

    def __init__(self, station: Station, workers: list[str]) -> None:
        super().__init__(name=f"rdmarpc-server-{station.name}", daemon=True)
        self.station, self.workers = station, workers
        station.expected.update(workers)
        self.end = End(workers)
        self._holders: dict[int, set[str]] = {}
        """By the number of an optimizer that some workers have dropped: those that have not."""
        self.gone: set[str] = set()
        """Workers that are lost or have closed the model. Like ``end.awaited``, maintained by the owner of this server."""
        self.steps = -1
        """The step of the weights that were sent last; -1 before those of the start, which are step 0."""
        self._clients: dict[str, _Client] = {}
        self._left: dict[str, RdmaError] = {}
        """The workers that have closed the model, and for each the error for those that go on."""
        self._kept = Kept()
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._lock = threading.Lock()
        self._closing = False

    # -- any thread

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of this server, or of its ``Kept`` (``kept.ASKED``), on its thread between two steps. Returns the
        result."""
        future: Future[Any] = Future()
        of = self._kept if method in ASKED else self
        with self._lock:
            if self.end.error is not None:
                raise fresh(self.end.error)
            self._jobs.append((lambda: getattr(of, method)(*args), future))
            self.station.poller.kick()
        try:
            return future.result(self.station.timeout)
        except FutureTimeout:
            if future.done():
                raise  # by the method itself
            text = f"server {self.station.name!r} is still busy with a step after {self.station.timeout:g} s"
            raise TransferTimeout(text, peer=self.station.name) from None

    def meet(self) -> None:
        """Connect to all workers, so that the loss of a worker is noticed even before it comes. Takes as long as the
        slowest."""
        for worker in self.workers:
            if self._closing or self.end.error is not None:
                return
            try:
                self.station.channels(worker)
            except Exception as error:
                self.station.lost(worker, broken_by(error, "reaching it", peer=worker, device=self.station.device.name))

    def close(self) -> None:
        """End the server. Returns when its thread has ended. Idempotent."""
        self._closing = True
        if self.is_alive() and threading.current_thread() is not self:
            with self._lock:
                if self.end.error is None:
                    self.station.poller.kick()
            self.join(5.0)

    # -- set-up

    def enter(self, worker: str, weights: Bundle, gradients: Bundle | None) -> tuple[bytes, int] | None:
        """A worker brings its two bundles, of the same tensors as everybody's; those that need gradients come first in both
        (``gradients`` is ``None`` where nothing does). Returns where its gradients land: descriptor and notification number.
        Raises ``ValueError`` for other tensors."""
        if worker in self._clients or worker not in self.workers:
            why = f"worker {worker!r} is not expected: this model is for {self.workers}, each once (name= tells models apart)"
            raise ValueError(why)
        if not self._clients:
            self._kept.hold(Room(self.station.device, weights), 0 if gradients is None else len(gradients))
        _same_tensors(self._kept.store.bundle, weights, worker)
        inlet = None
        if gradients is not None:
            inlet = BundleInlet(self.station, gradients, lambda header: self._landed(worker, header))
        self._clients[worker] = _Client(weights, inlet)
        return None if inlet is None else inlet.offer()

    def connect(self, worker: str, slot: tuple[bytes, int], alarm: int) -> None:
        """Connect the outlet of a worker's weights to their slot there. ``alarm``: the notification that tells it of errors."""
        client, channel = self._clients[worker], self.station.channel(worker)
        remote = RemoteRegion.load(slot[0])
        client.outlet = BundleOutlet(self.station.device, channel, client.weights, remote, slot[1])
        client.alarm = channel.prepare([], notify=alarm)

    def leave(self, worker: str, why: str, lost: str, status: str) -> None:
        """Note that a worker has closed the model: nothing is written to it any more. ``why``: the error that ended its
        training, if one did. ``lost``: the worker that it had lost, if that was the reason."""
        text = f"worker {worker!r} has closed the model" + (f": {why}" if why else ", and others go on")
        self._left[worker] = PeerLost(text, peer=lost, status=status) if lost else RdmaError(text, peer=worker)
        self.station.forget(worker)

    def forget(self, worker: str, numbers: list[int]) -> None:
        """This worker has dropped these optimizers; what all have dropped is not kept."""
        for number in numbers:
            left = self._holders.setdefault(number, set(self.workers))
            left.discard(worker)
            if not left:
                del self._holders[number]
                self._kept.forget(number)

    def counters(self) -> dict[str, int]:
        return self.station.device.counters()

    # -- the thread

    def run(self) -> None:
        # A new thread has OpenMP's own idea of how many threads there are until it first asks torch; results depend on it.
        torch.get_num_threads()
        try:
            while not self._closing:
                self.station.poll(1.0)
                self._work()
            error: Exception = RdmaError("the model was closed", peer=self.station.name)
        except BaseException as raised:
            error = kept(errors.ordinary(raised))
            assign(error, "__cause__", RuntimeError(f"on worker {self.station.name!r}: {traceback.format_exc()}"))
        with self._lock:
            self.end.error = error
        for _, future in self._jobs:
            future.set_exception(fresh(error))
        self._alarm()
        self.station.close()

    def _work(self) -> None:
        while self._jobs:
            job, future = self._jobs.popleft()
            try:
                with self.station.naming():
                    future.set_result(job())
            except Exception as error:
                future.set_exception(error)
        arrived = [client.arrived is not None for client in self._clients.values()]
        if self._left and (self.steps < 0 or any(arrived)):
            raise min(self._left.values(), key=lambda error: not isinstance(error, PeerLost))
        if self.steps < 0:
            self._begin()
        elif all(arrived):
            self._step()

    def _begin(self) -> None:
        clients = [self._clients.get(worker) for worker in self.workers]
        if self._kept.filled and all(client is not None and client.outlet is not None for client in clients):
            self.steps = 0
            for client in self._clients.values():
                self._write(client, tuple(range(len(self._kept.store.bundle))), 0)

    def _landed(self, worker: str, header: Header) -> None:
        client = self._clients[worker]
        if header.step != self.steps + 1 or client.arrived is not None:
            raise RdmaError(f"gradients {header.step} came when {self.steps + 1} were due", peer=worker)
        client.arrived = header

    def _step(self) -> None:
        clients = [self._clients[worker] for worker in self.workers]
        came = [(c.inlet.room, c.arrived) for c in clients if c.inlet is not None and c.arrived is not None]
        number = came[0][1].optimizer
        if any(header.optimizer != number for _, header in came):
            raise NotSupported("the workers step different optimizers", hint="make the same steps in the same order everywhere")
        changed = self._kept.step(number, [(room, header.note_bytes) for room, header in came])
        self.steps += 1
        for client, (_, header) in zip(clients, came):
            self._write(client, changed, header.flags)
            client.arrived = None

    def _write(self, client: _Client, present: tuple[int, ...], flags: int) -> None:
        assert client.outlet is not None
        with self.station.naming():
            client.outlet.finish(self.station.timeout)
            send = client.outlet.send_copies if flags & STAGED else client.outlet.send_room
            send(Header(0, self.steps, CHANGED * bool(self._kept.changed)), self._kept.store, present)

    def _alarm(self) -> None:
        for client in self._clients.values():
            if client.alarm is not None:
                with suppress(RdmaError):  # it is gone, too
                    client.alarm.post()


def _same_tensors(mine: Bundle, theirs: Bundle, worker: str) -> None:
    ours = [(edge.name, edge.shape, edge.dtype) for edge in mine.edges]
    others = [(edge.name, edge.shape, edge.dtype) for edge in theirs.edges]
    if ours != others or any(one.strides != other.strides for one, other in zip(mine.edges, theirs.edges)):
        different = next((a for a, b in zip(ours, others) if a != b), "a tensor more, or another memory order")
        raise ValueError(f"worker {worker!r} serves another model under this name: {different} differs")


# -- the models whose parameters this process keeps


class _Table(dict[str, Server]):
    """Servers by model."""

    def __init__(self) -> None:
        super().__init__()
        self.given_up: dict[str, End] = {}
        """Of models that all who had come have closed, or are lost, before the others came."""


_servers: weakref.WeakKeyDictionary[Agent, _Table] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_ASKED = ASKED | {"connect", "counters", "forget"}
"""What workers ask a ``Server`` for."""


def _table(agent: Agent) -> _Table:
    with _lock:
        if agent in _servers:
            return _servers[agent]
        table = _Table()
        _servers[agent] = table

    def lost(worker: str, error: RdmaError) -> None:
        for model, server in list(table.items()):
            if worker in server.workers:
                server.station.lost(worker, error)
                _forget(table, model, worker)
        for model, end in list(table.given_up.items()):
            if worker in end.awaited:  # another one of its name may come, in another life of the model
                table.given_up.pop(model, None)

    agent.on_peer_lost(lost)
    agent.at_close.append(partial(_close_all, table))
    return table


def _close_all(table: _Table) -> None:
    """Servers refer to their agent: what would be kept by it would keep it."""
    with _lock:
        servers = list(table.values())
        table.clear()
    for server in servers:
        server.close()


def _forget(table: _Table, model: str, worker: str) -> Server | None:
    """The server, if that was the last worker: it is no longer kept then. Until all are gone the slots of one that has ended
    stay, because somebody may still write there. Who comes late is told why it ended."""
    with _lock:
        server = table.get(model)
        if server is not None:
            server.gone.add(worker)
            if server.gone | server.end.awaited >= set(server.workers):  # all that ever came: nobody writes here any more
                if server.end.awaited - server.gone:
                    table.given_up[model] = server.end
                return table.pop(model)
    return None


def _turn_away(table: _Table, model: str, worker: str, me: str) -> None:
    """Raises for a worker that comes when all who came before it have gone. If one of these comes again, it begins anew."""
    end = table.given_up.get(model)
    if end is None:
        return
    if worker not in end.awaited:
        del table.given_up[model]
        return
    _expect_no_more(table, model, worker)
    raise RdmaError("all others have closed this model", peer=me) if end.error is None else fresh(end.error)


def _expect_no_more(table: _Table, model: str, worker: str) -> None:
    """A worker knows that all others have given that model up."""
    end = table.given_up.get(model)
    if end is not None:
        end.awaited.discard(worker)
        if not end.awaited:
            del table.given_up[model]


def enter(
    model: str, workers: list[str], worker: str, weights: Bundle, gradients: Bundle | None, timeout: float
) -> tuple[bytes, int] | list[str] | None:
    """Called at a server by each worker of a model; the first one makes it. See ``Server.enter``. Who has left the model and
    comes again before all others have left gets the names of these, and has to come later."""
    agent = _agent.current()
    table = _table(agent)
    with _lock:
        agent.device.check()  # afterwards nobody would end it
        server = table.get(model)
        if server is not None and worker in server.gone:
            return sorted(set(server.workers) - server.gone)
        new = server is None
        if server is None:
            _turn_away(table, model, worker, agent.name)
            server = table[model] = Server(Station(agent.name, agent.device, agent.channel, timeout), workers)
            server.start()
        server.end.awaited.discard(worker)
    if new:
        threading.Thread(target=server.meet, name=f"rdmarpc-meet-{agent.name}", daemon=True).start()
    return server.ask("enter", worker, weights, gradients)


def ask(model: str, method: str, args: tuple[Any, ...]) -> Any:
    """Called at a server: a method of its ``Server``."""
    if method not in _ASKED:
        raise RdmaError(f"a server is not asked to {method!r}")
    return _find(model).ask(method, *args)


def why(model: str) -> bytes:
    """Called at a server: the error that ended it, as ``message/errors`` has it; empty if there is none."""
    error = _find(model).end.error
    return b"" if error is None else errors.dump(error, _agent.current().me)


def leave(model: str, worker: str, why: str = "", lost: str = "", status: str = "") -> None:
    """Called at a server: this worker is done, nothing of it will be written here; the last one ends it. ``why``, ``lost``: as
    of ``Server.leave``. Idempotent."""
    table = _table(_agent.current())
    server = table.get(model)
    if server is None:
        with _lock:
            _expect_no_more(table, model, worker)
        return
    if server.end.error is None:
        try:
            server.ask("leave", worker, why, lost, status)
        except Exception:
            if server.end.error is None:
                raise
    last = _forget(table, model, worker)
    if last is not None:
        last.close()


def _find(model: str) -> Server:
    agent = _agent.current()
    server = _table(agent).get(model)
    if server is None:
        raise RdmaError("this model is not (or no longer) kept here", peer=agent.name)
    return server
