"""``serve``: a model that computes here, with its parameters kept, summed up and stepped by servers."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..calls import agent as _agent
from ..calls.agent import Agent
from ..graph import Crossing, Transfers, describe
from ..places.placement import deepest
from ..places.wrap import Extension, as_original, extend, own_names
from ..transport import NotSupported, timeouts
from . import optimizer as served_optimizer
from .bundle import ALWAYS, TRACED, Edge
from .servers import Servers, close_dropped

ROUND_ROBIN, BALANCED = "round_robin", "balanced"


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
    """Have ``servers`` keep the parameters of ``net``. Returns ``net`` itself, which has the methods of ``ServedModel`` from
    now on and trains as before.

    ``model.optimizer`` (of the class ``optimizer``, with ``defaults``) sends the gradients away when it steps. The servers sum
    the gradients of all ``workers``, step, and write the new weights into the memory of this model's parameters. The next
    forward waits for these weights, as does whatever else reads a parameter by a function or method of torch that has
    overrides; before anything else (``torch.tensor(p)``, an extension, ``torch.func`` over parameters listed before) call
    ``pull``. Values that are written into parameters here go to the servers before the next step (with several workers:
    ``NotSupported``, ``load_state_dict`` is the way); what numpy and others write unseen by torch, if they had it of ``.data``,
    ``.detach()`` or ``.numpy()`` of the parameter itself. ``parameter.data = value`` exchanges memory, as ever; it is
    ``NotSupported`` in the next step if something still shows the memory before. Copies of the
    model (``copy.deepcopy``, pickle) are ordinary models.

    * ``workers``: the names of all workers that train this model. Each of them calls ``serve`` with the same arguments.
      ``None``: this worker alone. Gradients are summed in the order of this list, so divide the loss by its length for the
      mean. The initial values are those of the first worker.
    * ``name`` tells apart several models of the same workers.
    * ``placement``: ``"round_robin"`` by tensor, ``"balanced"`` by bytes (the largest first), or a mapping from the name of a
      parameter, or of a module that has it (``""``: everything else), to a server.
    * ``staging``: ``"traced"`` (gradients are copied aside once, then written from where autograd left them) or ``"always"``
      (gradients and weights are copied aside every time, to measure the difference).
    * ``timeout``: seconds that a step may wait.

    Returns when all workers have come and the weights are here. A worker that is lost before it came, or that does not answer
    the servers within the smaller of 10 s and ``peer_timeout`` + 2 s, is ``PeerLost``. Buffers stay at their worker. Raises
    ``ValueError`` for an unknown worker, placement or parameter, ``NotSupported``, ``TransferTimeout``, ``PeerLost``.
    """
    agent = _agent.current()
    everybody = [agent.name] if workers is None else list(workers)
    _check(agent, servers, everybody, staging)
    if optimizer is None and defaults:
        raise ValueError(f"{', '.join(defaults)} given without an optimizer")
    model = f"{name} of {', '.join(everybody)}" if workers is not None else f"{name} {uuid.uuid4().hex}"
    home = place(net, servers, placement)
    limit = timeouts.limit(timeout, "the timeout of serve")
    own_names(net, ServedModel, ["staging", *(["optimizer"] if optimizer is not None else [])])
    close_dropped()
    there = Servers(net, home, agent, model, everybody, limit, staging)
    try:
        if optimizer is not None:
            there.optimizer = served_optimizer.make(there, optimizer, list(net.parameters()), defaults)
        served = net if isinstance(net, ServedModel) else extend(net, type(net), ServedModel)
        served._servers = there
    except BaseException:
        there.close()
        raise
    return served


def _check(agent: Agent, servers: Sequence[str], workers: list[str], staging: str) -> None:
    if isinstance(servers, str) or not isinstance(servers, Sequence) or not servers or len(set(servers)) < len(servers):
        raise ValueError(f"servers={servers!r} must be a list of names, each once")
    known = agent.worker_names()
    for worker in (*servers, *workers):
        if worker not in known:
            raise ValueError(f"{worker!r} is not in this group; its workers are " + ", ".join(map(repr, known)))
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
    server = deepest(placement, name)
    if server is None:
        raise ValueError(f"placement has no server for {name!r}; '' stands for everything else")
    if server not in servers:
        raise ValueError(f"placement puts {name!r} on {server!r}, which is not one of servers={list(servers)}")
    return server


class ServedModel(Extension):
    """What ``serve`` makes of a model's class: a subclass with these methods besides. One thread at a time."""

    _servers: Servers | None = None
    """``None``: of another model of this class (``type(net)(...)``)."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._servers is not None:
            self._servers.pull()
            if len(self._servers.workers) > 1 and torch.is_grad_enabled():  # an evaluation may exchange data for a while
                self._servers.check_written()
        return super().__call__(*args, **kwargs)

    @property
    def _there(self) -> Servers:
        """Those that keep the parameters. ``RuntimeError`` if there are none."""
        if self._servers is None:
            raise RuntimeError(f"this {type(self).__name__} was made of a part of a served model, and is not served itself")
        return self._servers

    def pull(self) -> None:
        """Return when the weights of the last step are here. Raises ``PeerLost``, ``TransferTimeout``, and the errors of the
        servers."""
        self._there.pull()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The one that ``serve`` made, or an attribute of that name that the model has."""
        found = vars(self).get("optimizer") or self._there.optimizer
        if found is None:
            raise RuntimeError("serve() was called without an optimizer; new_optimizer makes one")
        return found

    @optimizer.setter
    def optimizer(self, value: Any) -> None:
        vars(self)["optimizer"] = value

    def new_optimizer(
        self, kind: type[torch.optim.Optimizer], params: Iterable[Any] | None = None, **defaults: Any
    ) -> torch.optim.Optimizer:
        """An optimizer of class ``kind`` whose steps are made by the servers, over ``params`` (parameters or groups; default:
        all). It works with schedulers and state dicts as any other. Several workers make the same optimizers in the same
        order, and step them in the same order."""
        everything = list(self.parameters()) if params is None else params
        return served_optimizer.make(self._there, kind, everything, defaults)

    @property
    def staging(self) -> str:
        """``"traced"`` or ``"always"``: see ``serve``. May be changed between steps."""
        return self._there.staging

    @staging.setter
    def staging(self, value: str) -> None:
        if value not in (TRACED, ALWAYS):
            raise ValueError(f"staging={value!r} must be {TRACED!r} or {ALWAYS!r}")
        self._there.staging = value

    def transfers(self) -> list[Transfers]:
        """The tensors that cross between this worker and the servers in a step, as one entry with ``save`` and ``draw``."""
        servers = self._there
        kept = {server: sum(p.nbytes for p in parameters) for server, parameters in servers.parameters.items()}
        return [describe(servers.agent.name, [_crossing(edge) for edge in servers.edges], kept, {}, {}, 1)]

    def placement_table(self) -> str:
        """A line for each of these tensors, and their sum."""
        return ServedModel.transfers(self)[0].table()

    def counters(self, everywhere: bool = True) -> dict[str, int]:
        """This process's counters (see ``Device.counters``), with those of the servers added (``everywhere``); ``rpc_messages``
        that this process has sent (without those of ``counters`` itself), ``steps``."""
        return self._there.counters(everywhere)

    def close(self) -> None:
        """Wait for the last weights, and let the servers forget the model when every worker has done so. The parameters stay
        what they are, in ordinary use. Idempotent."""
        self._there.close()

    # -- what reads parameters waits for them

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self._wait()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._wait()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load here and at the servers. With several workers each of them loads the same before its next step."""
        if assign:
            why = "load_state_dict(assign=True) would take the parameters out of their landing places"
            raise NotSupported(why, hint="assign=False copies the values there")
        served = self._wait()
        result = super().load_state_dict(state_dict, strict)
        if served is not None:
            served.load()
        return result

    def _wait(self) -> Servers | None:
        """The servers, if they still have the model: the last weights are here."""
        if self._servers is None or self._servers.closed:
            return None
        self._servers.pull()
        return self._servers

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self._wait() is None:
            return super()._apply(fn, recurse)
        for name, tensor in itertools.chain(super().named_parameters(), self.named_buffers()):
            with torch.no_grad():
                made = fn(tensor.detach())
            if (made.dtype, made.device, made.data_ptr()) != (tensor.dtype, tensor.device, tensor.data_ptr()):
                why = f"{name!r} of a served model cannot become {made.dtype} on {made.device}, or lie elsewhere"
                raise NotSupported(why, hint="convert or move the model before serve()")
        return self

    def share_memory(self) -> Any:
        why = "a served model lies where servers write: its memory cannot be exchanged"
        raise NotSupported(why, hint="share a copy: copy.deepcopy(model)")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the original class, with the present weights: no server knows of them."""
        self._wait()
        return as_original(super().__reduce_ex__(protocol), self._original, "_servers")


def _crossing(edge: Edge) -> Crossing:
    dtype = str(edge.dtype).removeprefix("torch.")
    return Crossing(edge.number, edge.name, edge.kind, edge.source, edge.target, edge.shape, dtype, edge.nbytes, True)
