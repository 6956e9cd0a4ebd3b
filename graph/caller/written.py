"""Tensors that the program has, and whose memory parts at other workers may keep: what the program writes into them would not
reach the part. Versions are compared before the model is used; the workers are asked only if one was written."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ...transport import NotSupported
from ..edges.kept_memory import FORWARDS
from ..trace.writes import KEEP_A_COPY
from ..work.flow import may_keep
from .stage import Plan

_Watched = tuple[int, str, torch.Tensor, int]
"""Forward, name, ``_witness`` and version."""


class Written:
    """With the caller's lock held. ``keeps``: whether a part, by path, has code that may keep a tensor; ``ask``: of these
    forwards, which values are kept, by forward and name."""

    def __init__(self, keeps: Callable[[str], bool], ask: Callable[[list[int]], Iterable[tuple[int, str]]]) -> None:
        self._keeps, self._ask = keeps, ask
        self._names: weakref.WeakKeyDictionary[Plan, list[str]] = weakref.WeakKeyDictionary()
        self._watched: deque[list[_Watched]] = deque(maxlen=2 * FORWARDS)  # of a micro-batch twice

    def take(self, plan: Plan, sequence: int, values: Mapping[str, Any]) -> None:
        """After a forward: what the caller has of it, by name."""
        names = self._names.get(plan)
        if names is None:
            names = self._names[plan] = self._common(plan)
        tensors = [(name, value) for name in names if isinstance(value := values.get(name), torch.Tensor)]
        watched = [(sequence, name, _witness(value), value._version) for name, value in tensors if not value.is_inference()]
        if watched:
            self._watched.append(watched)

    def _common(self, plan: Plan) -> list[str]:
        """The values that the caller and a part with such code have."""
        graph, found = plan.graph, set[str]()
        for segment in graph.segments:
            if segment.worker != graph.caller and may_keep(segment, self._keeps):
                found.update(segment.inputs, segment.outputs)
        return sorted(found)

    def forget(self, sequence: int) -> None:
        """What is of later forwards."""
        earlier = [watched for watched in self._watched if watched and watched[0][0] <= sequence]
        self._watched.clear()
        self._watched.extend(earlier)

    def check(self) -> None:
        """Raise ``NotSupported`` if a tensor was written that a part keeps."""
        written = {
            (sequence, name)
            for watched in self._watched
            for sequence, name, witness, version in watched
            if witness._version != version
        }
        if not written:
            return
        kept = written.intersection(self._ask(sorted({sequence for sequence, _ in written})))
        if kept:
            _, name = min(kept)
            raise was_written(name)
        for watched in self._watched:
            watched[:] = [item for item in watched if item[:2] not in written]


def was_written(name: str) -> NotSupported:
    what = f"{name} was written in place, and a part at another worker keeps its memory: there it is as it was"
    return NotSupported(what, hint=KEEP_A_COPY)


def _witness(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor with the same version counter, and without the memory."""
    witness = tensor.detach()
    witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return witness
