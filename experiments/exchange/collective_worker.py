"""A rank: every case by our group, by gloo's and as the floor, by turns, so that all meet the same machine."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import rdmarpc

from ..harness.floor import address_of, copies
from ..harness.processes import Launcher
from . import collective_cases as cases
from . import collective_models as models

MOST_CALLS, FEWEST_CALLS = 400, 3


def main(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """Every event is (case, bytes, what, microseconds of each call)."""
    assert rdmarpc.__name__  # it tells torch of the backend
    size = job["size"]
    store = dist.FileStore(f"{job['meeting_place']}/{size}", -1)
    dist.init_process_group("rdmarpc", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    groups = {"rdmarpc": dist.group.WORLD, "gloo": dist.new_group(backend="gloo", timeout=timedelta(seconds=120))}
    run = Run(rank, size, job, groups, launcher if rank == 0 else None)
    for case in job["cases"]:
        if case == "ddp":
            for name in job["models"] if size == 2 else ():
                run.steps(name)
            continue
        for nbytes in _sizes(case, job):
            run.case(case, nbytes)
    dist.barrier(groups["gloo"])
    dist.destroy_process_group()


def _sizes(case: str, job: dict[str, Any]) -> list[int]:
    size = job["size"]
    if case == "barrier":
        return [0]
    sizes = job["sizes"].get(case, job["sizes"]["others"])
    if size > 2:
        sizes = [] if case == "pair" else [each for each in job["more"] if each * size * (size + 1) <= job["most"] * 9]
    return [each for each in sizes if each <= job["up_to"]]


class Run:
    """What one rank measures. Rank 0 says how often, and tells."""

    def __init__(self, rank: int, size: int, job: dict[str, Any], groups: dict[str, Any], launcher: Launcher | None) -> None:
        self.rank, self.size, self.job, self.groups, self.launcher = rank, size, job, groups, launcher

    def case(self, case: str, nbytes: int) -> None:
        """All ways by turns."""
        call = cases.prepared(case, nbytes, self.rank, self.size)
        ways: dict[str, Callable[[], object]] = {what: partial(call, group) for what, group in self.groups.items()}
        if moved := cases.received(case, nbytes, self.size):
            ways["floor"] = floor(moved)
        for _ in range(2):
            for way in ways.values():
                way()
        for _ in range(self.job["rounds"]):
            for what, way in ways.items():
                self._tell(case, nbytes, what, self._times(way))

    def steps(self, name: str) -> None:
        """What a step of DistributedDataParallel takes above one without communication."""
        nbytes, found = models.steps(name, self.groups)
        for step in found.values():
            for _ in range(3):  # the second step has other buckets
                step()
        for _ in range(2 * self.job["rounds"]):
            taken = {what: self._times(step) for what, step in found.items()}
            for what, times in taken.items():
                self._tell(f"ddp {name}", nbytes, what, times)

    def _times(self, call: Callable[[], object]) -> list[float]:
        """Microseconds of each call, while all ranks make as many."""
        count = self._count(call)
        self._meet()
        found, clock = [], time.perf_counter_ns
        for _ in range(count):
            start = clock()
            call()
            found.append((clock() - start) / 1e3)
        self._meet()
        return found

    def _count(self, call: Callable[[], object]) -> int:
        self._meet()
        start = time.perf_counter()
        call()
        taken = max(time.perf_counter() - start, 1e-6)
        count = torch.tensor(max(FEWEST_CALLS, min(MOST_CALLS, int(self.job["round_s"] / taken))))
        dist.broadcast(count, 0, group=self.groups["gloo"])
        return int(count)

    def _meet(self) -> None:
        dist.barrier(self.groups["gloo"])

    def _tell(self, case: str, nbytes: int, what: str, times: list[float]) -> None:
        if self.launcher is not None:
            self.launcher.tell((case, nbytes, what, times))


def floor(nbytes: int) -> Callable[[], object]:
    """Warm memcpys of what one rank receives, in parts of at most 256 MiB, while the other ranks do the same."""
    part = min(nbytes, 256 << 20)
    source, target = (mmap.mmap(-1, max(part, 1)) for _ in range(2))
    for each in (source, target):
        np.frombuffer(each, np.uint8)[:] = 1
    addresses = address_of(target), address_of(source)

    def copy() -> object:
        return source, target, [copies(*addresses, min(part, nbytes - at), 1) for at in range(0, nbytes, part)]

    return copy
