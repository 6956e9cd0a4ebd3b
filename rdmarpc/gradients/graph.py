"""Looking at a local autograd graph: what a set of nodes reaches, and which sources reach a node."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .behind import Node
from .record import ANCHOR, RECEIVED, engaged

REENTRANT: Any = torch.utils.checkpoint.CheckpointFunction._backward_cls


def _following(node: Node) -> tuple[tuple[Node | None, int], ...]:
    """The nodes of this worker to which gradients flow from a node: none, for a node of received tensors."""
    return () if type(node) is RECEIVED else node.next_functions


def reach(starts: Iterable[Node], stop: Container[Node] = ()) -> set[Node]:
    """``starts`` and all nodes to which gradients flow from there; not past nodes of received tensors, nor past those in
    ``stop``."""
    seen = set(starts)
    stack = list(seen)
    while stack:
        node = stack.pop()
        if node in stop or type(node) is RECEIVED:
            continue
        for following, _ in node.next_functions:
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
NOTHING_MORE = torch.empty(0, device="cpu")
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
