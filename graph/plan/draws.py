"""Which segments draw random numbers, noted while a forward is cut."""

from __future__ import annotations

from torch import fx

from ..trace.sites import place_of


class Draws:
    """``elsewhere``: what draws at other workers than the caller."""

    def __init__(self, caller: str) -> None:
        self.elsewhere: dict[str, None] = {}
        self._caller = caller
        self._levels: dict[str, set[int]] = {}

    def level(self, node: fx.Node, worker: str, level: int) -> int:
        """The level of an operation that draws, which needs at least this one. At the caller numbers are drawn in the order of
        the forward, as in one process."""
        levels = self._levels.setdefault(worker, set())
        if worker == self._caller:
            level = max([level, *levels])
        else:
            self.elsewhere[place_of(node)] = None
        levels.add(level)
        return level

    def segments(self) -> dict[str, int]:
        """How many draw, by worker."""
        return {worker: len(levels) for worker, levels in self._levels.items()}
