"""What was posted, in order, as plain data: operations, and copies from one place to another.

A *storage* is memory that tensors lie over. Its number is its name at the worker where it lies; memory of the process that
posts has a negative number. A copy of a storage at another place is another storage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FORWARD, BACKWARD, STEP = "forward", "backward", "step"
"""Phases. A step is an optimizer's, with all that runs without grad between a backward and the next forward."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor over a storage. Strides and offset in elements."""

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Operation:
    """An operator that ran at a place. ``written``: positions of the operands that it writes. ``results`` over storages of no
    operand are new. ``path``: the module in which it (of a backward: its forward) ran; "" where nobody knows."""

    place: str
    name: str
    operands: tuple[Operand, ...]
    written: tuple[int, ...]
    results: tuple[Operand, ...]
    phase: str
    path: str = ""

    @property
    def short(self) -> str:
        """Without namespace and overload: ``addmm``."""
        return self.name.partition("::")[2].partition(".")[0] or self.name

    def __str__(self) -> str:
        where = f"{self.path}: {self.short}" if self.path else f"{self.short}()"
        return f"backward of {where}" if self.phase == BACKWARD else where


@dataclass(frozen=True, slots=True)
class Move:
    """A copy of ``operand`` from place to place, which is storage ``made`` there. ``nbytes`` have crossed. ``name``: what the
    tensor is called, where that is known; of a gradient: what it is the gradient of. ``maker``: the operation that made it, if
    it is none that was recorded."""

    source: str
    target: str
    operand: Operand
    made: int
    nbytes: int
    phase: str
    name: str = ""
    maker: str = ""


Event = Operation | Move


@dataclass(frozen=True, slots=True)
class Recorded:
    """What one thread posted. ``sizes``: bytes of each storage. ``kinds``: of storages whose making was not recorded (those of
    no kind are inputs). ``here``: the place of the process that posted."""

    here: str
    events: tuple[Event, ...]
    sizes: Mapping[int, int] = field(default_factory=dict)
    kinds: Mapping[int, str] = field(default_factory=dict)
