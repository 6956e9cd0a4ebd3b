"""The caller's end of a wrapped model: runs forwards, alone or in micro-batches; ``exchange`` and ``control`` do the rest.

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
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...transport import NotSupported, RdmaError
from ..edges.slot import Inlet, Slot
from ..edges.station import Arrived, Leased, Station
from ..outlets import observer
from ..plan.analyze import TransferGraph
from ..plan.place import REPORT, Edge
from ..plan.program import Machine, Segment, fill
from ..wire.header import DREW, Header
from ..work.command import unpadded
from ..work.production import Production
from .control import Control
from .exchange import Exchanges
from .ledger import Ledger
from .order import Order
from .pipeline import Part, Pipeline
from .plans import Ask, Plans
from .stage import Cross, Forward, Plan, cross_apart
from .written import Written

if TYPE_CHECKING:
    from ...transport import Channel, Device


class Caller:
    """``parameters`` counts the parameters that live at each worker; ``machine`` runs the caller's own segments. ``depth``:
    forwards that may wait for their backward; ``timeout``: seconds that one wait may take; ``plans``: how many are kept;
    ``staging``, ``reaching``: see ``Placement``; ``keeps``: see ``Written``."""

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
        keeps: Callable[[str], bool] = lambda path: True,
    ) -> None:
        self.depth, self.timeout = depth, timeout
        self.station = Station(name, device, channels, timeout)
        self.plans = Plans(self.station, ask, self._arrived, depth=depth, limit=plans, staging=staging, reaching=reaching)
        self.ledger = Ledger(parameters)
        self.steps = 0
        self.machine = machine
        self.order = Order()
        self._ask, self._written = ask, Written(keeps, self._kept)
        self._pipeline: Pipeline | None = None
        self._anchor = torch.zeros((), device="cpu", requires_grad=True)
        self._lock = threading.RLock()
        fittings = self.plans.control(name, parameters)
        self.control = Control(self.station, self.ledger, fittings, parameters, timeout, self._lock)
        self._exchanges = Exchanges(self.station, self.ledger, self.control, self._lock, self._anchor)

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
            self.control.ready()
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
            self._make_sure(plan, self.depth)
            run = self._exchanges.begin(plan, torch.is_grad_enabled() and bool(plan.participants), mode)
            try:
                result = self._run(run, dict(zip(plan.graph.inputs, tensors)))
            except BaseException as error:
                self._exchanges.failed(run, error)
                raise
            if not run.grad:
                run.finished = True
                self.ledger.ended(run.sequence)
            self.steps += 1
            return result

    @staticmethod
    def check_schedule(plan: Plan, interleaved: bool) -> None:
        """Raise ``NotSupported`` if the plan cannot run so."""
        if interleaved and plan.flow.rounds is None:
            raise NotSupported(
                "interleaved: the stages of this placement do not go round its workers",
                hint='give each worker several stages in turn, as worker1, worker2, worker1, worker2; or schedule="1f1b"',
            )

    def forward_backward(self, parts: Sequence[Part], mode: int, interleaved: bool = False, split: bool = False) -> None:
        """Micro-batches in 1F1B order, or ``interleaved``, see ``pipeline``; ``split``: backwards in halves. Gradients are at
        their owners afterwards."""
        with self._lock:
            self.check_schedule(parts[0].plan, interleaved)
            for part in parts:
                self._make_sure(part.plan, 1)
            zeroed = self.control.begin_backward(parts[0].plan, mode)
            self._pipeline = Pipeline(
                self.ledger,
                self.station,
                self.machine,
                self.order,
                self._written,
                self.timeout,
                parts,
                mode,
                zeroed,
                interleaved,
                split,
            )
            try:
                self._pipeline.run()
            finally:
                self._pipeline = None
            self.steps += len(parts)

    def _make_sure(self, plan: Plan, most: int) -> None:
        """Before anything new: there is room in a plan for one more forward, where ``most`` may wait for their backward."""
        if self._pipeline is not None:
            raise RdmaError("the model is called by the loss function of its own forward_backward")
        self.control.ready()
        if len(plan.pending) >= most:
            self.control.ready(drain=True)
            gc.collect()  # a dropped graph may hang in a circle of references
            self.control.discard_abandoned()
        if len(plan.pending) >= most:
            raise RdmaError(
                f"{len(plan.pending)} forwards wait for their backward, and "
                + (f"depth={self.depth} allows no more" if most == self.depth else "forward_backward allows none"),
                hint="call backward() or drop the outputs of earlier forwards, use torch.no_grad() for evaluation, or wrap "
                "with a larger depth",
            )

    def check_written(self) -> None:
        """Before the model is used: ``NotSupported`` if something was written that a part keeps (``Written``)."""
        with self._lock:
            self._written.check()

    def forget_written(self, sequence: int) -> None:
        """The forwards after this one belong to one that failed: the program has nothing of them."""
        with self._lock:
            self._written.forget(sequence)

    def _kept(self, sequences: list[int]) -> list[tuple[int, str]]:
        """What parts keep of these forwards (``Written``)."""
        commands = self.control.sync()
        answers = self._ask("kept", dict.fromkeys(self.control.begun, (sequences, commands)))
        return [found for answer in answers.values() for found in answer]

    def _run(self, run: Forward, store: dict[str, Any]) -> Any:
        plan, token = run.plan, self._anchor
        first = dict(store)
        duties = iter(plan.flow.duties)
        production: Production | None = None
        self.order.begin()
        try:
            for item in plan.schedule:
                if isinstance(item, Segment):
                    env = {name: store[name] for name in item.inputs} if item.level else first
                    production = plan.flow.production(next(duties), run.mode, run.grad)
                    with self.order.around(item):
                        if production is None:
                            self.machine.run(item.instructions, env, lambda name, tensor: None)
                        else:
                            self.machine.run(item.instructions, env, production.made, production.around)
                    store.update(env)
                    continue
                tensors = [store[name] for name, _ in item.sends if name in store]
                tensors += [store[name] for name in (*item.joins, *item.splits)]
                if run.grad and item.apart:
                    token, *outputs = cross_apart(token, self._exchanges, run, item, tensors)
                elif run.grad:
                    token, *outputs = Cross.apply(token, self._exchanges, run, item, *tensors)
                else:
                    outputs = self._exchanges.exchange(run, item, tensors)
                if production is not None:
                    production.finish()
                store.update(zip((*(name for name, _ in item.receives), *item.splits), outputs))
        finally:
            if production is not None:
                production.finish()
        self._written.take(plan, run.sequence, store)
        return fill(plan.graph.output, store)

    # -- what lands

    def _landed(self, inlet: Inlet, slot: Slot, header: Header) -> None:
        if self._pipeline is None or not self._pipeline.landed(inlet, slot, header):
            self._exchanges.landed(inlet, slot, header)

    def _reported(self, inlet: Inlet, slot: Slot, header: Header) -> None:
        if header.flags & DREW:
            self.control.drew([unpadded(slot.payload).decode(errors="replace")])
        else:
            self.ledger.report(inlet.edge.source, slot, header)
        slot.close()

    # -- the ends

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
