"""What DistributedDataParallel costs a step, by our group and by gloo's: the figures of PyTorch's DDP paper at our scale.

    python -m experiments.ddp
    python -m experiments.ddp quick=true        # everything in conf/ddp.yaml can be overridden

Both groups are those of the same processes and take turns. Real models run with two ranks, as many as there are cores. With
more ranks the computation is emulated by sleeps, and what is beyond those is simulated. The run's folder receives ddp.json
and pictures.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import hydra
import torch.distributed as dist
from omegaconf import DictConfig

from .harness import apps
from .harness.findings import Findings, print_findings
from .harness.processes import Group, run_job
from .training import ddp_worker as worker

CONF = apps.CONF
PARTS = ("granularity", "buckets", "breakdown", "skipping", "convergence", "scaling")
QUICK = {"models": ["small"], "caps_mb": [0, 1], "numbers": 4_000_000, "granularity": [100_000, 4_000_000], "skip": [1, 4]}
QUICK |= {"trainings": [[8, 0.02]], "batches": 60, "ranks": [2], "steps": 1, "warm_up": 2, "rounds": 2}
QUICK |= {"compute_ms": 30, "parameters": 2_560_000}


@hydra.main(version_base="1.3", config_path=CONF, config_name="ddp")
def main(cfg: DictConfig) -> None:
    """All parts, then the tables, the file and the pictures. Fails where a group does."""
    from .training import ddp_picture as picture
    from .training import ddp_report as report

    job = checked(cfg)
    findings = Findings("Data parallel training", "ms")
    findings.left_out("MPI", why_no_mpi())
    with apps.ending():
        run(job, findings)
    report.judge(findings, job)
    picture.draw(findings, job, apps.run_folder())
    found = findings.as_dict(job)
    apps.write_and_show("ddp", found, job, lambda: print_findings(found))


def why_no_mpi() -> str:
    if not dist.is_mpi_available():
        return "the installed torch was built without it"
    return "torch's MPI groups are of processes that mpirun starts; these are not"


def run(job: dict[str, Any], findings: Findings) -> None:
    """All parts with two ranks, then ``scaling`` with the other numbers of ranks."""

    def keep(_: str, event: tuple[Any, ...]) -> None:
        part, case, size, what, samples = event
        for sample in samples:
            findings.add(f"{part}, {case}", size, what, sample)

    scales = job["ranks"] if "scaling" in job["parts"] else []
    sizes = {2: [part for part in job["parts"] if part != "scaling" or 2 in scales]}
    sizes |= {ranks: ["scaling"] for ranks in scales if ranks != 2}
    for ranks, chosen in sizes.items():
        if not chosen:
            continue
        print(f"{ranks} ranks: {', '.join(chosen)}", file=sys.stderr, flush=True)
        with apps.meeting(apps.run_folder()) as place:
            given = job | place | {"size": ranks, "parts": chosen}
            run_job([Group(f"{ranks} ranks", worker.main, ranks)], given, keep, job["timeout_s"])


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values, with `quick` applied; ends the program if it makes no sense."""
    from .training.ddp_models import MODELS

    job = apps.plain(cfg)
    if job["quick"]:
        job |= QUICK
    apps.some_of(job, parts=PARTS, models=MODELS)
    apps.at_least_one(job, "steps", "warm_up", "rounds", "batches", "layers")
    for name in ("caps_mb", "granularity", "skip", "trainings", "ranks"):
        if not job[name]:
            raise SystemExit(f"error: {name}={job[name]} must not be empty")
    if min(job["caps_mb"]) < 0 or min(job["skip"] + job["ranks"] + job["granularity"] + job["hosts"]) < 1:
        raise SystemExit("error: caps_mb must be at least 0; skip, ranks, granularity and hosts at least 1")
    job["cores"] = len(os.sched_getaffinity(0))
    return job


if __name__ == "__main__":
    apps.start(main)
