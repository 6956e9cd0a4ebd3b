"""Models that nobody has chosen: of what a rule proposes, the first that runs in one process."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .compare import BROKEN, Row, built, rows_of
from .entry import Batch, Entry, total

LARGE = 1 << 24
"""Parameters that are too many."""
MODELS: dict[str, Any] = {"places": ("thirds", "all"), "kind": torch.optim.SGD, "steps": 2}

Proposal = tuple[Callable[[], nn.Module], Callable[[int], Batch]]


@dataclass(frozen=True)
class Tried:
    """``proposals`` to make a model, with what it reads then. It has no rows where none of them runs, or where one process
    differs from itself."""

    proposals: Callable[[], Iterator[Proposal]]

    def rows(self, family: str, name: str) -> list[Row]:
        entry = self.entry()
        return [] if entry is None else [row for row in rows_of(family, name, entry) if row.outcome != BROKEN]

    def entry(self) -> Entry | None:
        for make, batch in self.proposals():
            entry = Entry(lambda make=make: with_parameters(make()), batch, **MODELS)  # type: ignore[misc]
            try:
                if numel(make) > LARGE:
                    continue
                net = built(entry)
                net = copy.deepcopy(net)
                _run(net, batch).backward()
            except Exception:  # theirs, who have many for sizes that do not fit
                continue
            try:
                with torch.no_grad():
                    _run(net.eval(), batch)
            except Exception:
                return dataclasses.replace(entry, evaluated=False)
            return entry
        return None


def numel(make: Callable[[], nn.Module]) -> int:
    """Parameters; 0 where only making it would tell."""
    try:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in make().parameters())
    except Exception:
        return 0


def _run(net: nn.Module, batch: Callable[[int], Batch]) -> torch.Tensor:
    torch.manual_seed(100)
    args, kwargs = batch(0)
    return total(net(*args, **kwargs))


class Scaled(nn.Module):
    """A module without parameters, behind one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.tensor(1.25))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        floats = lambda x: x * self.scale if isinstance(x, torch.Tensor) and x.is_floating_point() else x  # noqa: E731
        args, kwargs = pytree.tree_map(floats, (args, kwargs))
        return self.inner(*args, **kwargs)


def with_parameters(net: nn.Module) -> nn.Module:
    return net if any(parameter.requires_grad for parameter in net.parameters()) else Scaled(net)
