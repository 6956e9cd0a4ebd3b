"""The caller's end of a wrapped model: runs forwards and backwards, sends commands.

Invariants:
1. One thread at a time is inside (``_lock``); it polls while it waits, nobody else does.
2. A forward that needs gradients is *pending* until its backward has finished at every worker, or it was discarded. A
   plan never has more pending forwards than its depth: then a slot is always free for the next.
3. ``backward`` returns after every worker that takes part has said that it is done; so a command that is sent afterwards
   cannot overtake it, and an error of it surfaces there.
4. Every number that a write depends on travels in its header: the forward, and how many commands come before it.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..transport import NotSupported, PeerLost, RdmaError, TransferTimeout
from . import observer
from .analyze import TransferGraph
from .command import DISCARD, NOTHING, Command
from .header import Header
from .ledger import Ledger
from .pipeline import Part, Pipeline
from .place import REPORT, Edge
from .plans import Ask, Plans
from .production import Production
from .program import Machine, Segment, fill
from .slot import Inlet, Slot, shared, take
from .stage import Cross, Pass, Plan, Stage, cross_apart
from .station import Arrived, Leased, Station
from .zeroing import Zeroing

if TYPE_CHECKING:
    from ..transport import Channel, Device


class Caller:
    """``parameters`` counts the parameters that live at each worker; ``machine`` runs the caller's own segments. ``depth``:
    forwards that may wait for their backward; ``timeout``: seconds that one wait may take; ``plans``: how many are kept;
    ``staging``, ``reaching``: see ``Placement``."""

    def __init__(
        self,
        name: str,
        device: Device,
        channels: Callable[[str], Channel],
        ask: Ask,
        parameters: Mapping[str, int],
        machine: Machine,
        *,
        depth: int = 2,
        timeout: float = 60.0,
        plans: int = 16,
        staging: bool = False,
        reaching: frozenset[str] = frozenset(),
    ) -> None:
        self.name, self.depth, self.timeout = name, depth, timeout
        self.workers = list(parameters)
        self.station = Station(name, device, channels, timeout)
        self.plans = Plans(self.station, ask, self._arrived, depth=depth, limit=plans, staging=staging, reaching=reaching)
        self.ledger = Ledger(parameters)
        self.zeroing = Zeroing(parameters)
        self.steps = 0
        self.backwards = 0
        self.machine = machine
        self._passes: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()
        self._pipeline: Pipeline | None = None
        self._anchor = torch.zeros((), requires_grad=True)
        self._lock = threading.RLock()
        self._control = {o.edge.target: o for o in self.plans.control(name, parameters).outlets.values()}

    # -- set-up

    def _arrived(self, edge: Edge) -> Arrived:
        return self._reported if edge.kind == REPORT else self._landed

    def known(self, signature: Any) -> Plan | None:
        """The plan for this signature, if there is one."""
        with self._lock:
            return self.plans.known(signature)

    def plan(self, signature: Any, build: Callable[[], TransferGraph]) -> Plan:
        """The plan for inputs of this signature; built, and set up at every worker, when it is new."""
        with self._lock:
            found = self.plans.known(signature)
            if found is not None:
                return found
            self._ready()
            return self.plans.make(signature, build, self.ledger.commands)

    # -- forward

    def forward(self, plan: Plan, tensors: Sequence[torch.Tensor], mode: int) -> Any:
        """Run the model on its tensor inputs. Raises what a part raised, ``TransferTimeout``, ``PeerLost``."""
        seen = observer.current
        if seen is None:
            return self._forward(plan, tensors, mode)
        with seen.span("model", {}):
            return self._forward(plan, tensors, mode)

    def _forward(self, plan: Plan, tensors: Sequence[torch.Tensor], mode: int) -> Any:
        with self._lock:
            run = self._begin(plan, torch.is_grad_enabled() and bool(plan.participants), mode)
            try:
                result = self._run(run, dict(zip(plan.graph.inputs, tensors)))
            except BaseException as error:
                self._abandon(run)
                self._blame(error)
                raise
            if not run.grad:
                run.finished = True
            self.steps += 1
            return result

    def forward_backward(self, parts: Sequence[Part], mode: int) -> None:
        """Micro-batches in 1F1B order, see ``pipeline``. Gradients are at their owners afterwards."""
        with self._lock:
            for part in parts:
                self._make_sure(part.plan, 1)
            zeroed = self.begin_backward(parts[0].plan, mode)
            self._pipeline = Pipeline(self.ledger, self.station, self.machine, self.timeout, parts, mode, zeroed)
            try:
                self._pipeline.run()
            finally:
                self._pipeline = None
            self.steps += len(parts)

    def _make_sure(self, plan: Plan, most: int) -> None:
        """Before anything new: there is room in a plan for one more forward, where ``most`` may wait for their backward."""
        if self._pipeline is not None:
            raise RdmaError("the model is called by the loss function of its own forward_backward")
        self._ready()
        if len(plan.pending) >= most:
            self._ready(drain=True)
            gc.collect()  # a dropped graph may hang in a circle of references
            self._discard_abandoned()
        if len(plan.pending) >= most:
            raise RdmaError(
                f"{len(plan.pending)} forwards wait for their backward, and "
                + (f"depth={self.depth} allows no more" if most == self.depth else "forward_backward allows none"),
                hint="call backward() or drop the outputs of earlier forwards, use torch.no_grad() for evaluation, or wrap "
                "with a larger depth",
            )

    def _begin(self, plan: Plan, grad: bool, mode: int) -> Pass:
        self._make_sure(plan, self.depth)
        run = Pass(plan, self.ledger.reserve(1), grad, mode, self.ledger.abandon)
        self._passes[run.sequence] = run
        if grad:
            plan.pending.add(run.sequence)
        return run

    def _run(self, run: Pass, store: dict[str, Any]) -> Any:
        plan, token = run.plan, self._anchor
        first = dict(store)
        duties = iter(plan.flow.duties)
        production: Production | None = None
        try:
            for item in plan.schedule:
                if isinstance(item, Segment):
                    env = {name: store[name] for name in item.inputs} if item.level else first
                    production = plan.flow.production(next(duties), run.mode, run.grad)
                    if production is None:
                        self.machine.run(item.instructions, env, lambda name, tensor: None)
                    else:
                        self.machine.run(item.instructions, env, production.made, production.around)
                    store.update(env)
                    continue
                tensors = [store[name] for name, _ in item.sends if name in store]
                if run.grad and item.apart:
                    token, *outputs = cross_apart(token, self, run, item, tensors)
                elif run.grad:
                    token, *outputs = Cross.apply(token, self, run, item, *tensors)
                else:
                    outputs = self.exchange(run, item, tensors)
                if production is not None:
                    production.finish()
                store.update(zip((name for name, _ in item.receives), outputs))
        finally:
            if production is not None:
                production.finish()
        return fill(plan.graph.output, store)

    def exchange(self, run: Pass, stage: Stage, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One stage forward: ``tensors`` go out (one for each send that is no trigger), the received ones come back."""
        seen = observer.current
        if seen is None:
            return self._exchange(run, stage, tensors)
        with seen.span("wait for workers", {"forward": run.sequence}):
            return self._exchange(run, stage, tensors)

    def _exchange(self, run: Pass, stage: Stage, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        header = Header.activation(run.sequence, run.grad, run.mode, self.ledger.commands)
        left = iter(tensors)
        for name, outlets in stage.sends:
            payload = None if run.plan.graph.values[name].trigger else next(left)
            for outlet in outlets:
                outlet.send(header, payload)
        received = self._collect(run, [inlet for _, inlet in stage.receives])
        outputs = []
        for (name, inlet), tensor in zip(stage.receives, received):
            if tensor is None:
                raise RdmaError(f"{name} came without a payload", peer=inlet.edge.source)
            outputs.append(tensor)
        return outputs

    # -- backward

    def exchange_gradients(self, run: Pass, stage: Stage, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """One stage backward: gradients of what it received go out, those of what it sent come back."""
        seen = observer.current
        if seen is None:
            return self._exchange_gradients(run, stage, grads)
        with seen.span("wait for workers' backward", {"forward": run.sequence}):
            return self._exchange_gradients(run, stage, grads)

    def _exchange_gradients(self, run: Pass, stage: Stage, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        with self._lock:
            if stage.number not in run.stages_left or run.finished:
                raise RuntimeError(
                    "trying to go backward through the remote parts a second time: what they saved has been freed "
                    "(retain_graph does not reach other workers)"
                )
            try:
                return self._back(run, stage, grads)
            except BaseException as error:
                self._abandon(run)
                self._blame(error)
                raise

    def _blame(self, error: BaseException) -> None:
        """A post names its own peer, which may have left because another one died: raise who was lost, if it is another."""
        if not isinstance(error, PeerLost):
            return
        try:
            self.station.check()
        except PeerLost as lost:
            if lost.peer != error.peer:
                raise lost from error

    def _back(self, run: Pass, stage: Stage, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        if not run.backward_started:
            run.backward_started = True
            for name, tensor, version in run.shared:
                if tensor._version != version:
                    raise NotSupported(
                        f"{name} was written in place by {self.name!r}, and its maker needs it for the backward",
                        hint="use operations that make a new tensor there, for example ReLU(inplace=False)",
                    )
            run.shared.clear()
            self._ready()
            run.zeroed = self.begin_backward(run.plan, run.mode)
        header = Header.gradient(run.sequence, bool(run.zeroed), run.mode, self.ledger.commands)
        # Later stages that autograd did not reach contribute nothing, and their workers must be told so.
        for number in sorted((n for n in run.stages_left if n > stage.number), reverse=True):
            skipped = run.plan.stages[number]
            self._send_back(header, skipped, [None] * len(skipped.backs))
            run.stages_left.discard(number)
            self._collect(run, [inlet for inlets in skipped.returns for inlet in inlets])
        self._send_back(header, stage, grads)
        run.stages_left.discard(stage.number)
        results = []
        for (name, _), inlets in zip(stage.sends, stage.returns):
            if not run.plan.graph.values[name].trigger:
                parts = [part for part in self._collect(run, inlets) if part is not None]
                results.append(_sum(parts))
        if stage.number == 0:
            self._wait_for_done(run)
        return results

    @staticmethod
    def _send_back(header: Header, stage: Stage, grads: Sequence[torch.Tensor | None]) -> None:
        for outlet, grad in zip(stage.backs, grads):
            if outlet is not None:
                outlet.send(header, grad)

    def _wait_for_done(self, run: Pass) -> None:
        wanted = set(run.plan.participants)
        done = self.ledger.done_by(run.sequence)
        self._wait(run.sequence, lambda: done >= wanted, lambda: "the backward of " + _names(wanted - done))
        self.ledger.finished_backward(wanted, run.sequence)
        run.finished = True
        run.plan.pending.discard(run.sequence)

    def begin_backward(self, plan: Plan, mode: int) -> dict[str, bytes]:
        """Before the first gradient goes out: see to the zeroing that is due, by the marks that are to ride in the gradients,
        which are returned, or by a command."""
        self.backwards += 1
        if not self.zeroing.due:
            return {}
        marks = self.zeroing.ride(plan, mode)
        if not marks:
            self._flush_zero()
        return marks

    # -- commands

    def command(self, commands: Mapping[str, Command]) -> None:
        """Tell these workers; the others get a command that does nothing, so that all count alike."""
        with self._lock:
            self.ledger.commands += 1
            for worker, outlet in self._control.items():
                command = commands.get(worker, Command(NOTHING))
                payload = command.padded(outlet.edge.nbytes) if command.payload else None
                backward = self.ledger.last_backward[worker]
                header = Header.command(self.ledger.commands, command.kind, command.argument, backward)
                outlet.send(header, payload)
            outlets = self._control.values()
            self._wait(0, lambda: all(o.idle for o in outlets), lambda: "room for a command at " + _names(self.workers))

    def zero(self, worker: str, position: int, how: int) -> None:
        """Set a remote parameter's gradient to ``None`` or to zeros, before the next backward or step."""
        self.zeroing.mark(worker, position, how)

    def step(self, steps: Mapping[str, Command]) -> None:
        """Send an optimizer step, after the zeroing that was asked for before."""
        with self._lock:
            self._ready()
            self._flush_zero()
            self.command(steps)

    def sync(self) -> int:
        """How many commands come before whatever is asked for by another way now."""
        with self._lock:
            self._ready(drain=True)
            self._flush_zero()
            return self.ledger.commands

    def _flush_zero(self) -> None:
        if self.zeroing.due:
            self.command(self.zeroing.commands())

    # -- what lands

    def _landed(self, inlet: Inlet, slot: Slot, header: Header) -> None:
        if self._pipeline is not None and self._pipeline.landed(inlet, slot, header):
            return
        run = self._passes.get(header.sequence)
        if run is None or self.ledger.dropped(header.sequence):
            slot.close()
            return
        tensor = take(slot, header)
        if tensor is not None:
            # Whoever calls the model may keep what it gave for ever. The last free slot is never lent out.
            self.station.settle()
            if not inlet.spare():
                self.station.device.count_staged(inlet.edge.nbytes)
                tensor = tensor.clone()
            if shared(slot, header):
                run.shared.append((inlet.edge.value, tensor, tensor._version))
        run.landed[inlet.edge.number] = tensor

    def _reported(self, inlet: Inlet, slot: Slot, header: Header) -> None:
        self.ledger.report(inlet.edge.source, slot, header)
        slot.close()

    def _collect(self, run: Pass, inlets: Sequence[Inlet]) -> list[torch.Tensor | None]:
        numbers = [inlet.edge.number for inlet in inlets]

        def missing() -> str:
            return ", ".join(
                f"{i.edge.kind} {i.edge.value} from {i.edge.source!r}" for i in inlets if i.edge.number not in run.landed
            )

        self._wait(run.sequence, lambda: all(number in run.landed for number in numbers), missing)
        return [run.landed.pop(number) for number in numbers]

    def _wait(self, sequence: int, ready: Callable[[], bool], missing: Callable[[], str]) -> None:
        deadline = time.monotonic() + self.timeout
        while not ready():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransferTimeout(
                    f"{missing()} did not come within {self.timeout} s",
                    device=self.station.device.name,
                    hint="a part may be slow or stuck; wrap(..., timeout=) sets the limit",
                )
            self.station.poll(left)
            self.ledger.raise_errors((sequence,))
        self.station.settle()

    # -- the ends

    def _ready(self, drain: bool = False) -> None:
        """Before anything new. What came in the meantime is seen by the next wait, or now (``drain``: tens of microseconds,
        an empty look ends in a system call)."""
        if self.station.closed:
            raise RdmaError("the model was closed")
        self.station.check()
        while drain and self.station.poll(0.0):
            pass
        self.ledger.raise_errors()
        self._discard_abandoned()

    def _abandon(self, run: Pass) -> None:
        if not run.finished:
            run.finished = True
            run.landed.clear()
            self.ledger.abandon(run.plan, run.sequence, run.zeroed)

    def _discard_abandoned(self) -> None:
        for plan, sequence, zeroed in self.ledger.drop_abandoned():
            self.zeroing.again(zeroed)
            for outlet in plan.fittings.outlets.values():
                outlet.forget(sequence)
            self.command(dict.fromkeys(self.workers, Command(DISCARD, sequence)))

    def leased(self) -> Leased:
        """As ``Host.stop``: nothing is sent any more."""
        with self._lock:
            self.station.close()
            self.station.quiet()
            return self.station.leased()

    def close(self, leased: Leased | None = None) -> None:
        """As ``Host.close``. Idempotent. The workers' hosts are closed by whoever opened them."""
        with self._lock:
            self.station.close()
            self.station.leave(leased)


def _sum(parts: list[torch.Tensor]) -> torch.Tensor | None:
    total: torch.Tensor | None = None
    for part in parts:
        total = part if total is None else total + part
    return total


def _names(workers: Any) -> str:
    return ", ".join(repr(worker) for worker in sorted(workers))
