"""Which tensors that the caller has too lie in memory that a part keeps: in its parameters, buffers or attributes.

In one process what the program writes into such a tensor changes what the part keeps. Here it does not, so the caller asks when
one was written (``graph/caller/written``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..guards.content import held
from ..trace.writes import storage_of

FORWARDS = 32
"""So many are remembered, here and at the caller."""


class KeptMemory:
    """At a worker; on its executor's thread."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._of: OrderedDict[int, list[tuple[str, StorageWeakRef]]] = OrderedDict()

    def note(self, sequence: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """What came for a forward or was made in it, and the caller has. No memory is held."""
        strided = ((name, tensor) for name, tensor in tensors if tensor.layout is torch.strided)
        found = [(name, StorageWeakRef(tensor.untyped_storage())) for name, tensor in strided]
        self._of.setdefault(sequence, []).extend(found)
        if len(self._of) > FORWARDS:
            self._of.popitem(last=False)

    def kept(self, sequences: Iterable[int]) -> list[tuple[int, str]]:
        """Of these forwards: which of them are in the memory of something that a part has now."""
        own = self._own()
        return [
            (sequence, name)
            for sequence in sequences
            for name, storage in self._of.get(sequence, ())
            if not storage.expired() and storage.cdata in own
        ]

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Whether it is in such memory."""
        return storage_of(tensor) in self._own()

    def _own(self) -> set[int]:
        return set(map(storage_of, held(self._root)))
