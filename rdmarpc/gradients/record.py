"""A message's part in a backward pass: the tensors that left with a gradient edge, and those that came with one.

A message that takes tensors along which require grad has a number, drawn by its sender. There it is a ``Sent``: the gradient
edges of these tensors. At the receiver it is a node of the local graph, ``ReceivedBackward``, whose outputs are the tensors
that came; what the engine brings to it belongs to the sender. Both ends list the tensors in one order: the dense ones as they
stand in the message, each object once, then those that travel in parts (sparse ones, subclasses).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

_PARAMETER = torch.nn.Parameter


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


class Running(Protocol):
    """A pass, as the nodes that the engine runs for it know it (``local.Pass``)."""

    @property
    def collected(self) -> set[int]:
        """Leaves (by id) whose gradients are being held."""
        ...

    @property
    def lent(self) -> set[int]:
        """Leaves (by id) whose ``.grad`` holds the context's gradient for now."""
        ...

    def emit(self, source: Source, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Gradients of received tensors."""

    def accumulate(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        """A gradient of a leaf."""


class _Engaged(threading.local):
    run: Running | None = None


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

ANCHOR = torch.empty(0, requires_grad=True)
"""A node of a Python function needs some input that requires grad."""


def flagged(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that require grad, each once."""
    return list({id(tensor): tensor for tensor in tensors if tensor.requires_grad}.values())


def sent(to: int, tensors: Iterable[torch.Tensor]) -> Sent | None:
    """The record of a message's tensors that require grad; ``None`` if there are none, or under ``no_grad``."""
    leaving = flagged(tensors)
    if not leaving or not torch.is_grad_enabled():
        return None
    return Sent(to, [tensor if tensor.grad_fn is None else edge(tensor) for tensor in leaving])


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


def unbound(value: Any, views: dict[int, torch.Tensor]) -> Any:
    """``value`` with plain tensors of the local graph in place of its parameters (itself, or in lists, tuples and dicts): a
    parameter that arrived would be a leaf of its own, where gradients end. Modules keep their parameters. ``views``: the
    tensors made so far, by id of the parameter, so that a parameter that occurs twice in a message arrives as one tensor."""
    kind = type(value)
    if kind is _PARAMETER:
        if not value.requires_grad or not torch.is_grad_enabled():
            return value
        view = views.get(id(value))
        if view is None:
            view = views[id(value)] = value.view_as(value)
        return view
    if kind is tuple or kind is list:
        made = [unbound(item, views) for item in value]
        return value if all(new is old for new, old in zip(made, value)) else kind(made)
    if kind is dict:
        changed = {key: unbound(item, views) for key, item in value.items()}
        return value if all(changed[key] is item for key, item in value.items()) else changed
    return value
