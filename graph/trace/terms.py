"""How many terms an operation adds to the gradient of each tensor that it reads: so many of autograd's edges lead there.

A whole module may read its input, or a parameter, several times; autograd adds these terms up one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn

from .values import leaves_of

Terms = dict[fx.Node, Counter[int]]
"""Of each operation: terms by ``id`` of what it reads, a value in the capture or a parameter of the model."""

_Edge = tuple[Any, int]


class TermCount:
    """Counts while a graph runs on tensors without data. ``terms``: what was found; ``parameters``: path of each parameter that
    was read, by ``id``."""

    def __init__(self, model: nn.Module) -> None:
        self.terms: Terms = {}
        self.parameters: dict[int, str] = {}
        self._paths = {id(parameter): path for path, parameter in model.named_parameters()}
        self._kept: list[Any] = []

    def before(self, values: Iterable[Any]) -> dict[_Edge, int]:
        """What is read: autograd's edge of each tensor, and its ``id``. To be asked before the operation, which may write into
        them."""
        found: dict[_Edge, int] = {}
        for value in values:
            for leaf in leaves_of(value):
                if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                    found.setdefault((leaf.grad_fn, leaf.output_nr), id(leaf))
        return found

    def after(self, node: fx.Node, read: dict[_Edge, int], result: Any) -> None:
        """Walk from what the operation gave to what it read."""
        counts: Counter[int] = Counter()
        made = [leaf.grad_fn for leaf in leaves_of(result) if isinstance(leaf, torch.Tensor)]
        inner = {edge[0] for edge in read}
        left = [grad_fn for grad_fn in made if grad_fn is not None and grad_fn not in inner]
        seen = set(left)
        while left:
            for function, number in left.pop().next_functions:
                if function is None:
                    continue
                known = read.get((function, number))
                if known is not None:
                    counts[known] += 1
                elif hasattr(function, "variable"):
                    counts[self._leaf(function.variable)] += 1
                elif function not in seen and function not in inner:
                    seen.add(function)
                    left.append(function)
        self._kept.append(seen)  # an id, of autograd's nodes too, is good for as long as its object lives
        self.terms[node] = counts

    def _leaf(self, leaf: torch.Tensor) -> int:
        if id(leaf) in self._paths:
            self.parameters[id(leaf)] = self._paths[id(leaf)]
        return id(leaf)
