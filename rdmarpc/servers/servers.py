"""The servers of one model, at a worker that trains it: entered, asked, and left; gradients go out, weights land. The other
half of ``server``, whose invariants hold here too."""

from __future__ import annotations

import gc
import itertools
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from ..calls.agent import Agent
from ..message import errors
from ..transport import NotSupported, PeerLost, RdmaError, RemoteRegion, TransferTimeout, for_others
from . import server as serving
from .bundle import ALWAYS, CHANGED, STAGED, Bundle, BundleInlet, BundleOutlet, Edge, Header, Station, between, padded
from .parameter import Left, Shown, Watch, check_memory


class Half:
    """This worker's half of the exchange with one server. ``weights`` and ``gradients`` (``None``: no tensor there needs any)
    list the same tensors in the same order; ``gradients`` may leave some out."""

    def __init__(self, station: Station, weights: Bundle, gradients: Bundle | None) -> None:
        self.server = weights.source
        self.weights, self.gradients = weights, gradients
        self._station = station
        self.inlet = BundleInlet(station, weights, self._landed)
        """Its room is the memory of the parameters."""
        self.alarm = station.take_number(station.channel(self.server), self._alarmed)
        self._outlet: BundleOutlet | None = None
        self.steps = -1
        """The step of the weights that landed last; -1 before those of the start, which are step 0."""
        self.wanted = 0
        """The step of the weights that are to land next, or have landed last."""
        self.alarmed = False
        self.changed = False
        """Whether the step of the weights that landed last has changed gradients."""

    def connect(self, slot: tuple[bytes, int] | None) -> None:
        """Connect the outlet of the gradients to their slot at the server."""
        if slot is not None and self.gradients is not None:
            channel, remote = self._station.channel(self.server), RemoteRegion.load(slot[0])
            self._outlet = BundleOutlet(self._station.device, channel, self.gradients, remote, slot[1])

    def send(
        self, optimizer: int, marks: bytes, at: tuple[int, ...], grads: list[torch.Tensor], numbers: list[float], staging: str
    ) -> None:
        """Gradients of the next step. They belong to the write until ``finish``. The note: marks, padded to 8 bytes, then the
        numbers of the optimizer's groups (float64)."""
        assert self._outlet is not None
        note = marks.ljust(padded(len(marks)), b"\0") + struct.pack(f"<{len(numbers)}d", *numbers)
        header = Header(0, self.steps + 1, STAGED * (staging == ALWAYS), len(note), optimizer)
        with self._station.naming():
            self._outlet.send_loose(header, note, at, grads, staging)
        self.wanted = self.steps + 1

    def finish(self, timeout: float) -> None:
        if self._outlet is not None:
            with self._station.naming():
                self._outlet.finish(timeout)

    def _landed(self, header: Header) -> None:
        if header.step != self.steps + 1 or header.step != self.wanted:
            raise RdmaError(f"weights {header.step} came when {self.wanted} were due", peer=self.server)
        self.steps, self.changed = header.step, bool(header.flags & CHANGED)

    def _alarmed(self, count: int) -> None:
        self.alarmed = True


