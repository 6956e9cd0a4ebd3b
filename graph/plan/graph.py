"""The transfer graph: which tensors cross, how big are they, between whom, and how their gradients come back."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from ..trace.capture import TensorSpec
from ..trace.sites import Site
from .program import Segment


@dataclass(slots=True)
class Value:
    """A tensor that one segment makes and another one uses. ``trigger`` values carry nothing: they start a segment that has
    no tensor inputs. ``site``: who allocated its storage; where the producer's worker received that storage, it is the slot
    of the value ``slot_of``. ``device``: where its producer has it, ``landing`` where it lands, by worker; both ``named``, and
    without an entry it is the CPU."""

    name: str
    spec: TensorSpec
    producer: int
    consumers: list[int]
    trigger: bool = False
    written: bool = False
    """Whether somebody writes into it in place after it was made."""
    returned: bool = False
    """Whether it is, or is part of, the model's result: its user may write into it."""
    site: Site | None = None
    slot_of: str = ""
    device: str = ""
    landing: dict[str, str] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    """Segments that give a gradient of it, in the order in which they are added."""
    carried: bool = False
    """Whether each of them adds to the sum of those before (``sums``)."""
    several: bool = False
    """Whether what workers give to it, where it is an input, is a sum of several terms."""


@dataclass(slots=True)
class Shared:
    """A parameter that several segments of a worker read. ``path``: one of its names; ``order``: these segments, the last
    reader first."""

    worker: str
    path: str
    order: list[int]


@dataclass(slots=True)
class TransferGraph:
    """The answer to: which tensors cross, how big are they, between whom.

    ``inputs`` names the caller's tensors, ``output`` is the model's result with a ``Ref`` for every tensor. Segment numbers
    are positions in ``segments``, which is sorted by level.
    """

    caller: str
    segments: list[Segment]
    values: dict[str, Value]
    inputs: list[str]
    output: Any
    constants: dict[str, torch.Tensor]
    shared: list[Shared] = field(default_factory=list)
    reordered: list[str] = field(default_factory=list)
    """Tensors and parameters whose gradients are not summed in the order of one process."""
    drawn: list[str] = field(default_factory=list)
    """Parts and operations that draw random numbers at other workers than the caller."""
    draws: dict[str, int] = field(default_factory=dict)
    """How many segments draw random numbers, by worker. Where there are several, micro-batches must not overtake each other."""
    scattered: str = ""
    """What writes into a tensor of the model that other segments use, too; then they must not, either."""
    aliases: list[tuple[int, int, bool]] = field(default_factory=list)
    """See ``Capture``."""
    general: dict[str, bool] = field(default_factory=dict)
    """See ``FastPaths``."""
    part: str = ""
    """The path of the part that is called, where it is a single call."""

    def crossing(self) -> list[tuple[Value, str]]:
        """(value, worker that receives it), in the order of production."""
        result = []
        for value in self.values.values():
            home = self.segments[value.producer].worker
            away = dict.fromkeys(self.segments[number].worker for number in value.consumers)
            result += [(value, worker) for worker in away if worker != home]
        return result

    def returns_gradient(self, value: Value, worker: str) -> bool:
        """Whether that worker sends a gradient of the value."""
        return any(self.segments[number].worker == worker for number in value.order)

    def hops(self, value: Value) -> list[tuple[int, int]]:
        """The way of the gradient of a value that is carried, as pairs of segments."""
        way = [*value.order, value.producer]
        return list(pairwise(way))
