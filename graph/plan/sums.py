"""The order in which gradients of one tensor add up, here and in one process.

Autograd runs the operations backwards in the opposite order of their forward. The gradient of a tensor is what the last reader
gives, plus what the one before it gives, and so on, one *term* after another; a whole module may give several. Floating-point
sums depend on that order, but ``a + b`` is ``b + a``.

Cut into segments, each worker first adds up what its own segments give, and the producer adds these sums, the last reader's
first. Where this is another order, the tensor is *carried*: the sum so far goes from the last segment that reads it to the one
before, which adds its terms to it, and at last to the producer. For this the segments must follow each other as the readers
do: a reader's level is then not below that of the readers before it, and above it at another worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

Where = tuple[str, int]
"""Worker and level of a segment."""

MANY = 2
"""Terms of a reader of whom it is not known how many it gives."""


@dataclass(slots=True)
class Read:
    """Operation number ``position`` of the forward gives ``terms`` terms, in the segment ``where``."""

    position: int
    where: Where
    terms: int


@dataclass(slots=True)
class Reads:
    """All of one tensor, in order. ``home``: the segment that makes it."""

    home: Where
    reads: list[Read] = field(default_factory=list)

    def after(self, worker: str) -> int:
        """The level that the next reader must have at least, at this worker."""
        return max((read.where[1] + (read.where[0] != worker) for read in self.reads), default=0)

    def terms(self, among: Iterable[Where]) -> dict[Where, list[int]]:
        """Number of each term in the order in which one process adds them, by segment, that which is added first first."""
        given, found, number = set(among), dict[Where, list[int]](), 0
        for read in reversed(self.reads):
            if read.where in given:
                found.setdefault(read.where, []).extend(range(number, number + read.terms))
                number += read.terms
        return found


def fold(items: Sequence[Any]) -> Any:
    """((first + second) + third) + ..., where an item is a term's number or such a sum. ``None``: no items."""
    total = None
    for item in items:
        if item is not None:
            total = item if total is None else (total, item)
    return total


def in_order(total: Any, count: int) -> bool:
    """Whether a sum is that of one process: of terms 0 to ``count`` - 1, each added to the sum of those before."""
    for last in reversed(range(1, count)):
        if not isinstance(total, tuple):
            return False
        one, other = total
        if one == last:
            total = other
        elif other == last:
            total = one
        else:
            return False
    return True


def apart(terms: dict[Where, list[int]], home: Where, inline: str) -> Any:
    """The sum where each worker adds up its own first. ``inline``: a worker whose segments autograd meets in one pass; empty:
    each segment goes backward by itself."""
    segments = sorted(terms, key=lambda where: terms[where][0])
    blocks: dict[Any, list[Any]] = {}
    for where in segments:
        if where != home:
            key = where[0] if where[0] != home[0] or inline == where[0] else where
            blocks.setdefault(key, []).append(terms[where])
    sums = {
        key: fold(sorted(chain(*found))) if key == inline else fold([fold(block) for block in found])
        for key, found in blocks.items()
    }
    own = sums.pop(inline, None) if inline == home[0] else None
    if own is not None:
        # Its later segments' terms are there before those of a stage, which come before those of its own.
        own_terms = sorted(chain(*blocks[inline]))
        return fold([*own_terms, fold([*sums.values()]), *terms.get(home, [])])
    return fold([fold([*sums.values()]), *terms.get(home, [])])


def carried(terms: dict[Where, list[int]], order: Sequence[Where]) -> Any:
    """The sum that goes through segments in this order."""
    return fold([term for where in order for term in terms.get(where, [])])


def exact(terms: dict[Where, list[int]], home: Where, caller: str) -> bool:
    """Whether each worker may add up its own terms first."""
    count = sum(map(len, terms.values()))
    return all(in_order(apart(terms, home, inline), count) for inline in ("", caller))
