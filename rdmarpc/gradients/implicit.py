"""Backward passes without a context: ``rref.to_here().sum().backward()``.

A tensor that was fetched outside of contexts is a leaf, as in torch, and a pass over it adds to its ``.grad`` here. The same
goes to the owner of the value: when torch's engine has done all of the pass here, each owner is called once, with the sum for
each of its values, and runs its own backward pass from them into ``.grad``. That may reach what the owner had fetched itself.
The pass here returns when all of them are over. Owners keep nothing for it: the leaf keeps the reference, and that the value
with its graph.

In a context such a leaf is a leaf like others, and its gradient is the context's.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.variable import Variable
from torch.utils.hooks import unserializable_hook

from ..transport import NotSupported
from .graph import engaged

_engine = Variable._execution_engine
Bring = Callable[[list[Any], bool, list[torch.Tensor]], None]
"""``(references, retain_graph, gradients)``: have their owners run backward; returns when they have."""


class _Batch:
    """What one call of the engine adds to fetched leaves."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.noted: dict[int, torch.Tensor | None] = {}
        """By the id of the hooks: the gradient, where it will be added to another one."""
        self.sums: dict[int, tuple[Fetched, torch.Tensor]] = {}
        """By the reference's number."""
        self.retain_graph: bool = torch._C._autograd._get_current_graph_task_keep_graph()
        _engine.queue_callback(self._leave)

    def add(self, hooks: Fetched, gradient: torch.Tensor) -> None:
        found = self.sums.get(hooks.number)
        self.sums[hooks.number] = (hooks, gradient if found is None else found[1] + gradient)

    def _leave(self) -> None:
        with _lock:
            _batches.pop(self.number, None)
        by_owner: dict[Bring, list[tuple[Any, torch.Tensor]]] = {}
        for hooks, gradient in self.sums.values():
            by_owner.setdefault(hooks.bring, []).append((hooks.reference, gradient))
        for bring, entries in by_owner.items():
            bring([reference for reference, _ in entries], self.retain_graph, [gradient for _, gradient in entries])


_lock = threading.Lock()
_batches: dict[int, _Batch] = {}
"""By the number of the engine's call."""


def _batch() -> _Batch:
    number = torch._C._current_graph_task_id()
    with _lock:
        found = _batches.get(number)
        if found is None:
            found = _batches[number] = _Batch(number)
    return found


class Fetched:
    """The hooks of a fetched leaf. ``reference`` is kept while the leaf lives."""

    def __init__(self, leaf: torch.Tensor, number: int, reference: Any, bring: Bring) -> None:
        self.number, self.reference, self.bring = number, reference, bring
        self._leaf = weakref.ref(leaf)
        leaf.register_hook(self.before)
        leaf.register_post_accumulate_grad_hook(self.behind)

    @unserializable_hook
    def before(self, gradient: torch.Tensor) -> None:
        """In front of ``.grad``, also for ``torch.autograd.grad``, which adds nothing to it."""
        leaf = self._leaf()
        if engaged.run is None and leaf is not None and leaf.grad is not None:
            _batch().noted[id(self)] = gradient

    def behind(self, leaf: torch.Tensor) -> None:
        """``.grad`` has it."""
        if engaged.run is not None:
            return
        if torch.is_grad_enabled():
            raise NotSupported(
                "create_graph=True through a tensor that was fetched by to_here() outside of a context",
                hint="torch.autograd.grad of a detached copy",
            )
        batch = _batch()
        gradient = batch.noted.pop(id(self), None)
        if gradient is None:
            gradient = leaf.grad
        elif len(leaf._backward_hooks or ()) > 1:
            raise NotSupported(
                "a tensor that was fetched by to_here() outside of a context has a hook, and a .grad already: what the hook "
                "made of the gradient cannot be told",
                hint="set its .grad to None before, or use a context (rdmarpc.autograd.context)",
            )
        assert gradient is not None  # it was just added
        batch.add(self, gradient)


def of_others(leaf: torch.Tensor) -> bool:
    """Whether a leaf has hooks by ``register_post_accumulate_grad_hook``, but for ours."""
    hooks: Any = leaf._post_accumulate_grad_hooks
    return bool(hooks) and any(not isinstance(getattr(hook, "__self__", None), Fetched) for hook in hooks.values())
