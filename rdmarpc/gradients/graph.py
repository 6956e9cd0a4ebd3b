"""The local autograd graph: where tensors leave in messages and come in, what a set of nodes reaches, and where the engine
halts.

A message that takes tensors along which require grad has a number, drawn by its sender. There it is a ``Sent``: the gradient
edges of these tensors. At the receiver it is a node of the local graph, ``ReceivedBackward``, whose outputs are the tensors
that came; what the engine brings to it belongs to the sender. Both ends list the tensors in one order, as they stand in the
message, each object once. Those that travel in parts (sparse ones, subclasses) have a number and a node of their own: they are
made when the message is unpickled, and that may compute with the dense ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..base import here

Node = Any  # torch.autograd.graph.Node; hashable, one object a node while somebody has it

REENTRANT: Any = torch.utils.checkpoint.CheckpointFunction._backward_cls
_PARAMETER = torch.nn.Parameter
_CONTAINERS = (tuple, list, dict)


class Sent(NamedTuple):
    """Tensors that left for worker number ``to``: where gradients of them come in, a leaf itself or a gradient edge."""

    to: int
    targets: list[torch.Tensor | GradientEdge]


class Source(NamedTuple):
    """The origin of received tensors, to which their gradients go: the context, the sender's number, and the number of its
    message."""

    context: int
    worker: int
    message: int


class _Engaged(threading.local):
    run: Any = None
    """A ``local.Pass``."""


engaged = _Engaged()
"""The pass whose nodes the engine runs on this thread."""


class Received(torch.autograd.Function):
    """The node of the tensors of one message. They are outputs in their own right, nobody's views: in-place operations work."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensors: list[torch.Tensor], source: Source) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.source = source
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        if engaged.run is None:
            raise RuntimeError(
                "a tensor that came from another worker takes part: use rdmarpc.autograd.backward(context_id, roots)"
            )
        for gradient in gradients:
            if gradient is not None and gradient.layout is torch.jagged:
                gradients = tuple(map(_flat, gradients))
                break
        engaged.run.emit(ctx.source, gradients)
        return None, None, None


RECEIVED: Any = Received._backward_cls
"""The type of its nodes."""
# The engine calls ``apply`` of a node, which looks up and checks what ``backward`` is here: of a class there is but one.
RECEIVED.apply = Received.backward
RECEIVED.name = lambda node: "torch::distributed::autograd::RecvRpcBackward"

# Without the Python layer of ``Function.apply``, which looks for transforms of functorch.
received = super(torch.autograd.Function, Received).apply
"""``received(ANCHOR, tensors, source)`` makes outputs of a new node of tensors, leaves so far."""

ANCHOR = torch.empty(0, device="cpu", requires_grad=True)
"""A node of a Python function needs some input that requires grad."""


def sent(to: int, tensors: Iterable[torch.Tensor]) -> Sent | None:
    """The record of a message's tensors that require grad; ``None`` if there are none, or under ``no_grad``."""
    targets: dict[int, torch.Tensor | GradientEdge] = {}
    for tensor in tensors if torch.is_grad_enabled() else ():
        if tensor.requires_grad and id(tensor) not in targets:
            flat = _flat(tensor) if tensor.layout is torch.jagged else tensor
            targets[id(tensor)] = flat if flat.grad_fn is None else edge(flat)
    return Sent(to, list(targets.values())) if targets else None


def _flat(tensor: Any) -> Any:
    """In place of a jagged tensor its values, as which its gradient travels: its sizes are known only where it was made."""
    return tensor.values() if tensor is not None and tensor.layout is torch.jagged else tensor


def edge(tensor: torch.Tensor) -> GradientEdge:
    """The edge into which gradients of a tensor that requires grad flow. The edge keeps its node alive. A reference to a node
    of a Python function does not: the engine's half of the node dies with the last tensor or node behind it."""
    node = tensor.grad_fn
    if node is not None and not isinstance(node, BackwardCFunction):
        return GradientEdge(node, tensor.output_nr)
    if tensor.layout is torch.strided:
        return get_gradient_edge(tensor)
    # That takes a view, which sparse tensors do not have.
    over: Any = tensor.clone().grad_fn
    node, output = over.next_functions[0]
    return GradientEdge(node, output, over)


def unbound(value: Any) -> Any:
    """All that a message carries, with plain tensors of the local graph in place of its parameters (itself, or in lists, tuples
    and dicts): a parameter that arrived would be a leaf of its own, where gradients end. Modules keep their parameters."""
    seen: set[int] = set()
    left = [value] if torch.is_grad_enabled() else []
    while left:
        item = left.pop()
        kind = type(item)
        if (kind is _PARAMETER or (kind in here.remote_classes and hasattr(item, "_is_param"))) and item.requires_grad:
            return _unbound(value, {})
        if kind in _CONTAINERS and id(item) not in seen:  # a list may hold itself
            seen.add(id(item))
            left.extend(item.values() if kind is dict else item)
    return value


def _unbound(value: Any, made: dict[int, Any]) -> Any:
    """``made``: what was made of its parts so far, by their ids, so that what occurs twice in it arrives as one object."""
    kind = type(value)
    parameter = kind is _PARAMETER or (kind in here.remote_classes and hasattr(value, "_is_param"))
    if parameter and value.requires_grad and id(value) not in made:
        made[id(value)] = value.view_as(value)
    if kind not in _CONTAINERS or id(value) in made:
        return made.get(id(value), value)
    copy: Any = value
    if kind is tuple:
        copy = tuple([_unbound(item, made) for item in value])
    elif kind is list:
        copy = made[id(value)] = []
        copy.extend([_unbound(item, made) for item in value])
    else:
        copy = made[id(value)] = {}
        copy.update({key: _unbound(item, made) for key, item in value.items()})
    if kind is tuple and id(value) in made:  # it holds a list that holds it
        return made[id(value)]
    old, new = (value.values(), copy.values()) if kind is dict else (value, copy)
    made[id(value)] = value if all(one is other for one, other in zip(old, new)) else copy
    return made[id(value)]


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
    stack = [(start, False) for start in starts]
    while stack:
        node, over = stack.pop()  # over: all that it reaches is in the order
        if over:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(each, False) for each, _ in _following(node) if each is not None and each not in seen]
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
