"""Sums of gradients of a forward's inputs that the program reads elsewhere, too.

What workers give for an input comes as one sum, a *block*. One process adds its terms one by one to what later readers have
given. These bits are the same only where the block has one term, or is the first that comes. Nobody can see which other
readers a tensor has; but autograd adds in place, so what comes to the maker of the input is the block itself if that was
first. Where autograd does not add in place, an input may be named whose sum has the order of one process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.variable import Variable

Edge = tuple[Any, int]
"""Of autograd's graph: the node that a gradient goes to, and the number of its output."""


def follow(
    edge: Edge, block: torch.Tensor, reader: torch.Tensor | None, name: str, tell: Callable[[Sequence[str]], None]
) -> None:
    """In a backward that gives this block to this edge: tell the name if the block is not the first that comes there.
    ``reader``: the tensor of the edge, where this backward may end with its gradient (``torch.autograd.grad``)."""
    node, number = edge
    given = weakref.ref(block)

    def come(total: torch.Tensor | None) -> None:
        handle.remove()
        if total is not None and total is not given():
            tell([name])

    handle: Any
    if reader is not None and (reader.is_leaf or reader.grad_fn is node):
        handle = reader.register_hook(come)
    else:
        handle = node.register_prehook(lambda totals: come(totals[number]))
    engine: Any = Variable._execution_engine
    engine.queue_callback(handle.remove)
