"""A backward in two halves: gradients of inputs, which other workers wait for, then those of parameters, which nobody waits
for.

After Qi et al., "Zero Bubble Pipeline Parallelism" (2023), where the halves are called B and W. Autograd computes of an
operation what it is asked for. So B asks for the way to the inputs, and keeps what comes to each operation on it that
parameters hang on; W runs these operations once more, from what was kept, each for its parameters alone.

The bits are those of the whole backward, because of what is required here (else there are no halves, and a reason):

1. An operation that runs twice is one of ``SPLIT``: what it computes for one argument does not depend on what else it is
   asked for.
2. Each parameter hangs on one such operation, so its gradient is one sum, of the same terms. Autograd adds terms in the order
   in which operations run, those of the forward's end first: also in a part of the graph. (``_ordered`` checks that a forward
   in one thread made it.)
3. Nothing that runs, or is added to, can tell that it runs at another time or twice: no hooks, no saved tensors that are
   computed again (checkpoints), no Python in the backward but functions that say that they consist of torch's operations
   (``generate_vmap_rule``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

SPLIT = frozenset(
    f"{name}Backward0"
    for name in (
        *("Addmm", "Mm", "Mv", "Bmm", "Baddbmm", "Convolution", "Add", "Sub", "Mul", "Div", "Cat", "Stack", "Where"),
        *("NativeLayerNorm", "NativeGroupNorm", "NativeBatchNorm", "PreluKernel"),
    )
)
"""Operations that compute the gradient of each argument by itself; ``test_halves`` compares each, on CPUs."""

MIXED = "a parameter that several operations read"
HOOKS = "hooks on its parameters"
RAN_HOOKS = "hooks that its forward sets"
SAVED = "saved tensors that are unpacked by Python (a checkpoint)"
THREADS = "a graph that several threads made"


def hooks_made() -> int:
    """How many hooks have been registered in this process."""
    return RemovableHandle.next_id


@dataclass(slots=True)
class Operation:
    """On the way to an input, or a root beside it, with parameters that hang on it. ``edges``: where gradients come to it;
    ``grads``: what came."""

    edges: list[GradientEdge]
    parameters: list[torch.Tensor]
    grads: list[torch.Tensor | None] = field(default_factory=list)


class Halves:
    """One backward from ``roots``, to be run once by ``inputs``, then once by ``parameters``. The graph is held until then."""

    def __init__(self, roots: list[Any], grads: list[Any], on_way: list[Operation], beside: list[Operation]) -> None:
        self._roots, self._grads, self._on_way, self._beside = roots, grads, on_way, beside

    def inputs(self, anchor: torch.Tensor) -> None:
        """Everything that leads to the anchor."""
        wanted: list[Any] = [anchor, *(edge for operation in self._on_way for edge in operation.edges)]
        _, *found = torch.autograd.grad(self._roots, wanted, self._grads, retain_graph=True, allow_unused=True)
        came = iter(found)
        for operation in self._on_way:
            operation.grads = [next(came) for _ in operation.edges]
        self._roots.clear()
        self._grads.clear()

    def parameters(self) -> None:
        """Everything else. Gradients are added to the parameters'."""
        operations = [*self._beside, *self._on_way]
        fresh = [p for operation in operations for p in operation.parameters if p.grad is None]
        kept = {_memory(grad) for operation in operations for grad in operation.grads if grad is not None} - {0}
        for operation in operations:
            came = [(edge, grad) for edge, grad in zip(operation.edges, operation.grads) if grad is not None]
            if came:
                torch.autograd.backward([e for e, _ in came], [g for _, g in came], inputs=operation.parameters)
        for parameter in fresh:
            # What was kept may be used elsewhere too; a parameter's gradient is added to in place.
            if parameter.grad is not None and _memory(parameter.grad) in kept:
                parameter.grad = parameter.grad.clone()


