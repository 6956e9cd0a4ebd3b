"""A rank: every measurement by our group and by gloo's, by turns, so that both meet the same machine.

Rank 0 tells (part, case, size, what, samples); samples are milliseconds, those of ``training`` losses and right answers."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import rdmarpc

from ..harness.processes import Launcher
from . import ddp_models as models
from .ddp_training import trained

Step = Callable[[], object]


def main(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """All parts of ``job["parts"]`` with ``job["size"]`` ranks."""
    assert rdmarpc.__name__  # it tells torch of the backend
    size, limit = job["size"], timedelta(seconds=120)
    store = dist.FileStore(f"{job['meeting_place']}/{size}", -1)
    dist.init_process_group("rdmarpc", store=store, rank=rank, world_size=size, timeout=limit)
    groups = {"rdmarpc": dist.group.WORLD, "gloo": dist.new_group(backend="gloo", timeout=limit)}
    run = Run(rank, job, groups, launcher)
    for part in job["parts"]:
        getattr(run, part)()
    run.meet()
    dist.destroy_process_group()


class Run:
    """What one rank measures. All ranks make the same calls; rank 0 tells."""

    def __init__(self, rank: int, job: dict[str, Any], groups: dict[str, Any], launcher: Launcher) -> None:
        self.rank, self.job, self.groups, self.launcher = rank, job, groups, launcher

    def meet(self) -> None:
        dist.barrier(self.groups["gloo"])

    def _tell(self, part: str, case: str, size: int, what: str, samples: list[float]) -> None:
        if self.rank == 0:
            self.launcher.tell((part, case, size, what, samples))

    def _by_turns(self, part: str, case: str, size: int, ways: dict[str, Step], warm_up: int, count: int, per: int = 1) -> None:
        """Milliseconds of each call of each way; of a mean one where a call makes ``per``."""
        for way in ways.values():
            for _ in range(warm_up):
                way()
        for _ in range(self.job["rounds"]):
            for what, way in ways.items():
                self.meet()
                samples = []
                for _ in range(count):
                    start = time.perf_counter()
                    way()
                    samples.append(1e3 * (time.perf_counter() - start) / per)
                self._tell(part, case, size, what, samples)

    # -- the parts

    def granularity(self) -> None:
        """So many numbers by ``all_reduce`` of a few each, all at once, as the paper's figure 2 has it; and of one number."""
        data = torch.zeros(self.job["numbers"])
        for count in self.job["granularity"]:
            pieces = data.split(count)
            ways: dict[str, Step] = {what: partial(_all, pieces, group) for what, group in self.groups.items()}
            self._by_turns("granularity", "all", count, ways, 1, 1)
        single = [torch.zeros(1)] * 50
        for what, group in self.groups.items():
            ways = {what: partial(_one_by_one, single, group)}
            self._by_turns("granularity", "latency", 1, ways, 1, 3, len(single))

    def buckets(self) -> None:
        """A step by the size of buckets, with overlap and without."""
        for name in self.job["models"]:
            for cap in self.job["caps_mb"]:
                ways: dict[str, Step] = {}
                for what, group in self.groups.items():
                    for overlap in (True, False):
                        model, x = models.made(name)
                        model = models.parallel(model, group, cap, overlap)
                        ways[f"{what}{'' if overlap else ' without overlap'}"] = partial(_step, model, x)
                self._by_turns("buckets", name, int(cap * (1 << 20)), ways, self.job["warm_up"], self.job["steps"])
                del ways, model
                gc.collect()  # a model of DistributedDataParallel is part of a circle, and large

    def breakdown(self) -> None:
        """Forward and backward, alone, with overlap and without."""
        for name in self.job["models"]:
            model, x = models.made(name)
            found: dict[str, nn.Module] = {"alone": model}
            for what, group in self.groups.items():
                for overlap in (True, False):
                    model, x = models.made(name)
                    model = models.parallel(model, group, self.job["cap_mb"], overlap)
                    found[f"{what}{'' if overlap else ' without overlap'}"] = model
            model, x = models.made(name)
            group = next(iter(self.groups.values()))
            model = found["unsummed"] = models.parallel(model, group, self.job["cap_mb"])
            model.register_comm_hook(group, models.unsummed)
            for model in found.values():
                for _ in range(self.job["warm_up"]):
                    _step(model, x)
            self._same_gradients(found)
            for _ in range(self.job["rounds"]):
                for what, model in found.items():
                    self.meet()
                    taken = [_parts(model, x) for _ in range(self.job["steps"])]
                    self._tell("breakdown", f"{name}: forward", 0, what, [each[0] for each in taken])
                    self._tell("breakdown", f"{name}: backward", 0, what, [each[1] for each in taken])

    def _same_gradients(self, found: dict[str, nn.Module]) -> None:
        """Every way has to give the same bits: a sum of two numbers has one order."""
        if self.job["size"] != 2:
            return
        first, *others = (_gradients(model) for what, model in found.items() if what not in ("alone", "unsummed"))
        for grads in others:
            if not all(torch.equal(one, other) for one, other in zip(first, grads, strict=True)):
                raise RuntimeError("a step has other gradients with another group, or without overlap")

    def skipping(self) -> None:
        """A mean step where every n-th one alone is synchronised."""
        for name in self.job["models"]:
            found = {}
            for what, group in self.groups.items():
                model, x = models.made(name)
                found[what] = models.parallel(model, group, self.job["cap_mb"])
            for model in found.values():
                for _ in range(self.job["warm_up"]):
                    _step(model, x)
            for every in self.job["skip"]:
                ways: dict[str, Step] = {what: partial(_cycle, model, x, every) for what, model in found.items()}
                self._by_turns("skipping", name, every, ways, 1, max(1, self.job["steps"] // every), every)

    def convergence(self) -> None:
        """Losses and right answers of training on the digits, by both groups."""
        for batch, rate in self.job["trainings"]:
            for every in self.job["skip"]:
                for what, group in self.groups.items():
                    losses, right = trained(group, self.rank, self.job, batch, rate, every)
                    case = f"batch {batch}, rate {rate:g}"
                    self._tell("training", f"{case}: losses", every, what, losses)
                    self._tell("training", f"{case}: right", every, what, [right])

    def scaling(self) -> None:
        """A step of the model that sleeps, by the number of ranks."""
        ways: dict[str, Step] = {}
        x = torch.zeros(1, requires_grad=True)
        for what, group in self.groups.items():
            model = models.Sleeping(self.job["layers"], self.job["parameters"], self.job["compute_ms"])
            ways[what] = partial(_step, models.parallel(model, group, self.job["cap_mb"]), x)
        self._by_turns("scaling", "step", self.job["size"], ways, self.job["warm_up"], self.job["steps"])


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


def _all(pieces: tuple[torch.Tensor, ...], group: Any) -> None:
    works = [dist.all_reduce(piece, group=group, async_op=True) for piece in pieces]
    for work in works:
        work.wait()


def _one_by_one(pieces: list[torch.Tensor], group: Any) -> None:
    for piece in pieces:
        dist.all_reduce(piece, group=group)


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad(set_to_none=False)
    model(x).sum().backward()


def _parts(model: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Milliseconds of forward and backward."""
    model.zero_grad(set_to_none=False)
    start = time.perf_counter()
    loss = model(x).sum()
    between = time.perf_counter()
    loss.backward()
    return 1e3 * (between - start), 1e3 * (time.perf_counter() - between)


def _cycle(model: Any, x: torch.Tensor, every: int) -> None:
    model.zero_grad(set_to_none=False)
    for number in range(every):
        with model.no_sync() if number < every - 1 else contextlib.nullcontext():
            model(x).sum().backward()
