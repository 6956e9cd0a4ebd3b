"""Which tensors of a captured forward have to have memory of their own, because the forward writes into them.

A part may give back what it was given in one step, and compute in another (layers that are dropped). A capture sees one of
both. Where it was a new tensor, a write into it had to be seen by nobody else; once it is the old one, it would be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..trace.values import leaves_of
from ..trace.writes import Write, storage_of
from .program import Instruction, names_in
from .readers import Readers

_EVER = 1 << 60


class Memory:
    def __init__(self, graph: fx.Graph, values: Mapping[fx.Node, Any], writes: Sequence[Write]) -> None:
        self._at = {node: at for at, node in enumerate(graph.nodes)}
        self._same: dict[int, int] = {}
        """The storage of what an augmented assignment gives here -> that which it writes into in one process."""
        self._read: dict[int, int] = {}
        """Where a storage is read last."""
        self._written: dict[int, list[int]] = {}
        for write in writes:
            self._written.setdefault(write.storage, []).append(self._at[write.node])
        for node in graph.nodes:
            target = node.args[0] if node.meta.get("augmented", False) else None
            if isinstance(target, fx.Node) and isinstance(values.get(target), torch.Tensor):
                storage = self._one(storage_of(values[target]))
                self._written.setdefault(storage, []).append(self._at[node])
                self._same[storage_of(values[node])] = storage
        for node in graph.nodes if self._written else ():
            ever = node.op in ("placeholder", "get_attr")  # who calls the model has it
            last = _EVER if ever else max((self._at[user] for user in node.users), default=-1)
            for leaf in leaves_of(values.get(node)):
                if isinstance(leaf, torch.Tensor):
                    storage = self._one(storage_of(leaf))
                    self._read[storage] = max(last, self._read.get(storage, -1))

    def tell_apart(self, node: fx.Node, step: Instruction, tensors: Mapping[str, torch.Tensor], readers: Readers) -> None:
        """Fill in the pairs of a call of a module. ``tensors``: all values, by name."""
        given = [name for name in dict.fromkeys(names_in((step.args, step.kwargs))) if name in tensors]
        pairs = [(one, name) for one in given for name in step.results if name is not None and name in tensors]
        identical = [pair for pair in pairs if tensors[pair[0]] is tensors[pair[1]]]
        step.same = tuple(identical) if node.meta.get("same") else ()
        step.own = tuple([pair for pair in pairs if pair not in identical]) if node.meta.get("own") else ()
        summed = [pair for pair in pairs if readers.mixed(*pair, self._at[node])]
        step.summed = tuple([(*pair, pair in identical) for pair in summed])
        step.unshared = tuple([pair for pair in pairs if self._needed(node, *(storage_of(tensors[name]) for name in pair))])

    def _needed(self, node: fx.Node, one: int, other: int) -> bool:
        """Whether after an operation one of two storages is written, and the other read later."""
        pair = self._one(one), self._one(other)
        return pair[0] != pair[1] and any(
            self._at[node] < at < self._read.get(reader, -1)
            for written, reader in (pair, pair[::-1])
            for at in self._written.get(written, ())
        )

    def _one(self, storage: int) -> int:
        return self._same.get(storage, storage)
