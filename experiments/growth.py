"""How time and memory grow: edges of a step, workers, references, tensors of a call. Both should grow as the number does, and
repetitions should add no memory.

    python -m experiments.growth
    python -m experiments.growth quick=true    # everything in conf/growth.yaml can be overridden

The run's folder receives growth.json.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from .harness import apps
from .harness.findings import Findings, print_findings, text
from .harness.processes import Group, Launcher, run_job
from .harness.targets import ratio

CONF = apps.CONF
QUICK_SIZES, QUICK_ROUNDS = 2, 3
WIDTH = 4
MIB = 1 << 20


@hydra.main(version_base="1.3", config_path=CONF, config_name="growth")
def main(cfg: DictConfig) -> None:
    """All cases, then the table and the file."""
    job = checked(cfg)
    folder = apps.run_folder()
    findings = Findings("Growth", "ms, or MiB")

    def keep(_: str, event: tuple[Any, ...]) -> None:
        case, size, figures = event
        print(f"{case}: {size:,}", file=sys.stderr, flush=True)
        for what, values in figures.items():
            for value in values:
                findings.add(case, size, what, value)

    with apps.ending():
        for case in job["cases"]:
            for size in job[case] if case == "workers" else [2]:
                with apps.meeting(folder) as meet:
                    run_job([Group(case, work, size)], job | meet | {"case": case, "count": size}, keep, job["timeout_s"])
    judge(findings, job)
    found = findings.as_dict(job)
    apps.write_and_show("growth", found, job, lambda: print_findings(found))


# -- the workers


def work(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A worker from its first line to its last; worker 0 tells (case, size, milliseconds and MiB by what they are of)."""
    import rdmarpc as rpc

    options = rpc.RpcBackendOptions(
        transport=job["device"], init_method=f"file://{job['meeting_place']}/store", rpc_timeout=job["timeout_s"]
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=job["count"], rpc_backend_options=options)
    if rank:
        # A worker that shuts down connects to worker 0, so that a first call from there would find a connection at times.
        released.wait()
    else:
        for size in [job["count"]] if job["case"] == "workers" else job[job["case"]]:
            launcher.tell((job["case"], size, CASES[job["case"]](rpc, size, job["rounds"])))
        for other in range(1, job["count"]):
            rpc.rpc_sync(f"worker{other}", release)
    rpc.shutdown()


released = threading.Event()
"""Worker 0 has measured everything."""


def release() -> None:
    released.set()


def nothing(*received: Any) -> int:
    return len(received)


def resident_mib() -> float:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def both_mib(rpc: Any) -> float:
    """Of this process and of worker 1."""
    return resident_mib() + rpc.rpc_sync("worker1", resident_mib)


def repeated(run: Callable[[], None], rounds: int, mib: Callable[[], float]) -> dict[str, list[float]]:
    """Milliseconds of the first run and of each after it, processor time of the first at this worker, and ``mib()`` that the
    first and the later ones added."""

    def settled_mib() -> float:
        gc.collect()
        return mib()

    begun = settled_mib()
    used = time.process_time()
    first = timed(run)
    used = 1e3 * (time.process_time() - used)
    warm = settled_mib()
    later = [timed(run) for _ in range(rounds)]
    grown = {"MiB first": [warm - begun], "MiB later": [settled_mib() - warm]}
    return {"first": [first], "first, processor": [used], "later": later} | grown


def timed(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - begin)


