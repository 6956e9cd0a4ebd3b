"""Micro-batches of one batch, forward and backward, at the caller: an owner like any other while they run.

Invariants:
1. Micro-batches have consecutive sequences and begin in their order. At most ``levels`` of them have begun and have not
   returned; returned: through the caller's segments, and reported by the workers where its backward ends (``flow.sinks``).
   Second halves of its backward may be left. The last one has returned when every worker that takes part has reported it, and
   then, by the order in ``work/tasks``, nothing is left at any.
2. What the caller's own segments get lies in slots, and user code may keep it for ever. The last slot that nobody keeps is
   given to them as a copy only, counted in ``bytes_staged``.
3. However it ends, nothing stays pending: micro-batches that did not finish are discarded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...transport import RdmaError, TransferTimeout
from ..edges.slot import Inlet, Slot, shared, take
from ..edges.station import Station
from ..guards.generators import torch_mark
from ..plan.place import ACTIVATION
from ..plan.program import Machine, fill
from ..schedules.halves import hooks_made
from ..wire.header import Header, MicroBatch
from ..work.flow import Duty
from ..work.run import Run
from ..work.tasks import Agenda, Batch, Task
from .ledger import Ledger
from .order import Order
from .stage import Plan
from .written import Written


class Part(NamedTuple):
    """One micro-batch as it is asked for: the model's tensor inputs, and what gives the loss (a scalar) of its output. Inputs
    that require gradients are leaves. ``whole``: what the program has of each, of which it is a piece."""

    plan: Plan
    tensors: Sequence[torch.Tensor]
    loss: Callable[[Any], torch.Tensor]
    whole: Sequence[torch.Tensor]


class Chunk(Run):
    """The caller's segments of one micro-batch."""

    def __init__(
        self,
        part: Part,
        header: Header,
        machine: Machine,
        order: Order,
        written: Written,
        station: Station,
        agenda: Agenda,
        batch: Batch,
    ) -> None:
        super().__init__(part.plan.flow, header, machine, agenda, batch)
        self.plan = part.plan
        self._tensors = dict(zip(part.plan.graph.inputs, part.tensors))
        self._whole = dict(zip(part.plan.graph.inputs, part.whole))
        self._loss, self._station, self._order, self._written = part.loss, station, order, written
        self._root: torch.Tensor | None = None
        agenda.add(Task(self, self.flow.duties[0], False, self.commands))

    def forward(self, duty: Duty) -> dict[str, Any]:
        with self._order.around(duty.segment, self.micro.number):
            env = super().forward(duty)
        if duty is self.flow.duties[-1]:
            self._written.take(self.plan, self.sequence, env)
            hooks, mark = hooks_made(), torch_mark()
            self._root = self._loss(fill(self.flow.graph.output, env))
            if torch_mark() != mark:
                self._order.loss(self.micro.number)
            if hooks != hooks_made():
                self._hooked.add(duty.at)
            self._add_backward(duty)
        return env

    def _given(self, duty: Duty, env: dict[str, Any], produced: Callable[[str, torch.Tensor], None]) -> None:
        if duty is not self.flow.duties[0]:
            return
        for route in self.flow.triggers:
            self._emit_trigger(route)
        self._written.take(self.plan, self.sequence, self._whole)
        self._whole.clear()
        env.update(self._tensors)
        for name, tensor in self._tensors.items():
            produced(name, tensor)
        self._tensors.clear()

    def _roots(self, duty: Duty) -> tuple[list[Any], list[torch.Tensor | None]]:
        roots, grads = super()._roots(duty)
        if duty is self.flow.duties[-1] and self._root is not None:
            roots.append(self._root)
            grads.append(None)
            self._root = None
        return roots, grads

    def lend(self, duty: Duty, waiting: dict[Inlet, int]) -> None:
        """Invariant 2, before a segment is given its inputs. ``waiting`` counts what has landed and was not given to
        anybody."""
        for given in duty.inputs:
            inlet = self.plan.landing.get(given.name)
            if inlet is None or given.name in self._users_left:
                continue
            waiting[inlet] -= 1
            if sum(slot.busy for slot in inlet.slots) - waiting[inlet] >= len(inlet.slots):
                self._station.count_staged(inlet.edge, inlet.edge.nbytes, "outputs that are kept hold its other slots")
                self._values[given.name] = self._values[given.name].clone()

    def drop(self) -> None:
        super().drop()
        self._tensors.clear()
        self._whole.clear()
        self._root = None


