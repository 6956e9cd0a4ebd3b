"""What the zoo has of one model: how to make it small, what it reads, where its parts go, and what is expected of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a forward."""

Placed = str | Mapping[str, str]
"""A placement, or the name of a rule (``placed``)."""


def total(output: Any) -> torch.Tensor:
    """A loss that every floating tensor of a result takes part in; a model's own loss, where it gives one."""
    own = getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return torch.stack([leaf.float().pow(2).mean() for leaf in leaves]).sum()


@dataclass(frozen=True)
class Entry:
    """``make`` gives the model (the seed is set before), ``batch`` its arguments in step n, ``loss`` a scalar of its result.
    ``refused``: a part of the text by which ``wrap`` refuses it, if it does; anything else must be equal to one process.
    ``options`` go to ``wrap``, ``rate`` is the learning rate. ``evaluated``: whether it can be (detectors need compiled
    operators for that)."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any], torch.Tensor] = total
    places: tuple[Placed, ...] = ("half", "thirds")
    refused: str = ""
    served: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW
    rate: float = 1e-3
    evaluated: bool = True
    steps: int = 5


def images(channels: int = 3, size: int = 32, count: int = 2) -> Callable[[int], Batch]:
    return lambda n: ((torch.randn(count, channels, size, size),), {})


def vectors(*widths: int, count: int = 4) -> Callable[[int], Batch]:
    return lambda n: (tuple(torch.randn(count, width) for width in widths), {})


def tokens(length: int = 10, words: int = 40, count: int = 2) -> Callable[[int], Batch]:
    return lambda n: ((torch.randint(0, words, (count, length)),), {})


def placed(net: nn.Module, rule: Placed) -> dict[str, str]:
    """``half``: the second half of the model's parts at one worker. ``thirds``: every third part here, the others in turns at
    two workers. ``all``: the model at one worker."""
    if not isinstance(rule, str):
        return dict(rule)
    if rule == "all":
        return {"": "worker1"}
    parts = list(parts_of(net))
    if rule == "half":
        return dict.fromkeys(parts[(len(parts) + 1) // 2 :], "worker1")
    if rule == "thirds":
        return {path: f"worker{at % 3}" for at, path in enumerate(parts) if at % 3}
    raise ValueError(f"{rule!r} is no rule")


def parts_of(net: nn.Module, least: int = 5) -> Iterator[str]:
    """Paths of modules that have the parameters of a model, in its order: the largest is divided until there are enough."""
    found = {name: child for name, child in net.named_children() if any(True for _ in child.parameters())}
    while len(found) < least:
        largest = max(found, key=lambda path: sum(p.numel() for p in found[path].parameters()), default="")
        inner = {
            f"{largest}.{name}": child
            for name, child in (found[largest].named_children() if largest else ())
            if any(True for _ in child.parameters())
        }
        if not inner:
            break
        found = {
            path: module
            for old, kept in found.items()
            for path, module in (inner.items() if old == largest else ((old, kept),))
        }
    yield from found
