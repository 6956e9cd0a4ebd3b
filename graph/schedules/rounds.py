"""Stages that go round the workers: each owns several that do not follow one another, so the pipeline fills sooner.

After Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021), interleaved 1F1B: a worker takes
as many micro-batches as there are workers through its first stage, then through its second, and so on. There the order is a
table; here a table says how far forwards may run ahead of backwards, and what has arrived runs. So the order is theirs where
stages take equally long, and no worker waits for one task while it could run another.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..plan.analyze import TransferGraph
from ..plan.program import Segment


@dataclass(frozen=True, slots=True)
class Rounds:
    """``workers`` stages a round, ``count`` rounds. ``stages``: segment number -> stage number."""

    workers: int
    count: int
    stages: dict[int, int]

    def position(self, stage: int, index: int, total: int) -> int:
        """How many forwards of its worker come before that of micro-batch ``index`` (of ``total``) in that stage."""
        group, place = divmod(index, self.workers)
        size = min(self.workers, total - group * self.workers)
        return group * self.workers * self.count + stage // self.workers * size + place

    def ahead(self, stage: int) -> int:
        """How many forwards may be between forward and backward at the worker of that stage, all its stages together."""
        return (self.workers - stage % self.workers - 1) * 2 + (self.count - 1) * self.workers + 1


def rounds(graph: TransferGraph) -> Rounds | None:
    """How the stages of a plan go round; ``None``: they do not. A stage is a segment with modules or parameters that gradients
    come to. The caller's last segment, which has the loss, may be the last stage, or stand behind the stages."""
    returned = {
        value.producer
        for value in graph.values.values()
        if value.spec.requires_grad and any(graph.segments[number].backward for number in value.consumers)
    }
    computing = [
        segment
        for segment in graph.segments
        if segment.backward and any(s.kind in ("module", "attribute") for s in segment.instructions)
    ]
    stages = [segment for segment in computing if segment.number in returned]
    loss = [segment for segment in graph.segments if segment.worker == graph.caller][-1]
    with_loss = [*stages, loss] if loss in computing and loss not in stages else stages
    return _in_rounds(with_loss) or _in_rounds(stages)


def _in_rounds(stages: list[Segment]) -> Rounds | None:
    owners = [segment.worker for segment in stages]
    workers = len(set(owners))
    count = len(owners) // max(1, workers)
    if (
        workers < 2
        or count < 2
        or owners != owners[:workers] * count
        or len({segment.level for segment in stages}) < len(stages)
    ):
        return None
    return Rounds(workers, count, {segment.number: at for at, segment in enumerate(stages)})
