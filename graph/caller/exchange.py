"""The stages of a forward and its backward: between two segments of the caller, tensors go to workers and others come back."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch

from ...transport import NotSupported, RdmaError
from ..edges.slot import Inlet, Slot, shared, take
from ..edges.station import Station
from ..outlets import observer
from ..wire.header import GIVEN, GIVEN_AT, VIEW, Header
from .blocks import Edge, follow
from .control import Control, names
from .ledger import Ledger
from .stage import Forward, Plan, Stage, accumulator, check_plain, engine_runs


class Exchanges:
    """The ``stage.Exchange`` of all forwards of one model. ``exchange_gradients`` is called by the thread that goes backward;
    everything else is for the holder of the caller's ``lock``. Every forward hangs on the leaf ``anchor``: a backward that does
    not reach it is about named inputs alone."""

    def __init__(self, station: Station, ledger: Ledger, control: Control, lock: threading.RLock, anchor: torch.Tensor) -> None:
        self._station, self._ledger, self._control, self._lock = station, ledger, control, lock
        self._anchor = accumulator(anchor)
        self._passes: weakref.WeakValueDictionary[int, Forward] = weakref.WeakValueDictionary()

    def begin(self, plan: Plan, grad: bool, mode: int) -> Forward:
        """A new forward; it stays pending in its plan if it goes backward (``grad``)."""
        run = Forward(plan, self._ledger.reserve(1), grad, mode, self._ledger.abandon)
        plan.given_back.clear()
        self._passes[run.sequence] = run
        if grad:
            plan.pending.add(run.sequence)
        return run

    def exchange(self, run: Forward, stage: Stage, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One stage forward: ``tensors`` go out (one for each send that is no trigger), the received ones come back. Behind
        them are those of ``joins`` and ``splits``; the latter come out again."""
        seen = observer.current
        if seen is None:
            return self._exchange(run, stage, tensors)
        with seen.span("wait for workers", {"forward": run.sequence}):
            return self._exchange(run, stage, tensors)

    def _exchange(self, run: Forward, stage: Stage, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        header = Header.activation(run.sequence, run.grad, run.records, run.mode, self._ledger.commands)
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
        return outputs + [tensor.detach() for tensor in left][len(stage.joins) :]

    def exchange_gradients(self, run: Forward, stage: Stage, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """One stage backward: gradients of what it received go out, those of what it sent come back."""
        seen = observer.current
        if seen is None:
            return self._exchange_gradients(run, stage, grads)
        with seen.span("wait for workers' backward", {"forward": run.sequence}):
            return self._exchange_gradients(run, stage, grads)

    def _exchange_gradients(
        self, run: Forward, stage: Stage, grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        with self._lock:
            if stage.number not in run.stages_left or run.finished:
                raise NotSupported(
                    "trying to go backward through the remote parts a second time: what they saved has been freed",
                    hint="retain_graph does not reach other workers: add the losses up, run the forward again, or wrap with "
                    'capture="here"',
                )
            try:
                return self._back(run, stage, grads)
            except BaseException as error:
                self.failed(run, error)
                raise

    def _back(self, run: Forward, stage: Stage, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        if not run.backward_started:
            check_plain()
            run.backward_started = True
            for name, tensor, version in run.shared:
                if tensor._version != version:
                    raise NotSupported(
                        f"{name} was written in place by {self._station.name!r}, and its maker needs it for the backward",
                        hint="use operations that make a new tensor there, for example ReLU(inplace=False)",
                    )
            run.shared.clear()
            self._control.ready()
            run.leave = not engine_runs(self._anchor)
            if not run.leave:
                run.zeroed = self._control.begin_backward(run.plan, run.mode)
        header = Header.gradient(run.sequence, bool(run.zeroed), run.mode, self._ledger.commands, run.leave)
        # Later stages that autograd did not reach contribute nothing, and their workers must be told so.
        for number in sorted((n for n in run.stages_left if n > stage.number), reverse=True):
            skipped = run.plan.stages[number]
            self._send_back(header, skipped, [None] * len(skipped.backs))
            run.stages_left.discard(number)
            self._collect(run, [inlet for inlets in skipped.returns for inlet in inlets])
        self._send_back(header, stage, grads)
        run.stages_left.discard(stage.number)
        results: list[torch.Tensor | None] = []
        for name, inlets in zip((*(name for name, _ in stage.sends), *stage.joins), stage.returns):
            if not run.plan.graph.values[name].trigger:
                parts = [part for part in self._collect(run, inlets) if part is not None]
                results.append(_sum(parts))
        results += [None] * len(stage.splits)
        if stage.number == 0:
            self._wait_for_done(run)
        return results

    def follow(self, run: Forward, edge: Edge, block: torch.Tensor, reader: torch.Tensor | None, name: str) -> None:
        """See ``blocks``. Only a backward about named inputs ends before the maker of what it read."""
        follow(edge, block, reader if run.leave else None, name, self._control.reordered)

    @staticmethod
    def _send_back(header: Header, stage: Stage, grads: Sequence[torch.Tensor | None]) -> None:
        for outlet, grad in zip(stage.backs, grads):
            if outlet is not None:
                outlet.send(header, grad)

    def _wait_for_done(self, run: Forward) -> None:
        wanted = set(run.plan.participants)
        done = self._ledger.done_by(run.sequence)
        self._control.wait(run.sequence, lambda: done >= wanted, lambda: "the backward of " + names(wanted - done))
        self._ledger.finished_backward(wanted, run.sequence)
        run.finished = True
        run.plan.pending.discard(run.sequence)

    def landed(self, inlet: Inlet, slot: Slot, header: Header) -> None:
        """Something has come for a forward."""
        run = self._passes.get(header.sequence)
        if run is None or self._ledger.dropped(header.sequence):
            slot.close()
            return
        if header.flags & GIVEN:
            run.plan.given_back[inlet.edge.value] = header.flags >> GIVEN_AT, not header.flags & VIEW
        tensor = take(slot, header)
        if tensor is not None:
            # Whoever calls the model may keep what it gave for ever. The last free slot is never lent out.
            self._station.settle()
            if not inlet.spare():
                self._station.count_staged(inlet.edge, inlet.edge.nbytes, "outputs that are kept hold its other slots")
                tensor = tensor.clone()
            if shared(slot, header):
                run.shared.append((inlet.edge.value, tensor, tensor._version))
        run.landed[inlet.edge.number] = tensor

    def _collect(self, run: Forward, inlets: Sequence[Inlet]) -> list[torch.Tensor | None]:
        numbers = [inlet.edge.number for inlet in inlets]

        def missing() -> str:
            return ", ".join(
                f"{i.edge.kind} {i.edge.value} from {i.edge.source!r}" for i in inlets if i.edge.number not in run.landed
            )

        self._control.wait(run.sequence, lambda: all(number in run.landed for number in numbers), missing)
        return [run.landed.pop(number) for number in numbers]

    def failed(self, run: Forward, error: BaseException) -> None:
        """This forward ends here. Raises who was lost, if it is another worker than ``error`` says."""
        self._abandon(run)
        self._station.blame(error)

    def _abandon(self, run: Forward) -> None:
        if not run.finished:
            run.finished = True
            run.landed.clear()
            self._ledger.abandon(run.plan, run.sequence, run.zeroed)


def _sum(parts: list[torch.Tensor]) -> torch.Tensor | None:
    total: torch.Tensor | None = None
    for part in parts:
        total = part if total is None else total + part
    return total
