"""A worker's part of one model: its parts, their optimizers, the executor. Everything the caller may ask for at set-up."""

from __future__ import annotations

import inspect
import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...transport import RdmaError, TransferTimeout
from ..edges.kept_memory import KeptMemory
from ..edges.station import Fittings, Leased, Offer, Station
from ..guards.side_effects import Followed, has_code
from ..plan.place import REPORT_BYTES, Placement, report_bytes
from ..plan.program import Machine
from ..servers.updates import build_optimizer, copy_state, load_saved, load_state, read_numbers
from ..wire.header import Header
from . import stored
from .access import Access
from .command import NOTHING, STEP, TO_NONE, ZERO, Command
from .executor import Executor
from .flow import Flow
from .remote_values import Operation, perform

if TYPE_CHECKING:
    from ...transport import Channel, Device

Mode = tuple[tuple[bool, ...], tuple[bool, ...]]
"""Training flag of every module, requires_grad of every parameter, in the order of the parts."""


class Host:
    """One model at one worker. Methods are called by any thread, with plain data; the executor does what touches the parts.

    ``parts`` are the modules, parameters and buffers that live here, by path. The order of ``parameters`` and ``modules`` is
    that of their ``Tree``; the caller counts them in a tree of stand-ins.
    """

    def __init__(
        self,
        name: str,
        device: Device,
        channels: Callable[[str], Channel],
        parts: Mapping[str, nn.Module | torch.Tensor],
        timeout: float,
    ) -> None:
        self.root = Tree(parts)
        self.parameters = list(self.root.parameters())
        self.modules = list(self.root.modules())[1:]
        self._modes: dict[int, Mode] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._plans: dict[int, tuple[Fittings, Flow | None]] = {}
        tensors = (*self.parameters, *self.root.buffers())
        self.gpu = next((tensor.device for tensor in tensors if not tensor.is_cpu), None)
        self.station = Station(name, device, channels, timeout)
        self._followed: dict[str, Followed] = {}
        memory = KeptMemory(self.root)
        machine = Machine(self._part, self._attribute, self.parameters, memory.note, memory.keeps)
        self.executor = Executor(self.station, machine, self._set_mode, self._apply, self.gpu)
        self.access = Access(self.root, self._on_executor, self.executor.use_mode, self._followed.clear, self.gpu, memory)

    # -- plans

    def offer(self, placement: Placement) -> Offer:
        """Make this worker's slots of a plan."""
        fittings, offer = self.station.fit(placement, self.executor.arrived)
        flow = Flow(fittings, self.station.name) if placement.graph is not None else None
        if flow is not None:
            flow.find_common(lambda path: has_code(self.root.get_submodule(path)))
        self._plans[placement.number] = (fittings, flow)
        return offer

    def connect(self, plan: int, offers: Offer) -> None:
        """Learn everybody else's; from now on the plan can run. Plan 0 has the control edges and starts the executor."""
        fittings, flow = self._plans[plan]
        self.station.connect(fittings, offers)
        if flow is not None:
            self.executor.add(flow)
            return
        [self.executor.report] = fittings.outlets.values()
        self.executor.start()
        self.executor.submit(self._use)

    def retire(self, plan: int, commands: int) -> Leased:
        """Nothing of this plan is sent from now on. Returns where tensors of this worker still lie."""
        fittings, _ = self._plans[plan]
        return self._on_executor(lambda: self.station.retire(fittings), commands)

    def _use(self) -> None:
        """On the executor's thread: another one has made the parts, and its stream is all that the allocator knows of."""
        for tensor in (*self.parameters, *self.root.buffers()):
            if not tensor.is_cpu:
                tensor.record_stream(torch.accelerator.current_stream(tensor.device))

    def remove(self, plan: int, leased: Leased) -> None:
        """Everybody has retired it, or it never came to life."""
        if plan not in self._plans:
            return
        fittings, flow = self._plans.pop(plan)
        if flow is not None:
            self.executor.remove(flow)
        self._on_executor(lambda: self.station.remove(fittings, leased), 0)

    def add_mode(self, number: int, mode: Mode) -> None:
        self._modes[number] = mode

    # -- optimizers

    def optimizer(
        self,
        number: int,
        kind: type[torch.optim.Optimizer],
        defaults: dict[str, Any],
        groups: list[dict[str, Any]],
        commands: int,
    ) -> None:
        """Build (or, if it exists, adjust) the owner's half of an optimizer. A group's ``params`` are parameter positions."""

        def build() -> None:
            known = inspect.signature(kind.__init__).parameters
            given = {key: value for key, value in defaults.items() if key in known}
            self._optimizers[number] = build_optimizer(self._optimizers.get(number), kind, given, groups, self.parameters)

        self._on_executor(build, commands)

    def optimizer_state(self, number: int, commands: int) -> dict[int, dict[str, Any]]:
        """State per parameter position."""

        return self._on_executor(lambda: copy_state(self._optimizers[number], self.parameters), commands)

    def load_optimizer_state(self, number: int, state: dict[int, dict[str, Any]], commands: int) -> None:
        self._on_executor(lambda: load_saved(self._optimizers[number], self.parameters, state), commands)

    def operate(self, operations: list[Operation], commands: int) -> list[Any]:
        """See ``remote_values.perform``."""
        return self._on_executor(lambda: perform(self.parameters, operations), commands)

    # -- checkpoints

    def save(
        self, folder: str, model: str, pieces: list[stored.Piece], optimizers: stored.Optimizers, rng: str, commands: int
    ) -> None:
        """Write this worker's part of the model that the checkpoint calls ``model``. ``rng``: what it calls its generators."""

        def save() -> None:
            state: dict[str, Any] = {model: stored.entries(self.root, pieces), "rng": {rng: stored.generators(self.gpu)}}
            for name, (number, positions) in optimizers.items():
                found = self._optimizers[number].state
                parameters = {fqn: self.parameters[at] for at, fqn in positions.items()}
                state[name] = {"state": {fqn: dict(found[p]) for fqn, p in parameters.items() if p in found}}
            stored.write(folder, state)

        self._on_executor(save, commands)

    def restore(
        self, folder: str, model: str, pieces: list[stored.Piece], optimizers: stored.Optimizers, rng: str, commands: int
    ) -> bool:
        """The inverse of ``save``. Whether the checkpoint has generators of that name."""

        def restore() -> bool:
            metadata = stored.metadata_of(folder)
            state: dict[str, Any] = {model: stored.entries(self.root, pieces)}
            for name, (_, positions) in optimizers.items():
                state[name] = {"state": stored.optimizer_target(metadata, name, [*positions.values()])}
            has = stored.read_generators(metadata, state, rng, self.gpu)
            stored.read(folder, state)
            stored.take_entries(self.root, pieces, state[model])
            for name, (number, positions) in optimizers.items():
                for at in positions:
                    self._optimizers[number].state.pop(self.parameters[at], None)
                found = {at: state[name]["state"][fqn] for at, fqn in positions.items() if fqn in state[name]["state"]}
                load_state(self._optimizers[number], self.parameters, found)
            if has:
                stored.set_generators(state["rng"][rng], self.gpu)
            return has

        return self._on_executor(restore, commands)

    # -- the rest

    def notes(self) -> dict[str, str]:
        """Value -> where it is made, or why it is copied, of all plans."""
        flows = [flow for _, flow in self._plans.values() if flow is not None]
        return {name: note for flow in flows for name, note in flow.notes().items()}

    def counters(self) -> dict[str, int]:
        return {**self.station.device.counters(), **self.station.counts}

    def copied(self) -> dict[int, tuple[int, str]]:
        """Bytes that were staged here, and why, by the number of the edge."""
        return self.station.staged_by_edge()

    def lost(self, worker: str, error: RdmaError) -> None:
        self.station.lost(worker, error)

    def stop(self) -> Leased:
        """First half of the end: nothing runs here any more, and nothing is sent. Returns where tensors of this worker still
        lie. ``TransferTimeout`` if a part does not come to its end."""
        if not self.executor.finish():
            raise TransferTimeout(f"a part of a model that was closed still runs on {self.station.name!r}")
        self.station.quiet()
        return self.station.leased()

    def close(self, leased: Leased | None = None) -> None:
        """Second half, after every worker has stopped: our slots are given back, but for those where tensors of others lie (for
        ever: nobody would tell us of their end). ``None``: somebody may still write into any of them."""
        self.executor.finish()
        self.station.leave(leased)

    def _on_executor(self, job: Callable[[], Any], commands: int) -> Any:
        return self.executor.submit(job, commands).result(self.station.timeout)

    def _attribute(self, path: str) -> Any:
        found: Any = self.root
        for name in path.split("."):
            found = getattr(found, name)
        return found

    def _part(self, path: str) -> Callable[..., Any]:
        """What runs a part: that itself, if nothing in it is code of the user's."""
        part = self.root.get_submodule(path)
        known = self._followed.get(path)
        if known is None:
            known = self._followed[path] = Followed(path, part, self.gpu, lambda: self._drew(path), self.access.changed_common)
        return known if known.follows else part

    def _drew(self, path: str) -> None:
        drawn = f"draws_elsewhere[{path}]"
        if not self.station.counts[drawn]:
            payload = Command(NOTHING, payload=path.encode()[: REPORT_BYTES - 8])
            self.executor.tell(Header.drew(), payload.padded(report_bytes(len(self.parameters))))
        self.station.counts[drawn] += 1

    def _set_mode(self, number: int) -> None:
        training, requires_grad = self._modes[number]
        for module, flag in zip(self.modules, training):
            module.training = flag
        for parameter, flag in zip(self.parameters, requires_grad):
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)

    def _apply(self, command: Command) -> None:
        if command.kind == ZERO and not command.payload:
            for parameter in self.parameters:
                if parameter.requires_grad:
                    parameter.grad = None
        elif command.kind == ZERO:
            for parameter, what in zip(self.parameters, command.payload):
                if what == TO_NONE:
                    parameter.grad = None
                elif what and parameter.grad is not None:
                    parameter.grad.zero_()
        elif command.kind == STEP:
            optimizer = self._optimizers.get(command.argument)
            if optimizer is not None:
                if command.payload:
                    numbers = struct.unpack(f"<{len(command.payload) // 8}d", command.payload)
                    read_numbers(optimizer.param_groups, numbers)
                optimizer.step()


class Tree(nn.Module):
    """Modules, parameters and buffers under their dotted paths. What lies above them only holds names."""

    def __init__(self, parts: Mapping[str, nn.Module | torch.Tensor]) -> None:
        super().__init__()
        for path, part in parts.items():
            *above, name = path.split(".")
            at: nn.Module = self
            for step in above:
                at = at._modules.setdefault(step, nn.Module())  # type: ignore[assignment]
            tables: list[tuple[type, Any]] = [
                (nn.Module, at._modules),
                (nn.Parameter, at._parameters),
                (torch.Tensor, at._buffers),
            ]
            next(table for kind, table in tables if isinstance(part, kind))[name] = part
