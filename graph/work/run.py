"""One forward, and its backward, at one worker: what has arrived, what is still missing.

Invariants:
1. A segment runs forward once, when all its inputs are here; backward once, when every contribution to the gradients of all
   its outputs is here (``None`` is a contribution). Nothing else starts it.
2. Contributions are summed in the fixed order of ``Route.sources``, whatever order they came in. The gradient of a value that
   is carried starts, at each of its segments, as the sum of those before.
3. An input is used where it landed, or was produced. Writing into it in place is allowed to its only user, unless it was
   sent from here too.
4. While a segment runs backward its thread waits for the engine, which hands on gradients of inputs that lie on accelerators by
   threads of its own, one a device: one at a time (``_lock``), each with the current stream that the forward had.
5. In a batch whose backwards are split (``Batch.split``) a backward that can be hands on the gradients of its inputs, and
   adds those of parameters by a task of its own (``finish_backward``). What cannot is counted by name, and runs in one go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.autograd.variable import Variable

from ...transport import NotSupported, RdmaError
from ..outlets.outlet import keep_apart
from ..plan.program import Machine
from ..schedules.halves import RAN_HOOKS, Halves, halves, hooks_made
from ..trace.writes import KEEP_A_COPY, storage_of
from ..wire.header import CLEAR, GIVEN, GIVEN_AT, GRAD, LEAVE, RECORDS, VIEW, Header, MicroBatch
from .aside import Aside
from .flow import Duty, Flow, Input, Route, Source
from .tasks import ALONE, FIRST, SECOND, WHOLE, Agenda, Batch, Task

_FREED = "backward through the graph a second time"
KEPT_HINT = (
    "a part may keep tensor.detach() from one call to the next, gradients go through what it keeps only with wrap(..., "
    'capture="here"), or where the module that makes all these calls is placed as a whole'
)

Watched = list[tuple[str, torch.Tensor, int]]
"""Name, tensor and its version: what must not be written in place."""


class Arrive(torch.autograd.Function):
    """Makes a tensor that came from elsewhere part of the graph here, without a copy, and hands its gradient on the moment it
    is known."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: list[torch.Tensor], deliver: Callable[[Any], None]) -> torch.Tensor:
        # In a list, so that autograd does not see it as an input: the result may then be written in place.
        ctx.deliver = deliver
        return tensor[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None]:
        ctx.deliver(grads[0])
        return None, None, None


_ANCHOR = torch.zeros((), device="cpu", requires_grad=True)
_engine = Variable._execution_engine
"""What is behind ``torch.autograd.backward``: its checks of arguments take as long as a small backward, and the sizes of
gradients are those of their edges. Context variables do not reach the engine's threads for accelerators."""


