"""The caller's connection to all owners of one wrapped model: its parts are brought there, asked for, and closed."""

from __future__ import annotations

import contextlib
import functools
import uuid
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..calls.agent import Agent
from ..fetched.here import Here, needed
from ..fetched.originals import Originals
from ..graph.caller.caller import Caller
from ..graph.caller.stage import Plan
from ..graph.edges.gpu_slot import reaches
from ..graph.edges.station import Leased
from ..graph.guards.flags import flags_apart
from ..graph.guards.side_effects import Elsewhere, has_code
from ..graph.plan.located import Located
from ..graph.plan.program import Machine
from ..graph.plan.replicas import Replica
from ..graph.trace.capture import skeleton
from ..graph.trace.devices import Devices
from ..graph.work.command import Command
from ..graph.work.host import Mode, Tree
from ..graph.work.remote_values import Operation
from ..graph.work.stored import Piece
from ..ground.advice import warn
from ..ground.dropped import Dropped
from ..parts import owner
from ..parts.compiled import uncompiled
from ..parts.parameter import EagerForward, RemoteParameter
from ..parts.placing import Places, divide, place_here, replicas_here
from ..parts.remote_part import RemotePart, copy_hooks
from ..parts.remote_values import RemoteValues, StateCopies
from ..parts.seeds import Seeds
from ..parts.stand_in import fill_memo, stand_ins
from ..transport import NotSupported, RdmaError, TransferTimeout
from .settings import Settings
from .skeleton import without_hooks

_dropped: Dropped[Session] = Dropped()
_open: weakref.WeakSet[Session] = weakref.WeakSet()


def close_dropped(agent: Agent) -> None:
    """Close the models that nobody has any more and nobody has closed: their parts, threads and slots are still at the
    workers."""
    for session in _dropped.take(len(_open)):
        with contextlib.suppress(RdmaError):
            if session.agent is agent:
                session.close()


