"""Experts at the workers themselves, reached by all-to-all of ``torch.distributed``: over our backend, and over gloo."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..harness.meeting import init_method
from ..harness.processes import Launcher
from .experts import Experts
from .mixture import measured

BACKENDS = {"rdmarpc_group": "rdmarpc", "gloo": "gloo"}


class AllToAll:
    """The way by all-to-all (``mixture.Way``): every rank owns as many experts as a server does elsewhere."""

    def __init__(self, rank: int, job: dict[str, Any]) -> None:
        self.owners, self._width, self._each = job["processes"], job["width"], job["experts"]
        first, count = rank * job["experts"], job["experts"]
        self._experts = Experts(first, count, job["width"], job["processes"], job["lr"], job["timeout_s"])
        self.at_servers_ms = self.communication_ms = 0.0
        self.bytes = self.tensors = 0
        self._mine: list[int] = []
        self._theirs: list[int] = []
        """Tokens to each rank and from each rank in this step."""

    def forward(self, tokens: list[Tensor], counts: list[list[int]]) -> list[Tensor]:
        self._count(tokens)
        begin = time.perf_counter()
        theirs = torch.empty(self.owners, self._each, dtype=torch.int64)
        dist.all_to_all_single(theirs, torch.tensor(counts))
        self.communication_ms += 1e3 * (time.perf_counter() - begin)
        all_counts = theirs.tolist()
        self._mine, self._theirs = [sum(each) for each in counts], [sum(each) for each in all_counts]
        parts = self._sent(tokens, self._mine, self._theirs)
        begin = time.perf_counter()
        found = [self._experts.forward(rank, part, each) for rank, (part, each) in enumerate(zip(parts, all_counts))]
        self.at_servers_ms += 1e3 * (time.perf_counter() - begin)
        return self._sent(found, self._theirs, self._mine)

    def backward(self, gradients: list[Tensor]) -> list[Tensor]:
        self._count(gradients)
        parts = self._sent(gradients, self._mine, self._theirs)
        begin = time.perf_counter()
        found = [self._experts.backward(rank, part) for rank, part in enumerate(parts)]
        self.at_servers_ms += 1e3 * (time.perf_counter() - begin)
        return self._sent(found, self._theirs, self._mine)

    def _count(self, parts: list[Tensor]) -> None:
        self.bytes += sum(4 * part.numel() for part in parts)
        self.tensors += len(parts)

    def _sent(self, parts: list[Tensor], there: list[int], here: list[int]) -> list[Tensor]:
        begin = time.perf_counter()
        arrived = torch.empty(sum(here), self._width)
        dist.all_to_all_single(arrived, torch.cat(parts), here, there)
        self.communication_ms += 1e3 * (time.perf_counter() - begin)
        return list(arrived.split(here))


def main(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A rank of the group; rank 0 tells."""
    if job["library"] == "rdmarpc_group":
        import rdmarpc

        assert rdmarpc.__name__  # it tells torch of the backend
    where, limit = init_method(rank, job, "group"), timedelta(seconds=job["timeout_s"])
    dist.init_process_group(BACKENDS[job["library"]], init_method=where, rank=rank, world_size=job["processes"], timeout=limit)
    figures, results = measured(rank, AllToAll(rank, job), job)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        launcher.tell(("figures", figures))
        launcher.tell(("results", results))
