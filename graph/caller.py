"""The caller's end of a wrapped model: sets up plans, runs forwards and backwards, sends commands.

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
import itertools
import threading
import time
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..transport import NotSupported, PeerLost, RdmaError, TransferTimeout, fresh
from .analyze import TransferGraph
from .command import DISCARD, KEEP, NOTHING, ZERO, Command, WorkerError, unpadded
from .header import CLEAR, DONE, ERROR, GRAD, Header
from .outlet import Outlet
from .pipeline import Part, Pipeline
from .place import REPORT, Edge, Placement, control_edges, place
from .production import Production
from .program import Machine, Segment, fill
from .slot import Inlet, Slot, shared, take
from .stage import Cross, Pass, Plan, Stage, cross_apart
from .station import Arrived, Fittings, Leased, Offer, Station

if TYPE_CHECKING:
    from ..transport import Channel, Device

_DROPPED = 4096


class Ask(Protocol):
    """Calls a method of the ``Host`` at several workers at once and gives their answers; set-up only."""

    def __call__(self, method: str, args: Mapping[str, tuple[Any, ...]], /) -> dict[str, Any]: ...


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
        self.name, self.depth, self.timeout, self.staging = name, depth, timeout, staging
        self.workers = list(parameters)
        self.station = Station(name, device, channels, timeout)
        self.commands = 0
        self.steps = 0
        self.backwards = 0
        self.plans_made = 0
        self.machine = machine
        self._reaching = reaching
        self._ask, self._limit = ask, plans
        self._plans: OrderedDict[Any, Plan] = OrderedDict()
        self._plan_numbers = itertools.count(1)
        self._edge_numbers = itertools.count(1)
        self._sequence = 0
        self._passes: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()
        self._dropped: OrderedDict[int, None] = OrderedDict()
        self._abandoned: deque[tuple[Plan, int, Mapping[str, bytes]]] = deque()
        self._pipeline: Pipeline | None = None
        self._done: dict[int, set[str]] = {}
        self._errors: dict[int, Exception] = {}
        self._fatal: Exception | None = None
        self._last_backward = dict.fromkeys(parameters, 0)
        self._zero = {worker: bytearray(count) for worker, count in parameters.items()}
        self._zero_due = False
        self.trainable: dict[int, dict[str, bytes]] = {}
        """By mode and worker: one byte a parameter, ``TO_NONE`` where it requires gradients. A mode that is not here has its
        gradients zeroed by commands."""
        self._anchor = torch.zeros((), requires_grad=True)
        self._lock = threading.RLock()
        control = control_edges(name, dict(parameters), self._edge_numbers)
        fittings, _ = self._establish(control)
        self._control: dict[str, Outlet] = {o.edge.target: o for o in fittings.outlets.values()}

    # -- set-up

    def _arrived(self, edge: Edge) -> Arrived:
        return self._reported if edge.kind == REPORT else self._landed

    def _establish(self, placement: Placement) -> tuple[Fittings, Offer]:
        """Slots everywhere, then everybody learns everybody's addresses; or nothing at all."""
        fittings, offers = self.station.fit(placement, self._arrived)
        there = [worker for worker in placement.workers if worker != self.name]
        try:
            for offer in self._ask("offer", dict.fromkeys(there, (placement,))).values():
                offers.add(offer)
            self._ask("connect", dict.fromkeys(there, (placement.number, offers)))
            self.station.connect(fittings, offers)
        except BaseException:
            self.station.remove(fittings, {})
            self._ask("remove", dict.fromkeys(there, (placement.number, {})))
            raise
        return fittings, offers

    def known(self, signature: Any) -> Plan | None:
        """The plan for this signature, if there is one."""
        with self._lock:
            plan = self._plans.get(signature)
            if plan is not None:
                self._plans.move_to_end(signature)
            return plan

    def plan(self, signature: Any, build: Callable[[], TransferGraph]) -> Plan:
        """The plan for inputs of this signature; built, and set up at every worker, when it is new."""
        with self._lock:
            found = self.known(signature)
            if found is not None:
                return found
            self._ready()
            self._make_room()
            graph = build()
            try:
                fittings = self._place(graph)
            except NotSupported as error:
                if error.device != "cuda" or not self._reaching:
                    raise
                # Whether one process can map another's GPU memory shows when it is tried.
                warnings.warn(f"what lands on accelerators goes by way of host memory: {error.message}", stacklevel=2)
                self._reaching = frozenset()
                fittings = self._place(graph)
            plan = self._plans[signature] = Plan(fittings, self.name)
            self.plans_made += 1
            return plan

    def _place(self, graph: TransferGraph) -> Fittings:
        placement = place(graph, next(self._plan_numbers), self.depth, self._edge_numbers)
        placement.staging, placement.reaching = self.staging, self._reaching
        return self._establish(placement)[0]

    def check_kept(self, count: int) -> None:
        """Raise ``NotSupported`` if so many plans cannot be kept at once."""
        if self._limit < count:
            raise NotSupported(f"this needs {count} plans at once, plans={self._limit} are kept", hint="wrap(..., plans=)")

    def keep(self, plans: int) -> None:
        """Keep at least so many plans from now on."""
        self._limit = max(self._limit, plans)

    def placements(self) -> list[Placement]:
        """Of the plans that are kept, the last used last."""
        return [plan.placement for plan in self._plans.values()]

    def notes(self) -> dict[str, str]:
        """As ``Host.notes``, of what this process makes."""
        return {name: note for plan in self._plans.values() for name, note in plan.flow.notes().items()}

    def _make_room(self) -> None:
        idle = [signature for signature, plan in self._plans.items() if not plan.pending]
        while len(self._plans) >= self._limit and idle:
            plan = self._plans.pop(idle.pop(0))
            there = [worker for worker in plan.placement.workers if worker != self.name]
            leased = self.station.retire(plan.fittings)
            for answer in self._ask("retire", dict.fromkeys(there, (plan.placement.number, self.commands))).values():
                leased.update(answer)
            self._ask("remove", dict.fromkeys(there, (plan.placement.number, leased)))
            self.station.remove(plan.fittings, leased)

    # -- forward

    def forward(self, plan: Plan, tensors: Sequence[torch.Tensor], mode: int) -> Any:
        """Run the model on its tensor inputs. Raises what a part raised, ``TransferTimeout``, ``PeerLost``."""
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
            self._pipeline = Pipeline(self, parts, mode)
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

    def reserve(self, count: int) -> int:
        """The first of so many consecutive sequences."""
        self._sequence += count
        return self._sequence - count + 1

    def _begin(self, plan: Plan, grad: bool, mode: int) -> Pass:
        self._make_sure(plan, self.depth)
        run = Pass(plan, self.reserve(1), grad, mode, self.abandon)
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
        header = Header(0, run.sequence, GRAD if run.grad else 0, run.mode, self.commands)
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
        with self._lock:
            if stage.number not in run.stages_left or run.finished:
                raise RuntimeError(
                    "trying to go backward through the remote parts a second time: what they saved has been freed "
                    "(retain_graph does not reach other workers)"
                )
            try:
                return self._exchange_gradients(run, stage, grads)
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

    def _exchange_gradients(self, run: Pass, stage: Stage, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
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
        header = Header(0, run.sequence, CLEAR if run.zeroed else 0, run.mode, self.commands)
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
        done = self._done.setdefault(run.sequence, set())
        self._wait(run.sequence, lambda: done >= wanted, lambda: "the backward of " + _names(wanted - done))
        del self._done[run.sequence]
        self.finished_backward(wanted, run.sequence)
        run.finished = True
        run.plan.pending.discard(run.sequence)

    def begin_backward(self, plan: Plan, mode: int) -> dict[str, bytes]:
        """Before the first gradient goes out: see to the zeroing that is due. Where it is all of what the workers of this
        backward train, it rides in the gradients (``CLEAR``): then the marks come back, else a command says it and nothing
        does."""
        self.backwards += 1
        if not self._zero_due:
            return {}
        trainable = self.trainable.get(mode, {})
        marks = {worker: bytes(self._zero[worker]) for worker in plan.participants}
        if not marks or any(trainable.get(worker) != mine for worker, mine in marks.items()):
            self._flush_zero()
            return {}
        for worker in marks:
            self._zero[worker][:] = bytes(len(self._zero[worker]))
        self._zero_due = any(map(any, self._zero.values()))
        return marks

    def finished_backward(self, workers: Iterable[str], sequence: int) -> None:
        for worker in workers:
            self._last_backward[worker] = sequence

    def done_by(self, sequence: int) -> set[str]:
        """Workers that have reported the backward of this forward."""
        return self._done.get(sequence, set())

    def forget_done(self, sequence: int) -> None:
        self._done.pop(sequence, None)

    # -- commands

    def command(self, commands: Mapping[str, Command]) -> None:
        """Tell these workers; the others get a command that does nothing, so that all count alike."""
        with self._lock:
            self.commands += 1
            for worker, outlet in self._control.items():
                command = commands.get(worker, Command(NOTHING))
                payload = command.padded(outlet.edge.nbytes) if command.payload else None
                header = Header(
                    0, self.commands, mode=command.kind, backward=self._last_backward[worker], argument=command.argument
                )
                outlet.send(header, payload)
            outlets = self._control.values()
            self._wait(0, lambda: all(o.idle for o in outlets), lambda: "room for a command at " + _names(self.workers))

    def zero(self, worker: str, position: int, how: int) -> None:
        """Set a remote parameter's gradient to ``None`` or to zeros, before the next backward or step."""
        self._zero[worker][position] = how
        self._zero_due = True

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
            return self.commands

    def _flush_zero(self) -> None:
        if self._zero_due:
            self._zero_due = False
            commands = {worker: Command(ZERO, payload=bytes(marks)) for worker, marks in self._zero.items() if any(marks)}
            for marks in self._zero.values():
                marks[:] = bytes([KEEP]) * len(marks)
            self.command(commands)

    # -- what lands

    def _landed(self, inlet: Inlet, slot: Slot, header: Header) -> None:
        if self._pipeline is not None and self._pipeline.landed(inlet, slot, header):
            return
        run = self._passes.get(header.sequence)
        if run is None or header.sequence in self._dropped:
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
        worker = inlet.edge.source
        if header.flags & ERROR:
            error = WorkerError.load(unpadded(slot.payload)).raised(worker)
            if header.argument:
                self._fatal = error
            elif header.sequence not in self._dropped:
                self._errors.setdefault(header.sequence, error)
        elif header.flags & DONE:
            self._done.setdefault(header.sequence, set()).add(worker)
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
            self.raise_errors((sequence,))
        self.station.settle()

    def raise_errors(self, sequences: Iterable[int] = ()) -> None:
        """What workers have reported about these forwards, or about all."""
        if self._fatal is not None:
            raise fresh(self._fatal)
        if self._errors:
            for number in (*sequences, 0):
                if number in self._errors:
                    raise self._errors.pop(number)

    # -- the ends

    def _ready(self, drain: bool = False) -> None:
        """Before anything new. What came in the meantime is seen by the next wait, or now (``drain``: tens of microseconds,
        an empty look ends in a system call)."""
        if self.station.closed:
            raise RdmaError("the model was closed")
        self.station.check()
        while drain and self.station.poll(0.0):
            pass
        self.raise_errors()
        self._discard_abandoned()

    def _abandon(self, run: Pass) -> None:
        if not run.finished:
            run.finished = True
            run.landed.clear()
            self.abandon(run.plan, run.sequence, run.zeroed)

    def abandon(self, plan: Plan, sequence: int, zeroed: Mapping[str, bytes]) -> None:
        """This forward ends without its backward. Any thread, also from finalizers: only remembers it."""
        self._abandoned.append((plan, sequence, zeroed))

    def _discard_abandoned(self) -> None:
        while self._abandoned:
            plan, sequence, zeroed = self._abandoned.popleft()
            # Whether the gradients with the zeroing came to everybody, nobody knows: it is due again.
            for worker, marks in zeroed.items():
                self._zero[worker][:] = bytes(map(max, self._zero[worker], marks))
                self._zero_due = True
            plan.pending.discard(sequence)
            self._done.pop(sequence, None)
            self._errors.pop(sequence, None)
            self._dropped[sequence] = None
            if len(self._dropped) > _DROPPED:
                self._dropped.popitem(last=False)
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