class Session:
    """What the stand-ins and optimizers of one model talk to (``parameter.Owners``). ``stand_in`` stands for the whole
    model, ``shape`` is it without data; ``globals`` are those that its parts at other workers name; ``constants`` are tensors
    that a capture found outside of the modules, by name."""

    closed = False
    _caller: Caller | None = None

    def __init__(
        self, net: nn.Module, places: Places, agent: Agent, depth: int, timeout: float, plans: int, staging: bool
    ) -> None:
        self.agent, self.timeout = agent, timeout
        self.key = uuid.uuid4().hex
        self.in_step = self.frozen = False
        self._mode = 0
        self.apart: list[tuple[str, Piece]] | None = None
        self.state_copies = StateCopies()
        self.eager: EagerForward | None = None
        self._outside: EagerForward | None = None
        self.here: Here
        self.always_here = False
        self.places = places
        self.devices = Devices(net, functools.partial(_given, net, places))
        self.shape = without_hooks(uncompiled(skeleton(net)))
        moment = lambda: (self.caller.steps, *self.caller.control.begun.values())  # noqa: E731
        self.settings = Settings(self.ask_owner, self.shape, moment, self._recoded)
        self._uncounted = 0
        self.values = RemoteValues(lambda: self.caller.control, self._operate)
        remote = divide(net, places)
        self.originals = Originals(remote)
        parts = {path: part for found in remote.values() for path, part in found.items() if isinstance(part, nn.Module)}
        homes = {path: worker for worker, found in remote.items() for path in found if path in parts}
        self.globals = Elsewhere(homes, lambda worker, values: self.ask_owner(worker, "other_globals", values))
        paths = {id(module): name for name, module in net.named_modules()}
        packed = {worker: owner.Packed(parts, places.device, paths) for worker, parts in remote.items()}
        self._count = dict.fromkeys(remote, 0)
        reaching = {worker for worker, yes in self._open(packed).items() if yes}
        if reaches(agent.device):
            reaching.add(agent.name)
        try:
            self._set_up(net, remote, depth, plans, staging, frozenset(reaching))
            self.globals.follow(parts)
            _open.add(self)
            self._end = _dropped.watch(self)
            if said := self.originals.joined(net):
                warn(said)
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
        self.settings.hooked = [
            (m._place, {name: set(table) for name, table in m._place.came.items()})
            for m in self.stand_in.modules()
            if isinstance(m, RemotePart) and m._place.hooked
        ]
        self.here = Here(self, self.stand_in, self.originals)
        self.settings.copies = self.here.copy_of
        self.settings.changed = self.here.changed
        self.settings.here = lambda: (m for m in self.stand_in.modules() if not isinstance(m, RemotePart))
        self._modules: dict[str, list[nn.Module]] = {}
        self._parameters: dict[str, list[nn.Parameter]] = {}
        for worker, parts in remote.items():
            # The same tree as the worker's own: modules and parameters are counted in its order.
            tree = Tree({path: _stand_in(part, made) for path, part in parts.items()})
            self._modules[worker] = list(tree.modules())[1:]
            self._parameters[worker] = list(tree.parameters())
            self._count[worker] = len(self._parameters[worker])  # with those of replicas
        self._modes: dict[dict[str, Mode] | tuple[Any, ...], int] = {}
        # The names of the modules it runs are looked up here: those that stayed, or came to stand there later.
        live = self.stand_in
        self._replicas = replicas_here(net, places)
        machine = Machine(
            lambda path: self._replicas[path] if path in self._replicas else live.get_submodule(path),
            lambda path: _attribute(self.constants, live, path),
            list(net.parameters()),
        )
        self.constants: dict[str, torch.Tensor] = {}
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
            keeps=functools.partial(_keeps, self.shape, [place.path for place, _ in self.settings.hooked]),
        )
        self._caller.control.kept = self.here.replica.give_written
        agent.on_peer_lost(self._caller.station.lost)
        self._flags = list(self.ask("flags", dict.fromkeys(remote, ())).values())
        self.seeds = Seeds(agent, remote, self._seed)
        self.seeds.push()

    @property
    def caller(self) -> Caller:
        if self._caller is None:
            raise RdmaError("the model is not set up")
        return self._caller

    @property
    def workers(self) -> list[str]:
        """The workers that have remote parts."""
        return list(self._count)

    def new_parameter(self, like: nn.Parameter, worker: str, name: str) -> RemoteParameter:
        position = self._count[worker]
        self._count[worker] += 1
        return RemoteParameter(like, self, worker, name, position)

    @property
    def outside(self) -> EagerForward:
        if self._outside is None:
            raise RdmaError("the model is not set up")
        return self._outside

    def runs_outside(self, runner: EagerForward) -> None:
        """What runs parts that are called outside of any forward."""
        self._outside = runner

    def leaf(self, parameter: RemoteParameter) -> torch.Tensor | None:
        return self.here.replica.leaf(parameter) if self.always_here else None

    def _recoded(self, path: str) -> None:
        """A module at another worker has got a function from here."""
        part = self.globals.part_of(path)
        self.globals.follow({part: self.shape.get_submodule(part)})

    def fetch_parts(self, memo: dict[int, Any], hooks: bool = False) -> None:
        if id(self) in memo:
            return
        memo[id(self)] = self
        commands = self.caller.control.sync()
        answers = self._call_all(owner.take_model, dict.fromkeys(self.workers, (self.key, commands)))
        parts = {path: part for answer in answers.values() for path, part in owner.unpack(*answer).items()}
        fill_memo(self.stand_in, parts, memo)
        for module in self.stand_in.modules() if hooks else ():
            if isinstance(module, RemotePart):
                copy_hooks(module, memo[id(module)], memo)

    def _seed(self, workers: list[str], seed: int) -> None:
        self.ask("seed", dict.fromkeys(workers, (seed, self.caller.control.sync())))

    def zero(self, worker: str, position: int, how: int) -> None:
        self.values.flush()
        self.caller.control.zero(worker, position, how)

    def step(self, commands: Mapping[str, Command]) -> None:
        self.caller.control.step(commands)

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

    def only_here(self) -> str:
        """Why a forward that starts now is right in this process alone; empty: it is not."""
        return needed() or flags_apart(self._flags)

    def ask(self, method: str, args: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """A method of the host at several workers at once."""
        return self._call_all(owner.ask_model, {worker: (self.key, method, more) for worker, more in args.items()})

    def ask_owner(self, worker: str, method: str, *args: Any) -> Any:
        """A method of one host, after everything that was asked for before. ``NotSupported`` for what other replicas of a part
        would not have."""
        paths = [path for path, _ in args[0]] if method == "write" else args[:1] if method in _CHANGING else ()
        for path in paths:
            if any(path == part or path.startswith(part + ".") for part in self.places.replicated):
                raise NotSupported(
                    f"{path!r} has replicas, which were made when it was wrapped",
                    hint="set its attributes, apply() and compile() it before wrap(), and load states that it loads itself",
                )
        commands = self.caller.control.sync()
        self.caller.control.asked += 1
        self.caller.control.changed += method not in _READING
        answer = self.ask(method, {worker: (*args, commands)})[worker]
        self.values.bring_back()
        return answer

    def _operate(self, operations: Mapping[str, Sequence[Operation]]) -> dict[str, Any]:
        commands = self.caller.control.sync()
        return self.ask("operate", {worker: (list(wanted), commands) for worker, wanted in operations.items()})

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

    def _open(self, packed: Mapping[str, owner.Packed]) -> dict[str, bool]:
        name = self.agent.name
        try:
            return self._call_all(
                owner.open_model,
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
                answer = self._call_all(owner.stop_model, {worker: (self.key,)})[worker]
            except TransferTimeout:
                leased = None
            except Exception:
                continue  # lost, or shut down: nothing of ours is left there
            else:
                leased = None if leased is None else {**leased, **answer}
        for worker in self.workers:
            try:
                self._call_all(owner.close_model, {worker: (self.key, leased)})
            except Exception:
                continue
        if self._caller is not None:
            self._caller.close(leased)

    # -- modes

    def mode(self) -> int:
        """The number of the present training and requires_grad flags; a new one is told to the owners once.

        All flags are read in every step. A count of changes would be O(1), and would miss some: torch has no hook for
        ``requires_grad``, and a setter that is called with ``__torch_function__`` disabled reaches no code of ours; then the
        owner would silently train what is frozen here."""
        self.frozen = False
        self.settings.push()
        self.seeds.push()
        with torch._C.DisableTorchFunctionSubclass():
            flags = tuple(
                (
                    worker,
                    tuple([module.training for module in self._modules[worker]]),
                    tuple([parameter.requires_grad for parameter in self._parameters[worker]]),
                )
                for worker in self._modules
            )
        for key, replica in self._replicas.items():
            stands = self.stand_in.get_submodule(key.partition(".")[2])
            for module, there in zip(replica.part.modules(), stands.modules()):
                module.training = there.training
        number = self._modes.get(flags)
        if number is None:
            number = len(self._modes) + 1
            self.ask("add_mode", {worker: (number, (training, grads)) for worker, training, grads in flags})
            self.caller.control.zeroing.trainable[number] = {worker: bytes(grads) for worker, _, grads in flags}
            self._modes[flags] = number
        self._mode = number
        return number

    def goes_backward(self, plan: Plan, mode: int) -> None:
        """A plan begins its backward, of a forward in this mode."""
        mixing = self.here.replica.mixing
        if self.frozen or mode != self._mode:
            trained = self.caller.control.zeroing.trainable[mode]
            for parameter in mixing.reads(plan).values():
                with torch._C.DisableTorchFunctionSubclass():
                    frozen = trained[parameter.worker][parameter.position] and not parameter.requires_grad
                if frozen:
                    raise parameter._refuse("it was frozen after a forward and before its backward", "freeze it before both")
        mixing.planned(plan)

    # -- counters

    def counters(self, everywhere: bool) -> dict[str, int]:
        """See ``WrappedModel.counters``; ``steps`` are forwards of plans."""
        totals = {"rpc_messages": 0, **self.agent.counters()}
        totals["rpc_messages"] -= self._uncounted
        totals["steps"], totals["plans"] = self.caller.steps, self.caller.plans.made
        totals["dynamic_reads"] = 0
        totals.update(self.caller.station.counts)
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
            self.originals.close()
            _open.discard(self)
            self._close_parts()


def _keeps(shape: nn.Module, hooked: list[str], path: str) -> bool:
    """Whether a part has code that may keep a tensor. ``hooked``: the modules that came with hooks."""
    try:
        return any(f"{inner}.".startswith(f"{path}.") for inner in hooked) or has_code(shape.get_submodule(path))
    except AttributeError:  # a replica
        return True


_CHANGING = ("delete", "call", "compile", "load_all", "unhook")
"""Methods of ``Access`` that change more of a part than its tensors, besides ``write``."""

_READING = ("own_state", "state", "save", "optimizer", "optimizer_state", "load_optimizer_state")
"""Methods of ``Access`` that change nothing of a part."""


def _stand_in(part: Any, made: Mapping[int, Any]) -> Any:
    if isinstance(part, Replica):
        return Replica(made[id(part.part)])
    return made.get(id(part), part)


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


def _attribute(constants: Mapping[str, torch.Tensor], net: nn.Module, path: str) -> Any:
    if path in constants:
        return constants[path]
    found: Any = net
    for name in path.split("."):
        found = getattr(found, name)
    return found
