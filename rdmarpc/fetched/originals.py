"""What parts of a wrapped model were copied from: it stays with the caller as it was, and the model's forward is not to use it.

A forward reaches it by other ways than the model's modules: a global, a variable of a closure, an object of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..graph.trace.values import leaves_of
from ..graph.trace.watch import Beyond
from ..parts.parameter import RemoteParameter
from ..transport import NotSupported

_HINT = "look it up in the forward, by the names of the model's modules: self.part"


class Originals:
    """``parts``: modules and tensors that have moved, by worker and path. They must be kept as long as this is."""

    def __init__(self, parts: Mapping[str, Mapping[str, Any]]) -> None:
        self._names: dict[tuple[int, int], str] = {}
        self._paths: dict[tuple[int, int], tuple[str, str]] = {}
        for worker, found in parts.items():
            for path, part in found.items():
                inside = [*part.named_parameters(), *part.named_buffers()] if isinstance(part, nn.Module) else [("", part)]
                for name, tensor in inside:
                    if at := _memory(tensor):
                        self._paths.setdefault(at, (f"{path}.{name}".rstrip("."), worker))

    def joined(self, net: nn.Module) -> str:
        """From now on this counts as open, for models to come. Says which tensor of ``net`` another open model has, too, if one
        of the two has moved it: each of them trains one of its own then."""
        tensors = (*net.named_parameters(), *net.named_buffers())
        self._names = {at: name for name, tensor in tensors if (at := _memory(tensor))}
        both = [(other, at) for other in _open for at in self._names.keys() & other._names.keys()]
        _open.add(self)
        for other, at in both:
            worker = self._paths.get(at, other._paths.get(at, ("", "")))[1]
            if worker:
                return (
                    f"{other._names[at]!r} of another wrapped model is {self._names[at]!r} of this one, and has moved to "
                    f"{worker!r} with one of them: they are two tensors from now on. Wrap one module that has both, or close "
                    "the other model"
                )
        return ""

    def close(self) -> None:
        _open.discard(self)

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise ``Beyond`` if one of these is such a tensor."""
        for tensor in tensors:
            path, worker = self._paths.get(_memory(tensor) or (0, 0), ("", ""))
            if path:
                raise Beyond(
                    f"the forward reaches {path!r}, which lives on worker {worker!r}, by another way than the model's modules "
                    "(a global, a variable of a closure, an object): what that has is the copy from before wrap()",
                    peer=worker,
                    hint=_HINT,
                )

    def check_graph(self, result: Any, given: Any) -> None:
        """``check`` for what gradients of a forward's result would come to, but through what it was given; none come to what
        stands for a parameter."""
        if not torch.is_grad_enabled():
            return
        nodes, left = set(_functions(given)), _functions(result)
        while left:
            node = left.pop()
            if node is None or node in nodes:
                continue
            nodes.add(node)
            variable = getattr(node, "variable", None)
            if isinstance(variable, RemoteParameter):
                raise NotSupported(
                    f"parameter {variable.path!r} lives on worker {variable.worker!r}: the forward gives it to an autograd "
                    "function, whose gradient would not reach it",
                    peer=variable.worker,
                    hint="place a module that calls the function itself, as one part",
                )
            if isinstance(variable, torch.Tensor):
                self.check([variable])
            left += [below for below, _ in node.next_functions]


_open: weakref.WeakSet[Originals] = weakref.WeakSet()


def _functions(tree: Any) -> list[Any]:
    """Those that have made the tensors in it."""
    try:
        leaves = leaves_of(tree)
    except NotSupported:  # of a forward that runs here, and gives whatever it likes
        leaves = pytree.tree_leaves(tree)
    return [leaf.grad_fn for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]


def _memory(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Where it lies, if it has memory of its own."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout is not torch.strided or tensor.numel() == 0:
            return None
        try:
            return tensor.untyped_storage()._cdata, int(tensor.storage_offset())
        except NotImplementedError:  # of one that stands for another: within torch.func
            return None