class Trainer:
    """All servers of one model, seen from one worker. One thread at a time. ``explain(server)`` gives the error that ended a
    server; the station's timeout bounds every wait."""

    def __init__(self, station: Station, explain: Callable[[str], BaseException]) -> None:
        self.station, self.timeout, self._explain = station, station.timeout, explain
        self.halves: dict[str, Half] = {}
        self.late = False
        """Whether the last wait, for weights or for an answer of a server, timed out."""
        self.waiting = True
        """Whether weights are on their way, or may be: set it before gradients are sent. While they are, the parameters are not
        to be read."""

    def add(self, weights: Bundle, gradients: Bundle | None) -> Half:
        half = self.halves[weights.source] = Half(self.station, weights, gradients)
        return half

    def pull(self) -> None:
        """Return when the weights of the last step have landed from every server. Raises ``PeerLost``, ``TransferTimeout``
        (they may still come: call it again), what ended a server."""
        if not self.waiting:
            return
        self.station.check_open()
        deadline = time.monotonic() + self.timeout
        while behind := [half for half in self.halves.values() if half.steps < half.wanted]:
            left = deadline - time.monotonic()
            if left <= 0:
                self.late = True
                names = ", ".join(repr(half.server) for half in behind)
                why = f"the weights of {names} did not come within {self.timeout} s"
                hint = "every worker of the model has to call serve() and make every step; timeout= sets the limit"
                raise TransferTimeout(why, device=self.station.device.name, hint=hint)
            self.station.poll(left)
            self._raise_alarm()
        self.waiting = self.late = False

    def ready(self) -> None:
        """Wait until the weights are here, and check that all servers are. Call it before sending."""
        self.station.check_open()
        self.pull()
        self._raise_alarm()
        self.station.check()
        for half in self.halves.values():  # a wait that timed out may have left something
            half.finish(self.timeout)

    def finish(self) -> None:
        """Wait until the memory of the sent gradients may be changed again."""
        self.waiting = True
        for half in self.halves.values():
            half.finish(self.timeout)

    def _raise_alarm(self) -> None:
        for half in self.halves.values():
            if half.alarmed:
                error = self._explain(half.server)
                self.late |= isinstance(error, TransferTimeout)
                raise error

    def close(self) -> None:
        self.station.close()
        for half in self.halves.values():
            half.inlet.room.tensors.clear()  # the parameters have their memory, and are all that shows it


_LEAVE_TIMEOUT_S = 10.0
_LATE_TIMEOUT_S = 1.0
"""For a server that was waited for in vain before."""
_AGAIN_S = 0.02
_MANY = 8
_open: set[Trainer] = set()
"""Servers may write into their landing places: these must not go, whatever becomes of the models."""
_dropped: deque[Servers] = deque()
"""Those that nobody has any more and nobody has closed: alive once more, until they are left."""


def _let_go() -> None:
    """RPC was shut down: nobody writes here any more, and nobody is left to be told."""
    _open.clear()
    _dropped.clear()


def close_dropped() -> None:
    """Leave the servers of models that nobody has any more and nobody has closed."""
    if len(_open) >= _MANY:
        gc.collect()  # finds those in circles
    while _dropped:
        servers = _dropped.popleft()
        with suppress(RdmaError):
            if not servers.closed:
                servers.leave(None)


