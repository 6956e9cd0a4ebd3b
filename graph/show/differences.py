"""What a wrapped model does not do as one process would: each is named once, in a warning, and counted."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from ..plan.graph import TransferGraph

_log = logging.getLogger("rdmarpc")
_SUMS = "gradients of %s are not summed in the order of one process: equal up to rounding"
_DRAWS = "%s: random numbers are drawn by another worker, not as in one process"
_FAST_PATHS = (
    "%s: attention whose modules are at several workers takes its general path, not the fast path that one process may take in "
    "eval: rounding and rows of padding may differ (torch.backends.mha.set_fastpath_enabled(False) has one process take it too)"
)


class Differences:
    """Of one model."""

    def __init__(self) -> None:
        self._sums: dict[str, None] = {}
        self._draws: dict[str, None] = {}
        self._fast_paths: dict[str, None] = {}
        self._in_turn = False

    def sums(self, names: Sequence[str]) -> None:
        """Tensors and parameters whose gradients are summed in another order."""
        _once(names, self._sums, _SUMS)

    def draws(self, names: Sequence[str]) -> None:
        """Parts and operations that draw random numbers elsewhere."""
        _once(names, self._draws, _DRAWS)

    def fast_paths(self, general: Mapping[str, bool], grads: bool) -> None:
        """See ``FastPaths.general``; ``grads``: whether the forward may need gradients."""
        _once([name for name, always in general.items() if always or not grads], self._fast_paths, _FAST_PATHS)

    def of(self, graph: TransferGraph) -> None:
        """Those that a new graph shows."""
        self.sums(graph.reordered)
        self.draws(graph.drawn)

    def in_turn(self, graph: TransferGraph) -> bool:
        """Whether its micro-batches must run one after another: several under way at once would draw each other's random
        numbers, or write into buffers in another order."""
        several = [worker for worker, segments in graph.draws.items() if segments > 1]
        why = f"{several[0]} draws random numbers before and after other workers' parts" if several else ""
        if graph.scattered:
            why = f"{graph.scattered} writes into a tensor of the model that is used before or after other workers' parts, too"
        if why and not self._in_turn:
            self._in_turn = True
            _log.warning("micro-batches run one after another: %s", why)
        return bool(why)

    def counts(self, elsewhere: Sequence[str]) -> dict[str, int]:
        """See ``WrappedModel.counters``; ``elsewhere``: parts that were seen to draw by their workers."""
        self.draws(elsewhere)
        return {
            "sums_reordered": len(self._sums),
            "draws_elsewhere": len(self._draws),
            "fast_paths_left": len(self._fast_paths),
        }


def _once(names: Sequence[str], told: dict[str, None], text: str) -> None:
    new = [name for name in dict.fromkeys(names) if name not in told]
    if new:
        told.update(dict.fromkeys(new))
        _log.warning(text, ", ".join(new))