class Pipeline:
    """One batch; made and ``run`` with the caller's lock held, ``machine`` runs the caller's segments. ``timeout``: seconds in
    which something has to happen. ``mode``: the number of the flags that the parts run under; ``zeroed``: the marks
    (``Zeroing``) that ride in its gradients. ``interleaved``: see ``schedules/rounds``, which the plan has then; ``split``: see
    ``schedules/halves``."""

    def __init__(
        self,
        ledger: Ledger,
        station: Station,
        machine: Machine,
        order: Order,
        written: Written,
        timeout: float,
        parts: Sequence[Part],
        mode: int,
        zeroed: Mapping[str, bytes],
        interleaved: bool,
        split: bool,
    ) -> None:
        self.parts, self.mode = parts, mode
        self._ledger, self._station, self._machine, self._order, self._timeout = ledger, station, machine, order, timeout
        self._written = written
        plan = parts[0].plan
        self._window = plan.levels
        self._everybody, self._sinks = set(plan.participants), plan.sinks
        self._agenda = Agenda()
        self._chunks: dict[int, Chunk] = {}
        self._begun = self._returned = self._finished = 0
        self._waiting: dict[Inlet, int] = {}
        self._first = ledger.reserve(len(parts))
        self._interleaved, self._split = interleaved, split
        rounds = plan.flow.rounds if interleaved else None
        self._batch = Batch(self._first, len(parts), self._window, len(plan.flow.duties), rounds, split, station.counts)
        self._zeroed = zeroed

    def run(self) -> None:
        """All of it. Raises what a part or a loss raised, ``TransferTimeout``, ``PeerLost``."""
        ledger, station = self._ledger, self._station
        self._order.begin()
        try:
            deadline = time.monotonic() + self._timeout
            while self._finished < len(self.parts):
                self._begin_next()
                task = self._agenda.next(ledger.commands)
                if task is not None:
                    self._start(task)
                    station.look()
                elif not station.poll(deadline - time.monotonic()):
                    if time.monotonic() > deadline:
                        raise self._nothing_came()
                    continue
                ledger.raise_errors(range(self._first, self._first + self._begun))
                self._take_returned()
                deadline = time.monotonic() + self._timeout
            station.settle()
        except BaseException as error:
            self._give_up()
            station.blame(error)
            raise
        ledger.finished_backward(self._everybody, self._first + len(self.parts) - 1)

    def landed(self, inlet: Inlet, slot: Slot, header: Header) -> bool:
        """Take what came for a micro-batch; ``False``: it is not for one of these."""
        chunk = self._chunks.get(header.sequence)
        if chunk is None:
            return False
        name = inlet.edge.value
        if inlet.edge.kind == ACTIVATION:
            self._waiting[inlet] = self._waiting.get(inlet, 0) + 1
            chunk.arrived(name, take(slot, header), header.commands, shared(slot, header))
        else:
            chunk.landed_gradient(name, chunk.flow.edges[inlet.edge.number], header, take(slot, header))
        return True

    def _begin_next(self) -> None:
        while self._begun < len(self.parts) and self._begun - self._returned < self._window:
            sequence, index = self._first + self._begun, self._begun
            place = MicroBatch(index, len(self.parts), self._window, self._interleaved, self._split).pack()
            header = Header.activation(sequence, True, True, self.mode, self._ledger.commands, place)
            chunk = self._chunks[sequence] = Chunk(
                self.parts[index], header, self._machine, self._order, self._written, self._station, self._agenda, self._batch
            )
            if index == 0 and self._zeroed:
                chunk.clear = True
            self._begun += 1

    def _start(self, task: Task) -> None:
        chunk = task.run
        assert isinstance(chunk, Chunk)
        if not task.backward:
            self._station.settle()
            chunk.lend(task.duty, self._waiting)
        task.start()
        self._batch.ran(task)

    def _take_returned(self) -> None:
        while self._returned < self._begun:
            sequence = self._first + self._returned
            wanted = self._everybody if self._returned + 1 == len(self.parts) else self._sinks
            if not self._chunks[sequence].returned or not self._ledger.done_by(sequence) >= wanted:
                break
            self._ledger.ended(sequence)
            self._returned += 1
        while self._finished < self._returned and self._chunks[self._first + self._finished].finished:
            self._chunks.pop(self._first + self._finished).drop()
            self._finished += 1

    def _nothing_came(self) -> TransferTimeout:
        chunk = self._chunks[self._first + self._finished]
        return TransferTimeout(
            f"nothing came for micro-batch {self._finished + 1} of {len(self.parts)} within {self._timeout} s; "
            + chunk.missing(self._sinks - self._ledger.done_by(chunk.sequence)),
            device=self._station.device.name,
            hint="a part may be slow or stuck, or keep more inputs than there are slots (depth=); wrap(timeout=) sets it",
        )

    def _give_up(self) -> None:
        # One that has not begun goes along, so that workers hear of the end where all that had begun was finished.
        for index in range(self._finished, min(self._begun + 1, len(self.parts))):
            self._ledger.abandon(self.parts[index].plan, self._first + index, self._zeroed)
        for index in range(self._begun + 1, len(self.parts)):
            self._ledger.ended(self._first + index)
        for chunk in self._chunks.values():
            chunk.drop()
        self._agenda.clear()


def check_alike(one: Plan, other: Plan) -> None:
    """Raise ``RdmaError`` if two plans (of micro-batches of different sizes) do not have the same segments."""
    shape, also = ([(s.worker, s.level, s.backward) for s in plan.graph.segments] for plan in (one, other))
    if shape != also:
        raise RdmaError(
            "the model's forward takes another way for the last micro-batch, which is smaller",
            hint="let the batch size be a multiple of chunks",
        )