def _memory(tensor: torch.Tensor) -> int:
    """Where its storage lies; 0: it has none of its own (it is sparse)."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


class Later(Halves):
    """No input takes a gradient: all of the backward is the second half."""

    def inputs(self, anchor: torch.Tensor) -> None:
        pass

    def parameters(self) -> None:
        torch.autograd.backward(self._roots, self._grads)


def halves(roots: list[Any], grads: list[Any], anchor: torch.Tensor) -> Halves | str:
    """The backward from ``roots`` (tensors, gradient edges), or why it has to run in one go; empty: there are no parameters.
    All inputs hang on ``anchor``."""
    starts = [root if isinstance(root, GradientEdge) else get_gradient_edge(root) for root in roots]
    graph = _Graph(starts, get_gradient_edge(anchor).node)
    grads = [torch.ones_like(root) if grad is None else grad for root, grad in zip(roots, grads)]
    if not graph.leads:
        return graph.why_not() or graph.why_not_later() or Later(roots, grads, [], [])
    graph.look_below()
    beside = [
        Operation([edge], parameters, [grad])
        for edge, grad in zip(starts, grads)
        if edge.node not in graph.leads and (parameters := graph.parameters([edge.node]))
    ]
    on_way = [
        Operation([GradientEdge(node, number) for number in sorted(graph.entered[node])], parameters)
        for node in reversed(graph.nodes)
        if node in graph.leads and (parameters := graph.parameters(graph.aside(node)))
    ]
    if not on_way and not beside:
        return ""
    return graph.why_not() or _why_whole(on_way, beside) or Halves(roots, grads, on_way, beside)


def _why_whole(on_way: list[Operation], beside: list[Operation]) -> str:
    parameters: list[Any] = [parameter for operation in (*beside, *on_way) for parameter in operation.parameters]
    if len(parameters) > len({id(parameter) for parameter in parameters}):
        return MIXED
    if _hooked(parameters):
        return HOOKS
    for operation in on_way:
        node = operation.edges[0].node
        if node.name() not in SPLIT:
            return f"{node.name()}, which has not been tried in halves"
        if _unpacks(node):
            return SAVED
    return ""


def _hooked(parameters: Iterable[Any]) -> bool:
    return any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in parameters)


def _unpacks(node: Any) -> bool:
    """Whether Python unpacks what an operation has saved."""
    return any(getattr(saved, "unpack_hook", SAVED) is not None for saved in _saved(node))


class _Graph:
    """What a backward runs. ``nodes``: in the order in which the forward made them, without leaves; ``leads``: those on a way
    to the anchor; ``entered``: by which of its edges each is reached."""

    def __init__(self, starts: Iterable[GradientEdge], anchor: Any) -> None:
        self.entered: dict[Any, set[int]] = {}
        for edge in starts:
            self.entered.setdefault(edge.node, set()).add(edge.output_nr)
        self._next: dict[Any, list[tuple[Any, int]]] = {}
        stack = list(self.entered)
        while stack:
            node = stack.pop()
            if node in self._next:
                continue
            self._next[node] = edges = [edge for edge in node.next_functions if edge[0] is not None]
            for target, number in edges:
                self.entered.setdefault(target, set()).add(number)
                stack.append(target)
        self._leaves = {node for node in self._next if node.name() == "torch::autograd::AccumulateGrad"}
        self._number = {node: node._sequence_nr() for node in self._next if node not in self._leaves}
        self.nodes = sorted(self._number, key=self._number.__getitem__)
        self._arrivals = {node for node in self.nodes if any(target is anchor for target, _ in self._next[node])}
        self.leads = set(self._arrivals)
        for node in self.nodes:
            if any(target in self.leads for target, _ in self._next[node]):
                self.leads.add(node)
        self._below: dict[Any, dict[Any, None]] = {leaf: {leaf: None} for leaf in self._leaves}

    def look_below(self) -> None:
        """Find the parameters that hang on what does not lead to the anchor; before ``parameters``."""
        for node in self.nodes:
            if node not in self.leads:
                self._below[node] = {leaf: None for target, _ in self._next[node] for leaf in self._below.get(target, ())}

    def aside(self, node: Any) -> Iterator[Any]:
        """What it leads to that is not on the way to an input."""
        return (target for target, _ in self._next[node] if target not in self.leads and node not in self._arrivals)

    def parameters(self, nodes: Iterable[Any]) -> list[torch.Tensor]:
        """Those that hang on any of these, which do not lead to the anchor."""
        return [leaf.variable for leaf in {leaf: None for node in nodes for leaf in self._below[node]}]

    def why_not(self) -> str:
        if not self._ordered():
            return THREADS
        return next((why for node in self.nodes if node not in self._arrivals and (why := _python_in(node))), "")

    def why_not_later(self) -> str:
        """Why all of it has to run when its turn is, in one go."""
        if _hooked(leaf.variable for leaf in self._leaves):
            return HOOKS
        return SAVED if any(map(_unpacks, self.nodes)) else ""

    def _ordered(self) -> bool:
        return all(
            target in self._leaves or self._number[target] < number
            for node, number in self._number.items()
            for target, _ in self._next[node]
        )


def _python_in(node: Any) -> str:
    """Why nobody can tell what the backward of an operation does; empty: it is one of torch's."""
    if isinstance(node, BackwardCFunction):
        function = type(node)._forward_cls  # type: ignore[attr-defined]
        return "" if function.generate_vmap_rule else f"{function.__name__}, whose backward may do anything"
    return f"{node.name()}, whose backward may do anything" if type(node).__name__ == "CppFunction" else ""


_FIELDS: dict[type, list[str]] = {}


def _saved(node: Any) -> Iterator[Any]:
    """What an operation has saved for its backward."""
    kind = type(node)
    if kind not in _FIELDS:
        _FIELDS[kind] = [name for name in dir(node) if name.startswith("_raw_saved_")]
    for name in _FIELDS[kind]:
        saved = getattr(node, name)
        yield from saved if isinstance(saved, (tuple, list)) else (saved,)