class Servers:
    """The servers of one model, as one of its workers sees them. ``home``: the server of every parameter, by name;
    ``workers``: all who train the model; ``staging``, ``timeout``: see ``serve``."""

    closed = True
    """Also until it is set up."""
    watch: Watch

    def __init__(
        self, net: nn.Module, home: dict[str, str], agent: Agent, model: str, workers: list[str], timeout: float, staging: str
    ) -> None:
        shown = check_memory(net)
        self.agent, self.model, self.workers, self.timeout, self.staging = agent, model, workers, timeout, staging
        self.optimizer: torch.optim.Optimizer | None = None
        self.optimizers = itertools.count(1)
        self.unused: deque[int] = deque()
        self.left = Left(len(workers) == 1)
        self.steps = 0
        self._uncounted = 0
        named = dict(net.named_parameters())
        self.names: dict[str, list[str]] = {}
        """By server, in the order of its bundles: those that need gradients come first."""
        for name in sorted(home, key=lambda name: not named[name].requires_grad):
            self.names.setdefault(home[name], []).append(name)
        self.parameters = {server: [named[name] for name in names] for server, names in self.names.items()}
        self.position = {
            parameter: (server, at) for server, found in self.parameters.items() for at, parameter in enumerate(found)
        }
        # It may outlive this, see ``_open``.
        station = Station(agent.name, agent.device, agent.channel, timeout)
        self.trainer = Trainer(station, partial(_explain, agent, model, timeout))
        _open.add(self.trainer)
        if _let_go not in agent.at_close:
            agent.at_close.append(_let_go)
        agent.on_peer_lost(station.lost)
        self.edges: list[Edge] = []
        """All that crosses in a step."""
        try:
            with self.trainer.station.naming():
                self._set_up(shown)
        except BaseException as error:
            self.leave(error)
            raise

    def __del__(self) -> None:
        # In any thread, at any moment, perhaps within a lock: no calls here.
        if not self.closed and not self.agent.device.closed:
            _dropped.append(self)

    def _set_up(self, shown: list[Shown]) -> None:
        numbers = itertools.count(1)
        halves = []
        for server, names in self.names.items():
            both = between(server, self.agent.name, dict(zip(names, self.parameters[server])), numbers)
            self.edges += [edge for bundle in both if bundle is not None for edge in bundle.edges]
            halves.append(self.trainer.add(*both))
        for half in halves:
            args = (self.model, self.workers, self.agent.name, half.weights, half.gradients, self.timeout)
            half.connect(self._enter(half.server, args))
        for half in halves:
            if self.agent.name == self.workers[0]:
                self.ask(half.server, "fill", [parameter.detach() for parameter in self.parameters[half.server]])
            self.ask(half.server, "connect", self.agent.name, half.inlet.offer(), half.alarm)
        self.trainer.pull()
        for half in halves:
            for parameter, landing in zip(self.parameters[half.server], half.inlet.room.tensors):
                parameter.data = landing
        self.watch = Watch([name for found in self.names.values() for name in found], list(self.position), self.pull)
        self.closed = False
        for tensor, parameter, at in shown:
            self.watch.lend(parameter)
            tensor.data = parameter.detach().as_strided(tensor.shape, tensor.stride(), at)

    def _enter(self, server: str, args: tuple[Any, ...]) -> tuple[bytes, int] | None:
        """Enter when all workers of an earlier model of this name have left it."""
        deadline = time.monotonic() + self.timeout
        while isinstance(found := self._call(server, serving.enter, args), list):
            if time.monotonic() > deadline:
                names = ", ".join(map(repr, found))
                why = f"{names} did not close the model that this worker has closed before, within {self.timeout:g} s"
                hint = "close() it at every worker, also after an error; name= tells models apart"
                raise TransferTimeout(why, peer=server, hint=hint)
            time.sleep(_AGAIN_S)
        return found

    # -- steps

    def pull(self) -> None:
        """See ``Trainer.pull``."""
        if self.watch.left_behind:
            why = "this process was forked while the weights of a served model were on their way to its parent"
            raise RdmaError(why, hint="call model.pull() in the thread that forks")
        self.trainer.pull()
        if self.watch.here():
            changed = [half.server for half in self.trainer.halves.values() if half.changed]
            self.left.landed(changed, lambda server: self.ask(server, "changed_gradients"))

    def ready(self) -> None:
        """Before a step: the weights and the servers are here, and these have what was written into parameters here."""
        self.pull()
        self.check_written()
        self.trainer.ready()

    def sending(self, leaves: bool) -> None:
        """A step sends its gradients. Whatever ends it meanwhile: the parameters are not to be read before ``pull``.
        ``leaves``: nor are their gradients, unless it is known to leave them as they are."""
        self.trainer.waiting = True
        self.watch.away(leaves)

    def sent(self) -> None:
        """After a step's gradients were sent. Returns when they may be changed again."""
        self.steps += 1
        self.trainer.finish()
        if self.watch.shared:
            self.pull()

    def check_written(self) -> None:
        """Tell the servers what somebody wrote into parameters here. Raises ``NotSupported`` where they have other workers."""
        if self.closed or not (written := self.watch.written()):
            return
        everything = list(self.position.items())
        if len(self.workers) > 1:
            _, (server, at) = everything[written[0]]
            why = f"parameter {self.names[server][at]!r} was written into here, and its other workers do not see that"
            hint = "call load_state_dict with the same values at every worker; make optimizers by model.new_optimizer"
            raise NotSupported(why, hint=hint)
        self.load([everything[number] for number in written])

    def load(self, found: Iterable[tuple[nn.Parameter, tuple[str, int]]] | None = None) -> None:
        """Give the servers the values of these parameters, which stand there (``position``); ``None``: of all."""
        values: dict[str, dict[int, torch.Tensor]] = {}
        for parameter, (server, at) in self.position.items() if found is None else found:
            values.setdefault(server, {})[at] = torch.Tensor.detach(parameter)  # not lent: nobody keeps it
        for server, theirs in values.items():
            self.ask(server, "load", theirs)
        self.watch.loaded()

    # -- set-up calls, none of them in the steady state

    def forget(self) -> None:
        """Have the servers drop the optimizers that the program has dropped here."""
        numbers = [self.unused.popleft() for _ in range(len(self.unused))]
        for server in self.names if numbers else ():
            self.ask(server, "forget", self.agent.name, numbers)

    def ask(self, server: str, method: str, *args: Any) -> Any:
        """A method of a ``Server``."""
        return self._call(server, serving.ask, (self.model, method, args))

    def _call(self, server: str, function: Any, args: tuple[Any, ...]) -> Any:
        try:
            return self.agent.call(self.agent.resolve(server), function, args, None, self.timeout)
        except TransferTimeout:
            self.trainer.late = True
            raise

    def counters(self, everywhere: bool) -> dict[str, int]:
        totals = self.agent.counters()
        totals["rpc_messages"] -= self._uncounted
        totals["steps"] = self.steps
        if everywhere and not self.closed:
            before = self.agent.counters()["rpc_messages"]
            for server in self.names:
                for key, value in self.ask(server, "counters").items():
                    totals[key] = totals.get(key, 0) + value
            self._uncounted += self.agent.counters()["rpc_messages"] - before
        return totals

    def close(self) -> None:
        if self.closed:
            return
        failed: BaseException | None = None
        try:
            if not self.trainer.late:
                self.pull()
                self.trainer.station.check()
        except Exception as error:  # said where the weights were wanted
            failed = error
        self.leave(failed)

    def leave(self, failed: BaseException | None) -> None:
        """Tell the servers, all at once: whoever closes after a timeout has waited long enough. ``failed``: why we go, if not
        because we are done; who was lost is said to those who go on."""
        opened, self.closed = not self.closed, True
        told = None if failed is None else for_others(failed, self.agent.name)
        why: tuple[str, ...] = ()
        if isinstance(told, PeerLost):
            why = told.message, told.peer, told.status
        elif told is not None:
            why = (f"{type(told).__name__}: {told}".partition("\n")[0].removesuffix(": "),)
        safe = True
        limit = _LATE_TIMEOUT_S if self.trainer.late else min(_LEAVE_TIMEOUT_S, self.timeout)
        leaving = {}
        for server in self.names:
            with suppress(RuntimeError):  # it is not in the group any more, or we are not
                to, args = self.agent.resolve(server), (self.model, self.agent.name, *why)
                leaving[server] = self.agent.call_async(to, serving.leave, args, None, limit)
        for server in self.names:
            try:
                leaving[server].wait()
            except (RuntimeError, KeyError):
                # Lost, or shut down: nothing of ours is left there. If it only does not answer, it may still write here.
                channel = self.trainer.station.peers.get(server)
                safe &= channel is None or channel.error is not None
        self.trainer.close()
        if opened:
            self.watch.close()
        if safe:
            _open.discard(self.trainer)


def _explain(agent: Agent, model: str, timeout: float, server: str) -> BaseException:
    try:
        reason = agent.call(agent.resolve(server), serving.why, (model,), None, timeout)
    except RdmaError as error:
        return error
    return errors.rebuild(reason) if reason else RdmaError(f"server {server!r} has ended", peer=server)
