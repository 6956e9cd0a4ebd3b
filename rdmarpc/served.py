"""``serve``: a model that computes here, with its parameters kept, summed up and stepped by servers."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from . import agent as _agent
from . import served_optimizer, serving
from .agent import Agent
from .graph.bundle import ALWAYS, TRACED, WEIGHT, Bundle
from .graph.command import WorkerError
from .graph.describe import Transfers, describe
from .graph.layout import dense
from .graph.place import GRADIENT, Edge, Placement
from .graph.trainer import Half, Trainer, gradient_note
from .transport import NotSupported, PeerLost, RdmaError, TransferTimeout, for_others

ROUND_ROBIN, BALANCED = "round_robin", "balanced"
_LEAVE_TIMEOUT_S = 10.0
_LATE_TIMEOUT_S = 1.0
"""For a server that was waited for in vain before."""
_open: set[Trainer] = set()
"""Servers may write into their landing places: these must not go, whatever becomes of the models."""


def serve(
    net: nn.Module,
    servers: Sequence[str],
    optimizer: type[torch.optim.Optimizer] | None = None,
    *,
    placement: str | Mapping[str, str] = ROUND_ROBIN,
    workers: Sequence[str] | None = None,
    name: str = "model",
    staging: str = TRACED,
    timeout: float = 60.0,
    **defaults: Any,
) -> ServedModel:
    """Have ``servers`` keep the parameters of ``net``, and return a model that trains as ``net`` would have trained here:
    ``model.optimizer`` (of the class ``optimizer``, with ``defaults``) sends the gradients away when it steps; the servers add
    those of all ``workers``, step, and write the new weights into the memory of this model's parameters, which the next forward
    waits for. From a step until then the parameters are not to be read from elsewhere (``model.pull()`` waits, too).

    ``workers``: the names of all who train this model, each of whom calls ``serve`` with the same arguments (``None``: this one
    alone); their gradients are summed up in that order, so divide the loss by their number for the mean. The values of the
    start are those of the first one. ``name`` tells apart several models of the same workers.
    ``placement``: ``"round_robin"`` by tensor, ``"balanced"`` by bytes (the largest first), or server by name of a parameter
    or of a module that has it (``""``: everything else). ``staging``: ``"traced"`` (gradients are copied aside once, then
    written from where autograd left them) or ``"always"`` (gradients and weights are copied aside every time: the ablation).
    ``timeout``: seconds that a step may wait.

    Returns when all workers have come and the weights are here; one that is lost before it came, or does not answer the servers
    within the smaller of 10 s and ``peer_timeout`` + 2 s, is ``PeerLost``. Buffers stay at their worker. Raises ``ValueError``
    for an unknown worker, placement or parameter, ``NotSupported``, ``TransferTimeout``, ``PeerLost``.
    """
    agent = _agent.current()
    everybody = [agent.name] if workers is None else list(workers)
    _check(agent, servers, everybody, staging)
    if optimizer is None and defaults:
        raise ValueError(f"{', '.join(defaults)} given without an optimizer")
    model = f"{name} of {', '.join(everybody)}" if workers is not None else f"{name} {uuid.uuid4().hex}"
    home = place(net, servers, placement)
    session = Session(net, home, agent, model, everybody, timeout, staging)
    served = ServedModel(net, session)
    if optimizer is not None:
        try:
            session.optimizer = served.new_optimizer(optimizer, **defaults)
        except BaseException:
            session.close()
            raise
    return served


def _check(agent: Agent, servers: Sequence[str], workers: list[str], staging: str) -> None:
    known = agent.worker_names()
    for worker in (*servers, *workers):
        if worker not in known:
            raise ValueError(f"{worker!r} is not in this group; its workers are " + ", ".join(map(repr, known)))
    if not servers or isinstance(servers, str) or len(set(servers)) < len(servers):
        raise ValueError(f"servers={servers!r} must be a list of names, each once")
    if agent.name not in workers or len(set(workers)) < len(workers):
        raise ValueError(f"workers={workers!r} must have {agent.name!r}, and each name once")
    if both := set(servers) & set(workers):
        raise NotSupported(f"{sorted(both)} are workers and servers of one model", hint="start a process for each")
    if staging not in (TRACED, ALWAYS):
        raise ValueError(f"staging={staging!r} must be {TRACED!r} or {ALWAYS!r}")


def place(net: nn.Module, servers: Sequence[str], placement: str | Mapping[str, str]) -> dict[str, str]:
    """The server of every parameter, by name. See ``serve``."""
    parameters = dict(net.named_parameters())
    if not parameters:
        raise ValueError(f"{type(net).__name__} has no parameters")
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.UninitializedParameter):
            raise NotSupported(f"{name!r} has no shape yet", hint="run the model once before serve()")
        if parameter.device.type != "cpu" or parameter.layout is not torch.strided:
            raise NotSupported(f"{name!r} is {parameter.layout} on {parameter.device}; dense tensors on the CPU can be served")
    if placement == ROUND_ROBIN:
        return dict(zip(parameters, itertools.cycle(servers)))
    if placement == BALANCED:
        load = dict.fromkeys(servers, 0)
        home = {}
        for name in sorted(parameters, key=lambda name: -parameters[name].nbytes):  # equal ones keep their order
            home[name] = min(load, key=load.__getitem__)
            load[home[name]] += parameters[name].nbytes
        return {name: home[name] for name in parameters}
    if isinstance(placement, str):
        raise ValueError(f"placement={placement!r} must be {ROUND_ROBIN!r}, {BALANCED!r}, or servers by name")
    return {name: _placed(name, placement, servers) for name in parameters}


def _placed(name: str, placement: Mapping[str, str], servers: Sequence[str]) -> str:
    parts = name.split(".")
    for end in range(len(parts), -1, -1):
        server = placement.get(".".join(parts[:end]))
        if server is not None:
            if server not in servers:
                raise ValueError(f"placement puts {name!r} on {server!r}, which is not one of servers={list(servers)}")
            return server
    raise ValueError(f"placement has no server for {name!r}; '' stands for everything else")


class Session:
    """One model at one worker: its parameters by server, and the way there."""

    def __init__(
        self, net: nn.Module, home: dict[str, str], agent: Agent, model: str, workers: list[str], timeout: float, staging: str
    ) -> None:
        self.agent, self.model, self.workers, self.timeout, self.staging = agent, model, workers, timeout, staging
        self.optimizer: torch.optim.Optimizer | None = None
        self.optimizers = itertools.count(1)
        self.closed = False
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
        self.trainer = Trainer(agent.name, agent.device, agent.channel, self._explain, timeout)
        _open.difference_update([trainer for trainer in _open if trainer.station.device.closed])
        _open.add(self.trainer)
        agent.on_peer_lost(self.trainer.station.lost)
        self.placement = Placement(0, agent.name, [], None, [agent.name, *self.names])
        try:
            self._set_up()
        except BaseException as error:
            self._leave(error)
            raise

    def _set_up(self) -> None:
        numbers = itertools.count(1)
        halves = [self._half(server, numbers) for server in self.names]
        for half in halves:
            args = (self.model, self.workers, self.agent.name, half.weights, half.gradients, self.timeout)
            half.connect(self._call(half.server, serving.enter, args))
        for half in halves:
            if self.agent.name == self.workers[0]:
                self.ask(half.server, "fill", [parameter.detach() for parameter in self.parameters[half.server]])
            self.ask(half.server, "connect", self.agent.name, half.offer(), half.alarm)
        self.trainer.pull()
        for half in halves:
            for parameter, landing in zip(self.parameters[half.server], half.room.tensors):
                parameter.data = landing

    def _half(self, server: str, numbers: Iterator[int]) -> Half:
        me, parameters = self.agent.name, self.parameters[server]
        learns = sum(parameter.requires_grad for parameter in parameters)
        orders = [(dense(parameter.detach()) or (None, 0))[1] for parameter in parameters]

        def edges(kind: str, source: str, target: str, count: int) -> list[Edge]:
            return [
                Edge(next(numbers), kind, name, source, target, tuple(p.shape), p.dtype, 1)
                for name, p in zip(self.names[server][:count], parameters)
            ]

        weights = Bundle(edges(WEIGHT, server, me, len(parameters)), orders)
        gradients = Bundle(edges(GRADIENT, me, server, learns), orders[:learns], gradient_note(learns)) if learns else None
        self.placement.edges += [*weights.edges, *(gradients.edges if gradients is not None else ())]
        return self.trainer.add(weights, gradients)

    # -- set-up calls, none of them in the steady state

    def ask(self, server: str, method: str, *args: Any) -> Any:
        """A method of a ``Server``."""
        return self._call(server, serving.ask, (self.model, method, args))

    def _call(self, server: str, function: Any, args: tuple[Any, ...]) -> Any:
        try:
            return self.agent.call(self.agent.resolve(server), function, args, None, self.timeout)
        except TransferTimeout:
            self.trainer.late = True
            raise

    def _explain(self, server: str) -> BaseException:
        try:
            reason = self._call(server, serving.why, (self.model,))
        except RdmaError as error:
            return error
        if reason is None:
            return RdmaError(f"server {server!r} has ended", peer=server)
        return WorkerError(*reason).raised(server)

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
                self.trainer.pull()
                self.trainer.station.check()
        except Exception as error:  # said where the weights were wanted
            failed = error
        self._leave(failed)

    def _leave(self, failed: BaseException | None) -> None:
        """Tell the servers, all at once: whoever closes after a timeout has waited long enough. ``failed``: why we go, if not
        because we are done; who was lost is said to those who go on."""
        self.closed = True
        told = None if failed is None else for_others(failed, self.agent.name)
        why = (told.message, told.peer, told.status) if isinstance(told, PeerLost) else ()
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
        if safe:
            _open.discard(self.trainer)


class ServedModel(nn.Module):
    """Has the parts of the original, and is it for ``named_parameters`` and ``state_dict``. One thread at a time."""

    def __init__(self, net: nn.Module, session: Session) -> None:
        super().__init__()
        self.training = net.training
        # In ``__dict__``, not as attributes of a module: parts may have any name.
        self.__dict__["_rdmarpc"], self.__dict__["_original"] = session, net
        for kind in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[kind] = getattr(net, kind)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["_rdmarpc"].trainer.pull()
        return self.__dict__["_original"](*args, **kwargs)

    def pull(self) -> None:
        """Return when the weights of the last step are here. Raises ``PeerLost``, ``TransferTimeout``, what a server raised."""
        self.__dict__["_rdmarpc"].trainer.pull()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The one that ``serve`` made."""
        found = self.__dict__["_rdmarpc"].optimizer
        if found is None:
            raise RuntimeError("serve() was called without an optimizer; new_optimizer makes one")
        return found

    def new_optimizer(
        self, kind: type[torch.optim.Optimizer], params: Iterable[Any] | None = None, **defaults: Any
    ) -> torch.optim.Optimizer:
        """An optimizer of this class whose steps are made by the servers, over ``params`` (parameters or groups; all by
        default). Works with schedulers and state dicts as any other. With several workers every one of them makes the same
        ones in the same order, and steps them so."""
        session: Session = self.__dict__["_rdmarpc"]
        return served_optimizer.make(session, kind, list(self.parameters()) if params is None else params, defaults)

    @property
    def staging(self) -> str:
        """``"traced"`` or ``"always"``: see ``serve``. May be changed between steps."""
        return self.__dict__["_rdmarpc"].staging

    @staging.setter
    def staging(self, value: str) -> None:
        if value not in (TRACED, ALWAYS):
            raise ValueError(f"staging={value!r} must be {TRACED!r} or {ALWAYS!r}")
        self.__dict__["_rdmarpc"].staging = value

    def transfers(self) -> list[Transfers]:
        """What crosses between this worker and the servers in a step, as one entry: to print, ``save``, ``draw``."""
        session: Session = self.__dict__["_rdmarpc"]
        kept = {server: sum(p.nbytes for p in parameters) for server, parameters in session.parameters.items()}
        return [describe(session.placement, kept)]

    def placement_table(self) -> str:
        """A line for each of these tensors, and their sum."""
        return self.transfers()[0].table()

    def counters(self, everywhere: bool = True) -> dict[str, int]:
        """This process's counters (see ``Device.counters``), with those of the servers added (``everywhere``); ``rpc_messages``
        that this process has sent (without those of ``counters`` itself), ``steps``."""
        return self.__dict__["_rdmarpc"].counters(everywhere)

    def close(self) -> None:
        """Wait for the last weights, and let the servers forget the model when every worker has done so. The parameters stay
        what they are, in ordinary use. Idempotent."""
        self.__dict__["_rdmarpc"].close()

    # -- what reads parameters waits for them

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self._wait()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._wait()
        return self.__dict__["_original"].state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load here and at the servers. With several workers each of them loads the same before its next step."""
        if assign:
            raise NotSupported("load_state_dict(assign=True) would take the parameters out of their landing places")
        self._wait()
        session: Session = self.__dict__["_rdmarpc"]
        result = self.__dict__["_original"].load_state_dict(state_dict, strict)
        for server, parameters in session.parameters.items():
            session.ask(server, "load", {at: parameter.detach() for at, parameter in enumerate(parameters)})
        return result

    def _wait(self) -> None:
        session: Session = self.__dict__["_rdmarpc"]
        if not session.closed:
            session.trainer.pull()

    def train(self, mode: bool = True) -> ServedModel:
        self.__dict__["_original"].train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise NotSupported("a served model cannot be converted or moved", hint="do that before serve()")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)
