"""The ``.grad`` of watched leaves (``behind``), lent to the gradients of a context for a call of the engine.

Meanwhile ``.grad`` holds what the context has: the accumulator adds to it, hooks behind the accumulator see it, and DDP
averages it, before the call returns. Afterwards it is the context's, and ``.grad`` what it was. One context at a time has a
leaf; other threads must not use its ``.grad`` (a ``DistributedOptimizer`` waits). Of a DDP module, all parameters are lent: its
reducer writes to those that other workers' passes reached.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, Protocol

import torch

from ..base.streams import Joint, use_here
from ..transport.memory.sole import KEPT, references
from .behind import Node, Replica, divert, replicas
from .record import Sent


class Account(Protocol):
    """The context of a pass, as far as a pass needs it (``context.Context``)."""

    number: int
    sent: dict[int, Sent]
    """The tensors that left here, by the number of their message."""
    gradients: dict[torch.Tensor, torch.Tensor]
    joint: Joint
    lock: threading.Lock

    def check(self) -> None:
        """Raise ``RuntimeError`` if it has ended."""

    def accumulate(self, leaf: torch.Tensor, gradient: torch.Tensor, ours: bool = False) -> None:
        """Add to the gradient of a leaf; ``ours``: nothing else refers to ``gradient``."""


class _Leaf(NamedTuple):
    leaf: torch.Tensor
    own: torch.Tensor | None
    """What its ``.grad`` was."""
    views: bool
    """Gradients of it may be views of a bucket of DDP, which the next backward pass writes to."""


@contextmanager
def lending(context: Account, accumulators: Iterable[Node], more: Iterable[Replica] = ()) -> Iterator[set[int]]:
    """Lend the ``.grad`` of these leaves, and of all parameters of their DDP modules and of ``more``. The ids of the leaves."""
    nodes = list(accumulators)
    found = dict.fromkeys(more)
    for node in nodes:
        found.update(dict.fromkeys(replicas.of(node.variable)))
    for replica in found:
        replica.check()
    leaves = {id(node.variable): (node.variable, False) for node in nodes}
    for replica in found:
        views = bool(getattr(replica.module(), "gradient_as_bucket_view", False))
        leaves.update({id(each): (each, views) for each in replica.parameters()})
    with ExitStack() as stack:
        _lock(stack, [*(divert(node).lock for node in nodes), *(replica.lock for replica in found)])
        lent: list[_Leaf] = []
        try:
            for leaf, views in leaves.values():
                lent.append(_lend(context, leaf, views))
            yield set(leaves)
        finally:
            over = all(replica.finished() for replica in found if any(each.views for each in lent))
            for each in lent:
                _take_back(context, each, over)


def _lock(stack: ExitStack, locks: list[threading.Lock]) -> None:
    # In one order, whoever takes them.
    for lock in sorted({id(lock): lock for lock in locks}.items()):
        stack.enter_context(lock[1])


def _lend(context: Account, leaf: torch.Tensor, views: bool) -> _Leaf:
    own = leaf.grad
    if views and own is not None:
        own = own.clone()
    with context.lock:
        context.joint.enter()
        gradient = context.gradients.get(leaf)
        if gradient is not None and not views and references(gradient) > KEPT:
            gradient = gradient.clone()  # somebody looks at it: it will be written to
    use_here((gradient,))
    leaf.grad = gradient
    return _Leaf(leaf, own, views)


def _take_back(context: Account, lent: _Leaf, over: bool) -> None:
    leaf = lent.leaf
    gradient = leaf.grad
    leaf.grad = lent.own
    if gradient is not None and lent.views and over:
        gradient = gradient.clone()
    with context.lock:
        context.joint.enter()
        if gradient is None:
            context.gradients.pop(leaf, None)
        else:
            context.gradients[leaf] = gradient
        context.joint.leave()


@contextmanager
def undisturbed(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """For somebody else who uses their ``.grad``: nothing of DDP is lent meanwhile."""
    with ExitStack() as stack:
        _lock(stack, [replica.lock for each in parameters for replica in replicas.of(each)])
        yield
