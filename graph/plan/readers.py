"""What reads each tensor and each parameter, noted while a forward is cut (see ``sums``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import fx

from ..trace.capture import Capture
from .program import names_in
from .sums import MANY, Read, Reads, Where

Key = str | int
"""A value by name, or a parameter by ``id``."""


class Readers:
    """``carried``: what the sum of gradients goes through from reader to reader. ``reads``: of each key, in order; ``known``:
    names of parameters that are values, by ``id``; ``position``: of the operation that is looked at."""

    def __init__(self, capture: Capture, carried: Set[Key]) -> None:
        self.carried = carried
        self.reads: dict[Key, Reads] = {}
        self.known: dict[int, str] = {}
        self.position = 0
        self._capture = capture
        self.names: dict[Any, list[str]] = {}
        """Of each tensor: several where an operation gives what it is given."""
        self._others: dict[str, list[str]] = {}
        """By name: all names of the same tensor."""
        self._fakes: dict[str, torch.Tensor] = {}

    def define(self, name: str, tensor: torch.Tensor, which: Any) -> None:
        """``tensor``: the value without data; ``which``: the same for all names of it."""
        self._fakes[name] = tensor
        self._others[name] = self.names.setdefault(which, [])
        self._others[name].append(name)

    def outputs(self, arguments: Any) -> dict[Key, int]:
        """As ``terms``, of the model's result: what is computed from that is not known."""
        return dict.fromkeys(self._tensors(arguments), MANY)

    def terms(self, node: fx.Node, args: Any, kwargs: Any) -> dict[Key, int]:
        """What an operation reads, and how many terms it gives to the gradient of that."""
        if not node.meta.get("grad", True):
            return {}
        names, counted = self._tensors((args, kwargs)), self._capture.terms.get(node)
        if counted is None:
            return dict.fromkeys(names, MANY)
        found: dict[Key, int] = {name: n for name in names if (n := counted[id(self._fakes[name])])}
        found.update((key, number) for key, number in counted.items() if key in self._capture.parameters)
        return found

    def note(self, terms: Mapping[Key, int], where: Where, home: Mapping[str, Where]) -> None:
        """An operation in the segment ``where`` reads that. ``home``: the segment that makes each value."""
        for what, count in terms.items():
            made = home[what] if isinstance(what, str) else (where[0], 0)
            self.reads.setdefault(what, Reads(made)).reads.append(Read(self.position, where, count))

    def levels(self, terms: Iterable[Key], worker: str) -> list[int]:
        """The levels that a reader must at least have at this worker, because of what is carried."""
        return [self.reads[what].after(worker) for what in terms if what in self.carried and what in self.reads]

    def mixed(self, given: str, result: str, position: int) -> bool:
        """Whether gradients of what an operation at ``position`` is given and of what it gives would add up in another order,
        if these were one tensor."""
        names, others = self._others[given], self._others[result]
        if names is others:
            names, others = [given], [result]
        reads, later = self._reads_of(names), self._reads_of(others)
        if not reads or not later:
            return False
        other = sum(read.terms for read in reads if read.position != position)
        return other > 0 and other + sum(read.terms for read in later) > 2

    def _reads_of(self, names: Iterable[str]) -> list[Read]:
        return [read for name in names if name in self.reads for read in self.reads[name].reads]

    def _tensors(self, arguments: Any) -> list[str]:
        """Names of the tensors among the arguments that gradients come to."""
        return [n for n in dict.fromkeys(names_in(arguments)) if n in self._fakes and self._fakes[n].requires_grad]
