"""The signature of a forward's inputs, which chooses its plan.

A *signature* is a *family* (everything about the inputs but their sizes) and the shapes. The first signature of a family gets a
plan with static edges. Other shapes run through the family's dynamic plan, which is set up at the first of them, and count as
misses. Shapes that come a second time get a static plan of their own, until the family has ``OWN_PLANS`` of these: so two
batch sizes soon cost nothing, and lengths that never repeat set up nothing after the first miss.

The dynamic plan of a family is traced with symbols for the dimensions that have varied so far (``graph/trace``); it is traced
again when another dimension does. Shapes that its conditions exclude, and families that cannot be traced so, run through a
plan in which every edge is dynamic.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..graph.caller.caller import Caller
from ..graph.caller.stage import Plan
from ..graph.plan.analyze import TransferGraph
from ..graph.trace.sizes import Shapes, Sizes
from ..transport import NotSupported, RdmaError

OWN_PLANS = 8
_TRACES = 4
_FAMILIES = 1024
_REMEMBERED = 4096
_NAMED = 256

Build = Callable[[Sizes], TransferGraph]
Varying = frozenset[tuple[int, int]]


class Miss(NamedTuple):
    """Forwards whose shapes had no plan of their own; ``what`` differed from the first call."""

    what: str
    times: int

    def __str__(self) -> str:
        return f"{self.what} ({self.times} times)"


@dataclass(slots=True)
class _Family:
    """``own``: plans ever made for single shapes. ``sizes``: of the dynamic plan, if there is one. ``dynamic``: whether there
    can be any."""

    first: Shapes
    names: list[str]
    own: int = 1
    dynamic: bool = True
    sizes: Sizes | None = None
    traces: int = 0
    seen: OrderedDict[Shapes, None] = field(default_factory=OrderedDict)
    holds: dict[Shapes, bool] = field(default_factory=dict)
    misses: dict[Shapes, int] = field(default_factory=dict)
    others: int = 0

    def count(self, shapes: Shapes) -> None:
        if shapes in self.misses or len(self.misses) < _NAMED:
            self.misses[shapes] = self.misses.get(shapes, 0) + 1
        else:
            self.others += 1
        if self.own < OWN_PLANS:
            self.seen[shapes] = None
            if len(self.seen) > _REMEMBERED:
                self.seen.popitem(last=False)
        else:
            self.seen.clear()

    def fits(self, shapes: Shapes) -> bool:
        """Whether these shapes may run through the plan that was traced with symbols."""
        if self.sizes is None:
            return False
        if shapes not in self.holds:
            if len(self.holds) >= _REMEMBERED:
                self.holds.clear()
            self.holds[shapes] = self.sizes.hold(shapes)
        return self.holds[shapes]


class Signatures:
    """The policy of one model. Thread-safe."""

    def __init__(self, caller: Caller) -> None:
        self.misses = 0
        """Forwards whose shapes had no plan of their own."""
        self._caller = caller
        self._families: OrderedDict[Hashable, _Family] = OrderedDict()
        self._lock = threading.Lock()

    def plan(
        self, family: Hashable, shapes: Shapes, build: Build, names: Callable[[], list[str]], recurring: bool = False
    ) -> Plan:
        """``build(sizes)`` traces the present inputs, ``names()`` are theirs. ``recurring``: these shapes will come again."""
        plan = self._caller.known((family, shapes))
        if plan is not None:
            return plan
        with self._lock:
            known = self._families.get(family)
            if known is None:
                plan = self._make(family, shapes, build, Sizes())
                self._families[family] = _Family(shapes, names())
                if len(self._families) > _FAMILIES:
                    self._families.popitem(last=False)
                return plan
            if shapes == known.first:
                return self._make(family, shapes, build, Sizes())
            if not known.dynamic:
                plan = self._make(family, shapes, build, Sizes())
                self._miss(known, shapes)
                return plan
            if known.own < OWN_PLANS and (recurring or shapes in known.seen):
                known.own += 1
                return self._make(family, shapes, build, Sizes())
            plan = self._shared(family, known, shapes, build)
            self._miss(known, shapes)
            return plan

    def _miss(self, known: _Family, shapes: Shapes) -> None:
        self.misses += 1
        known.count(shapes)

    def _shared(self, family: Hashable, known: _Family, shapes: Shapes, build: Build) -> Plan:
        """The dynamic plan; traced (again) if it has to be."""
        varying: Varying = known.sizes.varying if known.sizes is not None else frozenset()
        fits = known.fits(shapes)
        plan = self._caller.known((family, varying)) if fits else None
        if plan is not None:
            return plan
        wanted = varying if fits else varying | _changed(known.first, shapes)
        if fits or (known.traces < _TRACES and wanted != varying):
            graph = self._trace(known, wanted, shapes, build)
            if graph is not None:
                return self._caller.plan((family, wanted), lambda: graph)
        try:
            return self._make(family, None, build, Sizes(known=False))
        except Exception as error:  # the model's own, too: what it does before it fails is to be done
            if isinstance(error, RdmaError) and not isinstance(error, NotSupported):
                raise
            plan = self._make(family, shapes, build, Sizes())
            known.dynamic = False  # not before: it may have been these shapes that are wrong
            return plan

    @staticmethod
    def _trace(known: _Family, varying: Varying, shapes: Shapes, build: Build) -> TransferGraph | None:
        sizes = Sizes(varying)
        try:
            graph = build(sizes)
        except Exception:
            known.traces += 1
            return None  # of an example it may succeed; where that fails too, the error is the model's
        if not (sizes.hold(known.first) and sizes.hold(shapes)):
            known.traces = _TRACES
            return None  # what was traced holds for some sizes only: a loop over them, most often
        if known.sizes is None or varying != known.sizes.varying:
            known.traces += 1
        known.sizes = sizes
        known.holds.clear()
        return graph

    def _make(self, family: Hashable, shapes: Shapes | None, build: Build, sizes: Sizes) -> Plan:
        return self._caller.plan((family, shapes), lambda: build(sizes))

    def missed(self) -> list[Miss]:
        """What was missed, the most frequent first."""
        found: Counter[str] = Counter()
        with self._lock:
            for known in self._families.values():
                for shapes, count in known.misses.items():
                    changes = [
                        f"{name}: {_text(then)} -> {_text(now)}"
                        for name, now, then in zip(known.names, shapes, known.first)
                        if now != then
                    ]
                    found[", ".join(changes)] += count
                if known.others:
                    found["other shapes"] += known.others
        return [Miss(*item) for item in found.most_common()]


def _changed(first: Shapes, shapes: Shapes) -> Varying:
    return frozenset(
        (at, dim) for at, (now, then) in enumerate(zip(shapes, first)) for dim, (a, b) in enumerate(zip(now, then)) if a != b
    )


def _text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