class Fan(nn.Module):
    """So many tensors, each made here and read by another part."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.scale = count, nn.Parameter(torch.ones(count, WIDTH))
        self.total = Total()

    def forward(self, x: Tensor) -> Tensor:
        # One operation gives all rows: by ``scale[at]`` the backward of torch itself takes twice as long.
        return self.total([x * each for each in self.scale.unbind()])


class Total(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, given: list[Tensor]) -> Tensor:
        return self.weight * torch.stack(given).sum()


def edges(rpc: Any, size: int, rounds: int) -> dict[str, list[float]]:
    """Steps of a wrapped model."""
    model = rpc.wrap(Fan(size), {"total": "worker1"})
    x = torch.ones(WIDTH)
    figures = repeated(lambda: model(x).backward(), rounds, partial(both_mib, rpc))
    model.close()
    return figures


def workers(rpc: Any, size: int, rounds: int) -> dict[str, list[float]]:
    """A call to each of the others at once. The first ones connect, so nothing may call worker 1 before."""

    def run() -> None:
        for future in [rpc.rpc_async(f"worker{rank}", nothing) for rank in range(1, size)]:
            future.wait()

    return repeated(run, rounds, resident_mib)


def references(rpc: Any, size: int, rounds: int) -> dict[str, list[float]]:
    """Values that stay with the other worker, all at once, until all are dropped."""

    def run() -> None:
        kept = [rpc.remote("worker1", nothing) for _ in range(size)]
        kept[-1].to_here()
        kept.clear()
        rpc.rpc_sync("worker1", nothing)

    return repeated(run, rounds, partial(both_mib, rpc))


def tensors(rpc: Any, size: int, rounds: int) -> dict[str, list[float]]:
    """A call with so many tensors."""
    given = [torch.ones(WIDTH) for _ in range(size)]
    return repeated(lambda: rpc.rpc_sync("worker1", nothing, given), rounds, partial(both_mib, rpc))


CASES = {"edges": edges, "workers": workers, "references": references, "tensors": tensors}


# -- what it says


def exponent(sizes: list[int], times: list[float]) -> float | None:
    """``time ~ size ** exponent`` by least squares over the largest size and those down to a tenth of it, where what does
    not depend on the size is small; ``None`` for fewer than two."""
    points = [(math.log(size), math.log(ms)) for size, ms in zip(sizes, times) if size * 10 >= max(sizes)]
    if len(points) < 2:
        return None
    across, up = (statistics.mean(values) for values in zip(*points))
    return sum((x - across) * (y - up) for x, y in points) / sum((x - across) ** 2 for x, _ in points)


def judge(findings: Findings, job: dict[str, Any]) -> None:
    """The table of each case, and its targets."""
    for case in job["cases"]:
        sizes = job[case]
        least = {what: [min(findings.samples(case, size, what), default=None) for size in sizes] for what in ("first", "later")}
        rows = []
        for at, size in enumerate(sizes):
            later = findings.median(case, size, "later")
            memory = [text(findings.median(case, size, f"MiB {what}"), "{:,.1f}") for what in ("first", "later")]
            each = ratio(least["later"][at], size)
            first = [text(least["first"][at]), text(findings.median(case, size, "first, processor"))]
            rows.append([f"{size:,}", *first, text(later), text(least["later"][at]), text(each, "{:,.4f}"), *memory])
        of_time = ["first, ms", "its processor time", "later, ms", "best, ms", "best for each one, ms"]
        note = "first: one sample; later: the median. Processor time: worker 0. MiB: resident, workers 0 and 1 (workers: 0)."
        columns = [case, *of_time, "MiB of the first", "MiB of later ones"]
        findings.table(f"{case}: time and memory", columns, rows, note, better="Lower is better.")
        for what, times in least.items():
            known = [(size, ms) for size, ms in zip(sizes, times) if ms is not None]
            # The two smallest sizes of a quick run cost what does not depend on them.
            found = None if job["quick"] else exponent([size for size, _ in known], [ms for _, ms in known])
            findings.target(f"{case}: exponent of the {what} time", found, "≤", job["most"]["exponent"])
        kept = [findings.median(case, size, "MiB later") for size in sizes]
        most = max((mib for mib in kept if mib is not None), default=None)
        findings.target(f"{case}: MiB that repetitions add", most, "≤", job["most"]["kept_mib"])


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values, with `quick` applied; ends the program if it makes no sense."""
    job = apps.plain(cfg)
    apps.some_of(job, cases=CASES)
    apps.device(job)
    apps.numbers(job, 2, "workers")
    apps.numbers(job, 1, "edges", "references", "tensors")
    apps.at_least_one(job, "rounds")
    for case in CASES:
        job[case] = sorted(job[case])[: QUICK_SIZES if job["quick"] else None]
    if job["quick"]:
        job["rounds"] = min(job["rounds"], QUICK_ROUNDS)
    return job


if __name__ == "__main__":
    apps.start(main)
