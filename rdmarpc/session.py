"""``wrap``: one model, its parts at several workers, trained as if it were here."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from . import agent as _agent
from . import micro_batches, remote_optimizer
from . import parts as _parts
from .agent import Agent
from .eager import Eager
from .graph.analyze import TransferGraph, analyze
from .graph.caller import Caller
from .graph.capture import TensorSpec, capture, skeleton
from .graph.describe import Transfers, describe
from .graph.devices import Devices, find, named
from .graph.gpu_slot import reaches
from .graph.host import Mode, Tree
from .graph.located import Located
from .graph.methods import METHODS, Uncaptured, capture_by
from .graph.program import Machine
from .graph.sites import input_names, name_inputs
from .graph.sizes import Sizes
from .graph.stage import Plan
from .graph.station import Leased
from .placing import Places, divide, place_here, resolve
from .remote_parameter import RemoteParameter
from .shell import stand_ins
from .signature import Miss, Signatures
from .transport import NotSupported, RdmaError, TransferTimeout


def wrap(
    net: nn.Module,
    placement: Mapping[str, str],
    *,
    depth: int = 2,
    timeout: float = 60.0,
    plans: int = 16,
    staging: str = "traced",
    capture: str = "auto",
    chunks: int = 1,
) -> WrappedModel:
    """Move parts of ``net`` to workers, and return a model that trains as ``net`` would have trained here.

    ``placement`` maps paths of modules, at any depth, to names of workers; ``"layers.0-5"`` stands for ``layers.0`` to
    ``layers.5``. What lies below a path goes with it, unless it has an entry of its own; what no entry covers stays here, as
    does what is placed at this worker. A module that lies at one worker as a whole stays one operation, with its hooks and its
    own control flow; one that is cut is traced through, and its own parameters belong to the entry above them.
    ``net`` keeps its own copy of the parts that move. ``depth``: forwards that may wait for their backward; ``timeout``:
    seconds that a step may wait for a worker; ``plans``: captures kept set up; ``chunks``: micro-batches of
    ``model.forward_backward``, unless it is told another number.
    ``staging="always"`` copies every tensor into a registered buffer before it is sent (to measure what "traced" saves).

    ``"worker1/cuda:1"`` names a device of that worker (as ``RemoteModule`` does): the part computes there. Without a device a
    part's tensors keep the one that they have, on the GPU of that index at its worker. Inputs may lie on any device, results
    come on that of the first tensor input (a model that lies on several devices: on those where it alone would have them), and
    what ``state_dict`` fetches from other workers comes on the CPU.

    The forward that joins the parts is captured, and the parts run once on tensors without data, at the first call. Other
    input shapes are captured again once for all, or each for itself when they come again (``model.misses()``). Dropout and
    other random parts draw from their worker's generator. ``capture``: ``"fx"`` traces the forward, where its Python looks at
    shapes on tensors without data; ``"export"`` takes the operations that ``torch.export`` finds, also inside of parts;
    ``"eager"`` runs the forward here in every step, also where its way depends on values, and every remote part that it calls
    is a set of prepared writes of its own. ``"auto"`` takes the first of them that works, and ``model.captured`` says which.

    Raises ``ValueError`` for an unknown worker or part, ``NotSupported`` for a part that cannot move: before anything is
    moved.
    """
    agent = _agent.current()
    places = resolve(net, placement, agent.name, agent.worker_names(), lambda rank: agent.resolve(rank).name)
    for device in {device for path, device in places.devices.items() if places.homes[path] == agent.name}:
        find(named(device))
    if staging not in ("traced", "always"):
        raise ValueError(f"staging is 'traced' or 'always', got {staging!r}")
    if capture not in METHODS:
        raise ValueError(f"capture is one of {', '.join(map(repr, METHODS))}, got {capture!r}")
    remote_optimizer.install()
    session = Session(net, places, agent, depth, timeout, plans, staging == "always")
    return WrappedModel(net, session, capture, chunks)


class Session:
    """The caller's connection to all owners of one model: what its stand-ins and optimizers talk to."""

    def __init__(
        self, net: nn.Module, places: Places, agent: Agent, depth: int, timeout: float, plans: int, staging: bool
    ) -> None:
        self.agent, self.timeout = agent, timeout
        self.key = uuid.uuid4().hex
        self.in_step = False
        self.eager: Eager | None = None
        self.runner: Eager | None = None
        self.closed = False
        self.places = places
        self.devices = Devices(net, functools.partial(_given, net, places))
        self.shape = skeleton(net)
        self._uncounted = 0
        remote = divide(net, places)
        packed = {worker: _parts.Packed(parts, places.device) for worker, parts in remote.items()}
        self._caller: Caller | None = None
        self._count = dict.fromkeys(remote, 0)
        reaching = {worker for worker, yes in self._open(packed).items() if yes}
        if reaches(agent.device):
            reaching.add(agent.name)
        try:
            self._set_up(net, remote, depth, plans, staging, frozenset(reaching))
        except BaseException:
            self._close_parts()
            raise

    def _set_up(
        self,
        net: nn.Module,
        remote: Mapping[str, Mapping[str, Any]],
        depth: int,
        plans: int,
        staging: bool,
        reaching: frozenset[str],
    ) -> None:
        agent, places = self.agent, self.places
        place_here(net, places)
        self.stand_in, made = stand_ins(net, self, places)
        self._modules: dict[str, list[nn.Module]] = {}
        self._parameters: dict[str, list[nn.Parameter]] = {}
        for worker, parts in remote.items():
            # The same tree as the worker's own: modules and parameters are counted in its order.
            tree = Tree({path: made.get(id(part), part) for path, part in parts.items()})
            self._modules[worker] = list(tree.modules())[1:]
            self._parameters[worker] = list(tree.parameters())
        self._modes: dict[dict[str, Mode] | tuple[Any, ...], int] = {}
        # The names of the modules it runs are looked up here: those that stayed.
        machine = Machine(net.get_submodule, lambda path: _attribute(self._constants, net, path), list(net.parameters()))
        self._constants: dict[str, torch.Tensor] = {}
        self._caller = Caller(
            agent.name,
            agent.device,
            agent.channel,
            self.ask,
            self._count,
            machine,
            depth=depth,
            timeout=self.timeout,
            plans=plans,
            staging=staging,
            reaching=reaching,
        )
        self.signatures = Signatures(self._caller)
        agent.on_peer_lost(self._caller.station.lost)

    @property
    def caller(self) -> Caller:
        if self._caller is None:
            raise RdmaError("the model is not set up")
        return self._caller

    @property
    def backwards(self) -> int:
        return self._caller.backwards if self._caller is not None else 0

    @property
    def workers(self) -> list[str]:
        """The workers that have remote parts."""
        return list(self._count)

    def new_parameter(self, like: nn.Parameter, worker: str, name: str) -> RemoteParameter:
        position = self._count[worker]
        self._count[worker] += 1
        return RemoteParameter(like, self, worker, name, position)

    def zero(self, worker: str, position: int, how: int) -> None:
        self.caller.zero(worker, position, how)

    def located(
        self,
        tensors: Sequence[torch.Tensor],
        taken: Sequence[torch.device],
        path: str = "",
        default: torch.device | None = None,
    ) -> Located | None:
        """For the analysis of a capture of these inputs; ``None`` where no accelerator takes part. See ``Located``."""
        if not self.devices.involved() and all(tensor.is_cpu for tensor in tensors):
            return None
        return Located(self.devices, [(own, tensor.device) for own, tensor in zip(taken, tensors)], path, default)

    # -- set-up calls, none of them in the steady state

    def ask(self, method: str, args: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """A method of the host at several workers at once."""
        return self._call_all(_parts.ask_model, {worker: (self.key, method, more) for worker, more in args.items()})

    def ask_owner(self, worker: str, method: str, *args: Any) -> Any:
        """A method of one host, after everything that was asked for before."""
        commands = self.caller.sync()
        return self.ask(method, {worker: (*args, commands)})[worker]

    def _call_all(self, function: Any, args: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        agent, answers, error = self.agent, {}, None
        futures = {}
        for worker, more in args.items():
            futures[worker] = agent.call_async(agent.resolve(worker), function, more, None, self.timeout)
        for worker, future in futures.items():
            try:
                answers[worker] = future.wait()
            except Exception as raised:
                error = error or raised
        if error is not None:
            raise error
        return answers

    def _open(self, packed: Mapping[str, _parts.Packed]) -> dict[str, bool]:
        name = self.agent.name
        try:
            return self._call_all(
                _parts.open_model,
                {w: (self.key, name, p.blob, p.tensors, p.specs, self.timeout) for w, p in packed.items()},
            )
        except BaseException:
            self._close_parts()
            raise

    def _close_parts(self) -> None:
        """In two rounds: no slot is given back while anybody may write there, or has tensors there."""
        try:
            leased: Leased | None = {} if self._caller is None else self._caller.leased()
        except TransferTimeout:
            leased = None
        for worker in self.workers:
            try:
                answer = self._call_all(_parts.stop_model, {worker: (self.key,)})[worker]
            except TransferTimeout:
                leased = None
            except Exception:
                continue  # lost, or shut down: nothing of ours is left there
            else:
                leased = None if leased is None else {**leased, **answer}
        for worker in self.workers:
            try:
                self._call_all(_parts.close_model, {worker: (self.key, leased)})
            except Exception:
                continue
        if self._caller is not None:
            self._caller.close(leased)

    # -- modes

    def mode(self) -> int:
        """The number of the present training and requires_grad flags; a new one is told to the owners once."""
        with torch._C.DisableTorchFunctionSubclass():
            flags = tuple(
                (
                    worker,
                    tuple([module.training for module in self._modules[worker]]),
                    tuple([parameter.requires_grad for parameter in self._parameters[worker]]),
                )
                for worker in self._modules
            )
        number = self._modes.get(flags)
        if number is None:
            number = len(self._modes) + 1
            self.ask("add_mode", {worker: (number, (training, grads)) for worker, training, grads in flags})
            self.caller.zeroing.trainable[number] = {worker: bytes(grads) for worker, _, grads in flags}
            self._modes[flags] = number
        return number

    # -- counters

    def counters(self, everywhere: bool) -> dict[str, int]:
        totals = {"rpc_messages": 0, **self.agent.counters()}
        totals["rpc_messages"] -= self._uncounted
        totals["steps"], totals["plans"] = self.caller.steps, self.caller.plans.made
        totals["misses"], totals["dynamic_reads"] = self.signatures.misses, 0
        totals.update(self.caller.station.counts)
        if self.runner is not None:
            totals["steps"] += self.runner.steps - self.runner.calls
            totals["misses"] += self.runner.misses.total()
        if everywhere and not self.closed:
            before = self.agent.counters()["rpc_messages"]
            for counts in self.ask("counters", dict.fromkeys(self.workers, ())).values():
                for key, value in counts.items():
                    totals[key] = totals.get(key, 0) + value
            self._uncounted += self.agent.counters()["rpc_messages"] - before
        return totals

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._close_parts()


class WrappedModel(nn.Module):
    """Has the parts of the original under their names: those that stayed as they are, stand-ins for those that moved. So
    ``named_parameters`` and ``state_dict`` have the same keys."""

    def __init__(self, net: nn.Module, session: Session, capture: str, chunks: int) -> None:
        super().__init__()
        self.training = net.training
        # In ``__dict__`` under one name, not as attributes of a module: parts may have any name.
        self.__dict__["_rdmarpc"] = session
        self.__dict__["_original"] = net
        self.__dict__["_chunks"] = micro_batches.checked(chunks)
        self.__dict__["_shape"] = session.shape
        self.__dict__["_capture"], self.__dict__["_captured"] = capture, ""
        top = session.stand_in
        self._modules, self._parameters, self._buffers = top._modules, top._parameters, top._buffers
        self._non_persistent_buffers_set = set(net._non_persistent_buffers_set)
        self.__dict__["_everything"] = list(self.parameters())
        # The modules whose forward is part of what is captured.
        self.__dict__["_cut"] = [module for name, module in self.named_modules() if name and not session.places.whole(name)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        session: Session = self.__dict__["_rdmarpc"]
        session.in_step = False
        leaves, tree = self._flatten(args, kwargs)
        if session.runner is not None:
            return self._eagerly(args, kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        mode = session.mode()
        try:
            plan = self._plan(tensors, leaves, tree)
        except Uncaptured as error:
            if self.__dict__["_capture"] not in ("auto", "eager"):
                raise error.error or error from None
            refused = error.refused
        else:
            return session.caller.forward(plan, tensors, mode)
        return self._eagerly(args, kwargs, refused)

    def forward_backward(
        self, loss_fn: Callable[..., torch.Tensor], *args: Any, target: Any = None, chunks: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """See ``micro_batches.forward_backward``."""
        return micro_batches.forward_backward(
            self, loss_fn, args, kwargs, target, self.__dict__["_chunks"] if chunks is None else chunks
        )

    def prepare(self, *args: Any, chunks: int | None = None, **kwargs: Any) -> micro_batches.Prepared:
        """Capture the model for these inputs and set everything up, without a step. ``chunks``: for ``forward_backward`` of so
        many micro-batches. Printing the result shows what crosses and the memory that every worker needs."""
        return micro_batches.prepare(self, args, kwargs, self.__dict__["_chunks"] if chunks is None else chunks)

    @staticmethod
    def _flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
        if torch._C._is_any_autocast_enabled():
            raise NotSupported("autocast does not reach other workers", hint="convert the parts' dtype before wrap()")
        if kwargs or not all(type(arg) is torch.Tensor for arg in args):
            return pytree.tree_flatten((args, kwargs))
        return list(args), None

    def _plan(self, tensors: Sequence[torch.Tensor], leaves: list[Any], tree: Any, recurring: bool = False) -> Plan:
        session: Session = self.__dict__["_rdmarpc"]
        constants = tuple((at, leaf) for at, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor))
        grads = torch.is_grad_enabled()
        with torch._C.DisableTorchFunctionSubclass():
            shapes = tuple([t.shape for t in tensors])
            family = (
                self.training,
                tuple([module.training for module in self.__dict__["_cut"]]),
                tuple([(t.dim(), t.dtype, t.requires_grad and grads, None if t.is_cpu else t.device) for t in tensors]),
                tuple([parameter.requires_grad for parameter in self.__dict__["_everything"]]),
                constants,
                tree,
            )
        try:
            return session.signatures.plan(
                family,
                shapes,
                lambda sizes: self._build(tensors, leaves, tree, sizes),
                lambda: input_names(self.__dict__["_original"], _joined(leaves, tree), len(tensors)),
                recurring,
            )
        except TypeError as error:
            if "unhashable" not in str(error):
                raise
            raise NotSupported(f"an input that is no tensor must be hashable: {error}") from error

    def _eagerly(self, args: Any, kwargs: Any, refused: Sequence[str] = ()) -> Any:
        session: Session = self.__dict__["_rdmarpc"]
        session.stand_in.training = self.training
        if session.runner is not None:
            return session.runner.forward(args, kwargs)
        # If this fails, it was the input that was wrong: the next one may be captured.
        runner = Eager(session, session.stand_in, self._skeleton)
        result = runner.forward(args, kwargs)
        session.runner, self.__dict__["_captured"] = runner, "\n".join(["eager", *refused])
        return result

    def _skeleton(self) -> nn.Module:
        """The model without data, under the present flags."""
        shape: nn.Module = self.__dict__["_shape"]
        here = dict(self.named_modules(remove_duplicate=False))
        for name, module in shape.named_modules(remove_duplicate=False):
            module.training = here[name].training
        flags = dict(self.named_parameters(remove_duplicate=False))
        for name, parameter in shape.named_parameters(remove_duplicate=False):
            parameter.requires_grad_(flags[name].requires_grad)
        return shape

    def _build(self, tensors: Sequence[torch.Tensor], leaves: list[Any], tree: Any, sizes: Sizes) -> TransferGraph:
        session: Session = self.__dict__["_rdmarpc"]

        join = _joined(leaves, tree)
        taken = session.devices.taken(tensors)
        specs = [TensorSpec(tuple(t.shape), t.dtype, t.requires_grad, device) for t, device in zip(tensors, taken)]
        methods, shape, whole = METHODS[self.__dict__["_capture"]], self._skeleton(), session.places.whole
        if sizes.varying or not sizes.known:
            if "fx" not in methods:
                raise NotSupported("an export knows sizes only as numbers")
            found = capture(shape, specs, join, sizes, whole)
        else:
            found, refused = capture_by(methods, shape, specs, join, whole)
            self.__dict__["_captured"] = "\n".join([found.how, *refused])
        found.sites = name_inputs(found.sites, input_names(shape, join, len(specs)))
        session._constants.update(found.constants)
        located = session.located(tensors, taken)
        graph = analyze(found, session.places.owner, session.agent.name, session.places.scope, located)
        graph.constants = {}  # they stay here
        return graph

    @property
    def captured(self) -> str:
        """How the forward was captured for the inputs that were last new, then why not by what is tried before: a line each.
        Empty before the first step."""
        return self.__dict__["_captured"]

    def placement_table(self) -> str:
        """What crosses, for each set of input shapes that is set up, and for any shapes; empty before the first step."""
        return "\n\n".join(plan.table() for plan in self.transfers())

    def transfers(self) -> list[Transfers]:
        """What crosses as data, one entry for each plan that is set up, the last used last: to print, ``save``, ``draw``."""
        parameters = self._parameter_bytes()
        return [describe(placement, parameters) for placement in self.__dict__["_rdmarpc"].caller.plans.placements()]

    def _parameter_bytes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self.parameters():
                home = parameter.worker if isinstance(parameter, RemoteParameter) else self.__dict__["_rdmarpc"].agent.name
                found[home] = found.get(home, 0) + parameter.numel() * parameter.element_size()
        return found

    def counters(self, everywhere: bool = True) -> dict[str, int]:
        """This process's counters (see ``Device.counters``), with those of the model's other workers added (``everywhere``);
        ``rpc_messages`` that this process has sent (without those of ``counters`` itself), ``steps`` (forwards), ``plans``,
        ``misses`` (see there), ``dynamic_reads`` and, per value that dynamic edges had to copy, ``bytes_staged[NAME]``."""
        return self.__dict__["_rdmarpc"].counters(everywhere)

    def misses(self) -> list[Miss]:
        """Forwards with other input shapes than those that have a plan of their own, by what changed, the most frequent first:
        they ran over dynamic edges. In a model that runs eagerly, calls of parts that were new after the first forward."""
        session: Session = self.__dict__["_rdmarpc"]
        return session.signatures.missed() + (session.runner.missed() if session.runner is not None else [])

    def production(self) -> dict[str, str]:
        """For each large tensor that is made at one worker and sent to another: the operation that writes it straight into its
        slot at the receiver, or why it is copied. Filled by the first step of each kind."""
        session: Session = self.__dict__["_rdmarpc"]
        answers = session.ask("notes", dict.fromkeys(session.workers, ()))
        return {name: note for notes in (session.caller.plans.notes(), *answers.values()) for name, note in notes.items()}

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer's remote halves known now rather than at its first step: before ``load_state_dict``."""
        for halves in remote_optimizer.attach(optimizer):
            halves.ensure()

    def close(self) -> None:
        """Free the parts and slots at every worker. Idempotent."""
        self.__dict__["_rdmarpc"].close()


def _given(net: nn.Module, places: Places, path: str) -> torch.device | None:
    """The device that the placement gives; of what stays here, the one where it lies now: it can be moved."""
    if places.owner(path) == places.caller:
        found: Any = net
        for name in path.split(".") if path else ():
            found = getattr(found, name, None)
        tensors = (found,) if isinstance(found, torch.Tensor) else found.parameters() if isinstance(found, nn.Module) else ()
        for tensor in tensors:
            return tensor.device
    return places.device(path)


def _joined(leaves: list[Any], tree: Any) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """See ``capture``: what gives the arguments of the forward, with other tensors in the place of those among ``leaves``."""

    def join(*given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        left = iter(given)
        filled = [next(left) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return (tuple(filled), {}) if tree is None else pytree.tree_unflatten(filled, tree)

    return join


def _attribute(constants: Mapping[str, torch.Tensor], net: nn.Module, path: str) -> Any:
    if path in constants:
        return constants[path]
    found: Any = net
    for name in path.split("."):
        found = getattr(found, name)
    return found