class Run:
    """Belongs to the thread of its agenda, which takes the tasks that have become possible. ``micro``: which part of ``batch``
    it is. ``zero_due``: the parameters' gradients become ``None`` before its first backward; ``clear``, ``leave``: its
    gradients say so to others (``header.CLEAR``, ``LEAVE``)."""

    def __init__(self, flow: Flow, header: Header, machine: Machine, agenda: Agenda, batch: Batch | None = None) -> None:
        self.flow, self.machine, self.agenda, self.batch = flow, machine, agenda, batch
        self.sequence, self.mode, self.commands, self.place = header.sequence, header.mode, header.commands, header.place
        self.micro = MicroBatch.unpack(self.place) if self.place else ALONE
        self.grad = bool(header.flags & GRAD)
        self.records = bool(header.flags & RECORDS)
        self._lock = threading.Lock() if flow.gpus else None
        self.zero_due = False
        self.clear = False
        self.leave = False
        self._values: dict[str, torch.Tensor] = {}
        self._users_left: dict[str, int] = {}
        self._shared: set[str] = set()
        self._missing = flow.missing.copy()
        self._gradients_missing = flow.gradients_missing.copy()
        self._outputs: dict[int, dict[str, torch.Tensor]] = {}
        self._grads: dict[str, torch.Tensor | None] = {}
        self._undelivered: dict[int, set[str]] = {}
        self._parts: dict[str, dict[Source, torch.Tensor | None]] = {}
        self._arrived: dict[tuple[int, str], GradientEdge] = {}
        self._sums: dict[tuple[int, str], torch.Tensor] = {}
        """What inputs that are carried start with, by segment."""
        self._totals: dict[str, torch.Tensor] = {}
        """Gradients of parameters that more segments add to."""
        self._starts: dict[int, tuple[list[Any], list[torch.Tensor | None]]] = {}
        """What backwards start from that have been looked at."""
        self._halves: dict[int, Halves] = {}
        self._hooked: set[int] = set()
        """Segments whose forward has registered hooks."""
        self._going_back: Duty | None = None
        self.forwards_left = len(flow.duties)
        self.backwards_left = flow.backwards if self.grad else 0

    @property
    def returned(self) -> bool:
        """Whether its segments have run, forward and backward; second halves of backwards may be left."""
        return self.forwards_left == 0 and self.backwards_left == 0

    @property
    def finished(self) -> bool:
        return self.returned and not self._halves

    def missing(self, unreported: set[str]) -> str:
        """What it waits for, for people. ``unreported``: workers whose report of the backward is missing too."""
        waiting = [
            f"{duty.segment} lacks {left} {what}"
            for what, counts, needed in (
                ("inputs", self._missing, True),
                ("gradients", self._gradients_missing, self.grad),
            )
            for duty, left in zip(self.flow.duties, counts)
            if needed and left > 0
        ]
        return "; ".join([*waiting, *(f"{worker!r} has not finished its backward" for worker in sorted(unreported))])

    def drop(self) -> None:
        """Forget everything: graphs and landed values die, their slots become free."""
        self._values.clear()
        self._parts.clear()
        self._outputs.clear()
        self._grads.clear()
        self._arrived.clear()
        self._sums.clear()
        self._totals.clear()
        self._starts.clear()
        self._halves.clear()

    # -- forward

    def arrived(self, name: str, tensor: torch.Tensor | None, commands: int, shared: bool = False) -> None:
        """An activation is here; ``None`` for a trigger. ``shared``: its sender still reads it, see ``header.SHARED``."""
        if commands > self.commands:
            self.commands = commands
        if shared:
            self._shared.add(name)
        if tensor is not None:
            self._values[name] = tensor
        missing = self._missing
        for duty in self.flow.routes[name].users:
            missing[duty.at] -= 1
            if missing[duty.at] == 0:
                self.agenda.add(Task(self, duty, False, self.commands))

    def forward(self, duty: Duty) -> dict[str, Any]:
        """Run a segment; what is left of its tensors comes back by name."""
        grad = self.grad and duty.backward
        outputs: dict[str, torch.Tensor] = {}
        hooks = hooks_made()
        with torch.set_grad_enabled(self.records):
            env, watched = self._take_inputs(duty, grad)
            given = list(env.items()) if self.flow.numbers else []
            common = [(name, env[name]) for name in duty.common if name in env]

            # Without a backward nobody waits for a report of what is found below, so nothing leaves before it is looked for.
            held: list[tuple[str, torch.Tensor, Route, int]] = []

            def produced(name: str, tensor: torch.Tensor) -> None:
                route = duty.outputs.get(name)
                if route is not None:
                    if tensor.requires_grad and name in duty.without_gradient:
                        raise NotSupported(
                            f"{name} has a gradient now, and had none when it was captured: it would be lost",
                            hint='wrap(..., capture="here") runs the model in this process, over fetched parts',
                        )
                    outputs[name] = tensor
                    watched.append((name, tensor, tensor._version))
                    if production is not None:
                        production.made(name, tensor)
                    flags = _given_back(tensor, given, self.flow.numbers) if given else 0
                    if grad:
                        self._emit(name, tensor, route, flags)
                    else:
                        held.append((name, tensor, route, flags))

            production = self.flow.production(duty, self.mode, grad)
            self._given(duty, env, produced)
            try:
                if production is None:
                    self.machine.run(duty.segment.instructions, env, produced)
                else:
                    self.machine.run(duty.segment.instructions, env, produced, production.around)
                _check_unwritten(watched, duty)
                for name in duty.written:
                    if self.machine.keeps(outputs[name]):
                        raise NotSupported(f"a part keeps {name}, and others write into it", hint=KEEP_A_COPY)
                if duty.common:
                    self.machine.note(self.sequence, [*common, *(item for item in outputs.items() if item[0] in duty.common)])
                for output in held:
                    self._emit(*output)
            finally:
                if production is not None:
                    production.finish()
        if grad:
            self._outputs[duty.at] = outputs
        if hooks != hooks_made():
            self._hooked.add(duty.at)
        self.forwards_left -= 1
        return env

    def _given(self, duty: Duty, env: dict[str, Any], produced: Callable[[str, torch.Tensor], None]) -> None:
        """Put into ``env`` what is neither an input from elsewhere nor made by an instruction."""

    def _take_inputs(self, duty: Duty, grad: bool) -> tuple[dict[str, Any], Watched]:
        env: dict[str, Any] = {}
        watched: Watched = []
        for given in duty.inputs:
            name = given.name
            if given.users == 1:
                tensor = self._values.pop(name)
            else:
                left = self._users_left[name] = self._users_left.get(name, given.users) - 1
                tensor = self._values.pop(name) if left == 0 else self._values[name].detach()
            if given.watched or name in self._shared:
                watched.append((name, tensor, tensor._version))
            if grad and given.differentiable:
                self._undelivered.setdefault(duty.at, set()).add(name)
                tensor = Arrive.apply(_ANCHOR, [tensor], self._deliverer(given, duty))
                if self.flow.routes[name].hops:
                    self._arrived[duty.at, name] = get_gradient_edge(tensor)
            elif self.records and given.kept_only:
                tensor = Arrive.apply(_ANCHOR, [tensor], self._deliverer(given, duty))
            env[name] = tensor
        return env, watched

    def _emit(self, name: str, tensor: torch.Tensor, route: Route, flags: int) -> None:
        if route.sends:
            header = self._header()
            if flags:
                header = header._replace(flags=header.flags | flags)
            for outlet in route.sends:
                outlet.send(header, tensor)
        if route.users:
            self.arrived(name, tensor.detach(), self.commands)

    def _emit_trigger(self, route: Route) -> None:
        for outlet in route.sends:
            outlet.send(self._header())

    def _header(self) -> Header:
        return Header.activation(self.sequence, self.grad, self.records, self.mode, self.commands, self.place)

    # -- backward

    def landed_gradient(self, value: str, source: Source, header: Header, grad: torch.Tensor | None) -> None:
        """A contribution has come from another worker."""
        if header.flags & CLEAR and not self.clear:
            self.clear = self.zero_due = True
        if header.flags & LEAVE:
            self.leave = True
        self.gradient(value, source, grad, header.commands)

    def gradient(self, name: str, source: Source, grad: torch.Tensor | None, commands: int) -> None:
        """One contribution to the gradient of a value."""
        if commands > self.commands:
            self.commands = commands
        route = self.flow.routes[name]
        if route.hops:
            self._carry(route, name, source, grad)
            return
        total = grad
        if len(route.sources) > 1:
            parts = self._parts.setdefault(name, {})
            parts[source] = grad
            if len(parts) < len(route.sources):
                return
            del self._parts[name]
            total = None
            for key in route.sources:
                part = parts[key]
                if part is not None:
                    total = part if total is None else total + part
        duty = route.producer
        if duty is None:
            assert route.back is not None
            route.back.send(Header.gradient(self.sequence, self.clear, self.mode, self.commands, self.leave), total)
            return
        self._grads[name] = total
        self._lacks_one_less(duty)

    def _carry(self, route: Route, name: str, source: Source, total: torch.Tensor | None) -> None:
        """The gradient of a value so far: send it to the segment that is next, or give it to that."""
        to, edge = source
        if not edge:
            hop = route.hops[to]
            if hop.outlet is not None:
                hop.outlet.send(Header.gradient(self.sequence, self.clear, self.mode, self.commands, self.leave), total)
                return
            to = hop.to
        if route.producer is not None and route.producer.segment.number == to:
            self._grads[name] = total
            self._lacks_one_less(route.producer)
            return
        [duty] = [user for user in route.users if user.segment.number == to]
        if total is not None:
            self._sums[duty.at, name] = total
        self._lacks_one_less(duty)

    def _lacks_one_less(self, duty: Duty) -> None:
        left = self._gradients_missing[duty.at] = self._gradients_missing[duty.at] - 1
        if left == 0:
            self._add_backward(duty)

    def _add_backward(self, duty: Duty) -> None:
        """The gradients of its outputs are here."""
        split = self.batch is not None and self.batch.split and not self.leave and self._split(duty)
        self.agenda.add(Task(self, duty, True, self.commands, FIRST if split else WHOLE))

    def _split(self, duty: Duty) -> bool:
        """Whether this backward runs in halves."""
        roots, grads = self._starts[duty.at] = self._roots(duty)
        if not roots:
            return False
        if duty.shared:
            found: Halves | str = "parameters that other segments read too"
        elif self.flow.gpus:
            found = "tensors on accelerators"
        elif duty.at in self._hooked:
            found = RAN_HOOKS
        else:
            found = halves(roots, grads, _ANCHOR)
        if isinstance(found, Halves):
            self._halves[duty.at] = found
            return True
        if found and self.batch is not None:
            self.batch.counts[f"backwards_unsplit[{duty.segment}: {found}]"] += 1
        return False

    def backward(self, duty: Duty) -> None:
        split = self._halves.get(duty.at)
        self._going_back = duty
        try:
            if split is None:
                self._whole_backward(duty)
            else:
                del self._starts[duty.at]
                split.inputs(_ANCHOR)
                self.agenda.add(Task(self, duty, True, self.commands, SECOND))
        except RuntimeError as error:
            if _FREED in str(error):
                raise RuntimeError(f"{error} ({KEPT_HINT})") from error
            raise
        finally:
            self._going_back = None
        undelivered = self._undelivered.pop(duty.at, None)
        if undelivered:
            for given in duty.inputs:
                if given.name in undelivered:
                    self.gradient(given.name, given.source, None, self.commands)
        self.backwards_left -= 1
        for later in duty.then:
            self._lacks_one_less(later)
        if self._totals and not self.backwards_left:
            raise RdmaError(f"gradients of {', '.join(self._totals)} were summed and not added: please report this model")

    def finish_backward(self, duty: Duty) -> None:
        """The second half."""
        self._halves[duty.at].parameters()
        del self._halves[duty.at]
        keep_apart(self.flow.unread, self.machine.parameters)

    def _whole_backward(self, duty: Duty) -> None:
        roots, grads = self._starts.pop(duty.at) if duty.at in self._starts else self._roots(duty)
        aside = self._set_aside(duty, roots, grads) if duty.shared and not self.leave else None
        try:
            if roots:
                self._go_back(roots, grads)
                keep_apart(self.flow.unread, self.machine.parameters)
        finally:
            if aside is not None:
                self._totals.update(aside.put_back())

    def _go_back(self, roots: list[Any], grads: list[torch.Tensor | None]) -> None:
        """``grads`` of the roots; ``None``: of a loss, which has to be one number."""
        if any(grad is None for grad in grads):
            torch.autograd.backward(roots, grads, inputs=[_ANCHOR] if self.leave else None)
            return
        # What leads to an input leads to the anchor.
        reached = (_ANCHOR,) if self.leave else ()
        _engine.run_backward(tuple(roots), tuple(grads), False, False, reached, allow_unreachable=True, accumulate_grad=True)

    def _set_aside(self, duty: Duty, roots: list[Any], grads: list[torch.Tensor | None]) -> Aside:
        """Of parameters that several segments read, what they had is added to once, by the last of these: until then the sum of
        the segments so far is where the next one's starts."""
        aside = Aside()
        for path, last in duty.shared:
            parameter = self.machine.attribute(path)
            if not parameter.requires_grad:
                continue
            total = self._totals.pop(path, None)
            if total is not None:
                roots.append(parameter)
                grads.append(total)
            if not last:
                aside.take(path, parameter)
        return aside

    def _roots(self, duty: Duty) -> tuple[list[Any], list[torch.Tensor | None]]:
        """What the backward of this segment starts from: tensors and gradient edges, which autograd takes together although its
        annotation does not say so."""
        roots: list[Any] = []
        grads: list[torch.Tensor | None] = []
        for name, tensor in self._outputs.pop(duty.at, {}).items():
            grad = self._grads.pop(name, None)
            if grad is not None and tensor.requires_grad:
                roots.append(tensor)
                grads.append(grad)
        if self._sums:
            for given in duty.inputs:
                total = self._sums.pop((duty.at, given.name), None)
                if total is not None:
                    roots.append(self._arrived[duty.at, given.name])
                    grads.append(total)
        return roots, grads

    def _deliverer(self, given: Input, duty: Duty) -> Callable[[torch.Tensor | None], None]:
        """What takes the gradient of an input. Called by the engine in the backward of this segment: by this thread, or, for
        tensors on an accelerator, by one that the engine has for that (invariant 4)."""
        name = given.name

        def deliver(grad: torch.Tensor | None) -> None:
            if self._going_back is not duty:
                raise NotSupported(
                    f"a part keeps a tensor that was computed from {name} in {duty.segment}, and another call uses it: "
                    "that gradient would be lost",
                    hint=KEPT_HINT,
                )
            undelivered = self._undelivered.get(duty.at, ())
            if name not in undelivered:
                raise NotSupported(
                    f"a second backward through {duty.segment}", hint="retain_graph does not reach other workers"
                )
            undelivered.discard(name)  # type: ignore[union-attr]
            self.gradient(name, given.source, None if grad is None else grad.detach(), self.commands)

        lock = self._lock
        if lock is None:
            return deliver

        def deliver_alone(grad: torch.Tensor | None) -> None:
            with lock:
                deliver(grad)

        return deliver_alone


def _check_unwritten(watched: Watched, duty: Duty) -> None:
    for name, tensor, version in watched:
        if tensor._version != version:
            raise NotSupported(
                f"{name} is written in place by {duty.segment}, and used elsewhere too",
                hint="use operations that make a new tensor there, for example ReLU(inplace=False)",
            )


def _given_back(tensor: torch.Tensor, given: list[tuple[str, Any]], numbers: Mapping[str, int]) -> int:
    """Flags for what the part that is called gives: whether it has the memory of something that it was ``given``."""
    tensors = [(name, leaf) for name, leaf in given if isinstance(leaf, torch.Tensor)]
    name = next((name for name, leaf in tensors if leaf is tensor), "")
    if name:
        return GIVEN | numbers[name] << GIVEN_AT
    memory = storage_of(tensor)
    name = next((name for name, leaf in tensors if storage_of(leaf) == memory), "")
    return GIVEN | VIEW | numbers[name] << GIVEN_AT if name and tensor.numel() else 0
