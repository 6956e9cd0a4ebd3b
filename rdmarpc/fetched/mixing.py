"""Sums of gradients from several forwards, or calls of an eager one, where one backward goes through them all.

Owners add what each of them gives in all, as it comes; one process first adds everything that one backward gives. That is equal
up to rounding, and named.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..graph.caller.stage import Plan
from ..parts.parameter import RemoteParameter


class Mixing:
    """``top`` is the stand-in of the model. ``tell(names)`` is called with parameters whose gradients are such sums. Used by
    threads that go backward, one at a time."""

    def __init__(self, top: nn.Module) -> None:
        self.tell: Callable[[Sequence[str]], None] = lambda names: None
        self._top = top
        self._read: weakref.WeakKeyDictionary[Plan, dict[int, RemoteParameter]] = weakref.WeakKeyDictionary()
        self._latest: tuple[int, Plan] | None = None
        """The first that goes backward, in the backward of the program that autograd has this number for."""
        self._seen: set[int] = set()
        """Parameters of this and of those after it, once there is a second."""
        self._planned: dict[int, list[Plan]] = {}
        """What goes backward, by that number; no longer than that lasts. Since something has run here."""
        self.used = False
        self._given: tuple[int, set[int]] = (-1, set())
        """The last backward in which gradients came from here, and of what."""

    def planned(self, plan: Plan) -> None:
        """A captured forward, or call, goes backward."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return  # micro-batches: their order is that of one process, and no forward here is among them
        if self._latest is None or self._latest[0] != task:
            self._latest, self._seen = (task, plan), set()
        else:
            if not self._seen:
                self._seen |= self.reads(self._latest[1]).keys()
            reads = self.reads(plan)
            if again := self._seen & reads.keys():
                self.tell([reads[key].path for key in again if _trains(reads[key])])
            self._seen |= reads.keys()
        if self.used:
            self._beside(plan, task)

    def _beside(self, plan: Plan, task: int) -> None:
        number, given = self._given
        if number >= task:  # a later number is that of a backward within this one (``checkpoint(..., use_reentrant=True)``)
            self.tell([parameter.path for key, parameter in self.reads(plan).items() if key in given])
        if task not in self._planned:
            self._planned[task] = []
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._planned.pop(task, None))
        self._planned[task].append(plan)

    def given(self, parameter: RemoteParameter) -> None:
        """A gradient of a parameter comes from a forward here."""
        task = torch._C._current_graph_task_id()
        if self._given[0] != task:
            self._given = task, set()
        self._given[1].add(id(parameter))
        if any(id(parameter) in self.reads(plan) for plans in self._planned.values() for plan in plans):
            self.tell([parameter.path])

    def reads(self, plan: Plan) -> dict[int, RemoteParameter]:
        """The remote parameters of a plan, by ``id``."""
        if plan not in self._read:
            found: list[Any] = []
            for step in (step for segment in plan.graph.segments for step in segment.instructions):
                if step.kind == "module":
                    found += self._top.get_submodule(step.target).parameters()
                elif step.kind == "attribute":
                    at: Any = self._top
                    for name in step.target.split("."):
                        at = getattr(at, name, None)
                    found.append(at)
            self._read[plan] = {id(leaf): leaf for leaf in found if isinstance(leaf, RemoteParameter)}
        return self._read[plan]


def _trains(parameter: RemoteParameter) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.requires_grad
