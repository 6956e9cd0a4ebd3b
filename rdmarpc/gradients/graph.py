"""Looking at a local autograd graph: what a set of nodes reaches, and which sources reach a node."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .record import ANCHOR, RECEIVED, engaged

Node = Any  # torch.autograd.graph.Node; hashable, one object a node while somebody has it

ACCUMULATE: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
REENTRANT: Any = torch.utils.checkpoint.CheckpointFunction._backward_cls
_DIVERTED = "rdmarpc.diverted"
_diverting = threading.Lock()


def _following(node: Node) -> tuple[tuple[Node | None, int], ...]:
    """The nodes of this worker to which gradients flow from a node: none, for a node of received tensors."""
    return () if type(node) is RECEIVED else node.next_functions


def reach(starts: Iterable[Node], stop: Callable[[Node], bool] = lambda node: False) -> set[Node]:
    """``starts`` and all nodes to which gradients flow from there; not past nodes of received tensors, nor past nodes for which
    ``stop`` is true."""
    seen = set(starts)
    stack = list(seen)
    while stack:
        node = stack.pop()
        if stop(node):
            continue
        for following, _ in _following(node):
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return seen


def label(sources: list[list[Node]]) -> dict[Node, int]:
    """A bit mask for each node that a source reaches: bit i is set if source i reaches it."""
    order = _ordered([node for nodes in sources for node in nodes])
    labels = dict.fromkeys(order, 0)
    for bit, nodes in enumerate(sources):
        for node in nodes:
            labels[node] |= 1 << bit
    for node in order:
        for following, _ in _following(node):
            if following is not None:
                labels[following] |= labels[node]
    return labels


def _ordered(starts: list[Node]) -> list[Node]:
    """All nodes that ``starts`` reach, each before the nodes to which its gradients flow."""
    order: list[Node] = []
    seen: set[Node] = set()
    for start in starts:
        if start in seen:
            continue
        seen.add(start)
        stack = [(start, iter(_following(start)))]
        while stack:
            node, rest = stack[-1]
            for following, _ in rest:
                if following is not None and following not in seen:
                    seen.add(following)
                    stack.append((following, iter(_following(following))))
                    break
            else:
                order.append(node)
                stack.pop()
    order.reverse()
    return order


def divert(accumulator: Node) -> None:
    """Have what a pass brings to a leaf go to the pass, and nothing to ``.grad``: the leaf's hooks run before, and those behind
    its accumulator after. Other backward passes over the same leaf are not concerned."""
    marks = accumulator.metadata
    if _DIVERTED in marks:
        return
    with _diverting:
        if _DIVERTED not in marks:
            accumulator.register_prehook(partial(_diverted, accumulator.variable))
            marks[_DIVERTED] = True  # only now: a thread that finds the mark relies on the hook


def _diverted(leaf: torch.Tensor, gradients: tuple[torch.Tensor | None, ...]) -> tuple[None] | None:
    run = engaged.run
    if run is None:
        return None
    if gradients[0] is not None:
        run.accumulate(leaf, gradients[0])
    return (None,)


class Halted(Exception):
    """A call of the engine came to its halt."""


class _Halt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor) -> torch.Tensor:
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise Halted


BEHIND = get_gradient_edge(ANCHOR)
"""Behind every halt: the engine runs only what leads to something that it is asked for."""
NOTHING_MORE = torch.empty(0)
"""The gradient that a halt is given."""


def halting(number: int) -> GradientEdge:
    """A new node of that sequence number that raises ``Halted`` when the engine comes to it."""
    with torch.enable_grad():
        made = get_gradient_edge(_Halt.apply(ANCHOR))
    node: Node = made.node
    node._set_sequence_nr(number)
    return made


class _Quiet:
    """A hook of a leaf that keeps silent while a pass only collects, so that it sees the whole gradient once."""

    def __init__(self, leaf_id: int, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self._leaf_id, self._hook = leaf_id, hook

    def __call__(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        run = engaged.run
        if gradient is None or (run is not None and self._leaf_id in run.collected):
            return None
        return self._hook(gradient)


def quieten(leaf: torch.Tensor) -> None:
    """Make the hooks of a leaf ``_Quiet``. They stay so; removing one works as before, by its number."""
    hooks: Any = leaf._backward_hooks
    for number, hook in list(hooks.items()) if hooks else ():
        if type(hook) is not _Quiet:
            hooks[number] = _Quiet(id(leaf), hook)
