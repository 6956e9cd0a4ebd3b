"""One forward, and its backward, at one worker: what has arrived, what is still missing.

Invariants:
1. A segment runs forward once, when all its inputs are here; backward once, when every contribution to the gradients of all
   its outputs is here (``None`` is a contribution). Nothing else starts it.
2. Contributions are summed in the fixed order of ``Route.sources``, whatever order they came in.
3. An input is used where it landed. Writing into it in place is allowed to its only user, and to nobody where it was
   produced here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..transport import NotSupported
from .dynamic import keep_apart
from .flow import Flow, Route, Source
from .header import GRAD, Header
from .program import Machine, Segment


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


_ANCHOR = torch.zeros((), requires_grad=True)


@dataclass(slots=True)
class Task:
    """Work that may start once ``commands`` commands have been applied."""

    commands: int
    run: Run
    start: Callable[[], None]


@dataclass(slots=True)
class _Stage:
    """One segment of this run."""

    missing: int
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    grads: dict[str, torch.Tensor | None] = field(default_factory=dict)
    gradients_missing: int = 0
    undelivered: set[str] = field(default_factory=set)


class Run:
    """Belongs to the executor's thread. ``ready`` takes the tasks that have become possible."""

    def __init__(self, flow: Flow, header: Header, machine: Machine, ready: Callable[[Task], None]) -> None:
        self.flow, self.machine, self.ready = flow, machine, ready
        self.sequence, self.mode = header.sequence, header.mode
        self.grad = bool(header.flags & GRAD)
        self.commands = header.commands
        self._values: dict[str, torch.Tensor] = {}
        self._users_left: dict[str, int] = {}
        self._shared: set[str] = set()
        self._stages: dict[int, _Stage] = {}
        self._parts: dict[str, dict[Source, torch.Tensor | None]] = {}
        for number, segment in flow.segments.items():
            stage = self._stages[number] = _Stage(missing=len(segment.inputs))
            if segment.backward:
                stage.gradients_missing = sum(bool(flow.routes[name].sources) for name in segment.outputs)
        self.forwards_left = len(flow.segments)
        self.backwards_left = flow.backwards if self.grad else 0

    @property
    def finished(self) -> bool:
        return self.forwards_left == 0 and self.backwards_left == 0

    def drop(self) -> None:
        """Forget everything: graphs and landed values die, their slots become free."""
        self._values.clear()
        self._parts.clear()
        for stage in self._stages.values():
            stage.outputs, stage.grads = {}, {}

    # -- forward

    def arrived(self, name: str, tensor: torch.Tensor | None, commands: int, shared: bool = False) -> None:
        """An activation is here; ``None`` for a trigger. ``shared``: its sender still reads it, see ``header.SHARED``."""
        self.commands = max(self.commands, commands)
        if shared:
            self._shared.add(name)
        if tensor is not None:
            self._values[name] = tensor
        for segment in self.flow.routes[name].users:
            stage = self._stages[segment.number]
            stage.missing -= 1
            if stage.missing == 0:
                self.ready(Task(self.commands, self, lambda segment=segment: self.forward(segment)))  # type: ignore[misc]

    def forward(self, segment: Segment) -> None:
        stage = self._stages[segment.number]
        with torch.set_grad_enabled(self.grad and segment.backward):
            env, landed = self._take_inputs(segment, stage)
            versions: list[tuple[str, torch.Tensor, int]] = []

            def produced(name: str, tensor: torch.Tensor) -> None:
                route = self.flow.routes.get(name)
                if route is not None and route.producer is segment:
                    stage.outputs[name] = tensor
                    versions.append((name, tensor, tensor._version))
                    if production is not None:
                        production.made(name, tensor)
                    self._emit(name, tensor, route)

            production = self.flow.production(segment, self.mode, torch.is_grad_enabled())
            if production is None:
                self.machine.run(segment.instructions, env, produced)
            else:
                try:
                    self.machine.run(segment.instructions, env, produced, production.around)
                finally:
                    production.finish()
        for name, tensor, version in [*versions, *landed]:
            if tensor._version != version:
                raise NotSupported(
                    f"{name} is written in place by {segment}, and used elsewhere too",
                    hint="use operations that make a new tensor there, for example ReLU(inplace=False)",
                )
        if not (self.grad and segment.backward):
            stage.outputs.clear()
        self.forwards_left -= 1

    def _take_inputs(
        self, segment: Segment, stage: _Stage
    ) -> tuple[dict[str, torch.Tensor], list[tuple[str, torch.Tensor, int]]]:
        env: dict[str, torch.Tensor] = {}
        watched = []
        for name in segment.inputs:
            value = self.flow.graph.values[name]
            if value.trigger:
                continue
            route = self.flow.routes[name]
            left = self._users_left[name] = self._users_left.get(name, len(route.users)) - 1
            tensor = self._values.pop(name) if left == 0 else self._values[name].detach()
            if route.producer is not None or len(route.users) > 1 or name in self._shared:
                watched.append((name, tensor, tensor._version))
            if torch.is_grad_enabled() and value.spec.requires_grad and tensor.is_floating_point() | tensor.is_complex():
                stage.undelivered.add(name)
                tensor = Arrive.apply(_ANCHOR, [tensor], self._deliverer(name, segment, stage))
            env[name] = tensor
        return env, watched

    def _emit(self, name: str, tensor: torch.Tensor, route: Route) -> None:
        flags = GRAD if self.grad else 0
        for outlet in route.sends:
            outlet.send(Header(0, self.sequence, flags, self.mode, self.commands), tensor)
        if route.users:
            self.arrived(name, tensor.detach(), self.commands)

    # -- backward

    def gradient(self, name: str, source: Source, grad: torch.Tensor | None, commands: int) -> None:
        """One contribution to the gradient of a value."""
        self.commands = max(self.commands, commands)
        route = self.flow.routes[name]
        parts = self._parts.setdefault(name, {})
        parts[source] = grad
        if len(parts) < len(route.sources):
            return
        del self._parts[name]
        total: torch.Tensor | None = None
        for key in route.sources:
            part = parts[key]
            if part is not None:
                total = part if total is None else total + part
        if route.producer is None:
            assert route.back is not None
            route.back.send(Header(0, self.sequence, 0, self.mode, self.commands), total)
            return
        segment = route.producer
        stage = self._stages[segment.number]
        stage.grads[name] = total
        stage.gradients_missing -= 1
        if stage.gradients_missing == 0:
            self.ready(Task(self.commands, self, lambda: self.backward(segment)))

    def backward(self, segment: Segment) -> None:
        stage = self._stages[segment.number]
        roots, grads = [], []
        for name, tensor in stage.outputs.items():
            grad = stage.grads.get(name)
            if grad is not None and tensor.requires_grad:
                roots.append(tensor)
                grads.append(grad)
        stage.outputs, stage.grads = {}, {}
        if roots:
            torch.autograd.backward(roots, grads)
            keep_apart(self.flow.unread, self.machine.parameters)
        for name in sorted(stage.undelivered):
            self.gradient(name, (segment.number, 0), None, self.commands)
        stage.undelivered.clear()
        self.backwards_left -= 1

    def _deliverer(self, name: str, segment: Segment, stage: _Stage) -> Callable[[torch.Tensor | None], None]:
        def deliver(grad: torch.Tensor | None) -> None:
            if name not in stage.undelivered:
                raise NotSupported(f"a second backward through {segment}", hint="retain_graph does not reach other workers")
            stage.undelivered.discard(name)
            self.gradient(name, (segment.number, 0), None if grad is None else grad.detach(), self.commands)

        return deliver
