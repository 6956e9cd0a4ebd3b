"""What DistributedDataParallel costs a step, by our group and by gloo's: the figures of PyTorch's DDP paper at our scale.

    python -m experiments.ddp
    python -m experiments.ddp quick=true        # everything in conf/ddp.yaml can be overridden

Both groups are those of the same processes and take turns. Real models run with two ranks, as many as there are cores. With
more ranks the computation is emulated by sleeps, and what is beyond those is simulated. The run's folder receives ddp.json
and pictures.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import hydra
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from .data_parallel import worker
from .harness.findings import Findings, print_findings
from .harness.processes import Group, WorkerFailed, run_job

CONF = str(Path(__file__).parent / "conf")
PARTS = ("granularity", "buckets", "breakdown", "skipping", "convergence", "scaling")
QUICK = {"models": ["small"], "caps_mb": [0, 1], "numbers": 4_000_000, "granularity": [100_000, 4_000_000], "skip": [1, 4]}
QUICK |= {"trainings": [[8, 0.02]], "batches": 60, "ranks": [2], "steps": 1, "warm_up": 2, "rounds": 2}
QUICK |= {"compute_ms": 30, "parameters": 2_560_000}


@hydra.main(version_base="1.3", config_path=CONF, config_name="ddp")
def main(cfg: DictConfig) -> None:
    """All parts, then the tables, the file and the pictures. Fails where a group does."""
    from .data_parallel import picture, report

    job = checked(cfg)
    folder = Path(HydraConfig.get().runtime.output_dir)
    findings = Findings("Data parallel training", "ms")
    findings.left_out("MPI", why_no_mpi())
    try:
        run(job, findings)
    except WorkerFailed as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    report.judge(findings, job)
    found = findings.write(folder, "ddp", job)
    pictures = picture.draw(findings, job, folder)
    print_findings(found)
    print(f"{', '.join(['ddp.json', *pictures])} are in {folder}")


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
        print(f"{ranks} ranks: {', '.join(chosen)}", flush=True)
        # Not in the run's folder: paths of Unix sockets must be short.
        with tempfile.TemporaryDirectory(prefix="ddp-") as place:
            given = job | {"size": ranks, "parts": chosen, "meeting_place": place}
            run_job([Group(f"{ranks} ranks", worker.main, ranks)], given, keep, job["timeout_s"])


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values, with `quick` applied; ends the program if it makes no sense."""
    from .data_parallel.models import MODELS

    job: Any = OmegaConf.to_container(cfg, resolve=True)
    if job["quick"]:
        job |= QUICK
    for name, known in (("parts", PARTS), ("models", tuple(MODELS))):
        if not job[name] or not set(job[name]) <= set(known):
            raise SystemExit(f"error: {name}={job[name]} must be some of {', '.join(known)}")
    for name in ("steps", "warm_up", "rounds", "batches", "layers"):
        if job[name] < 1:
            raise SystemExit(f"error: {name}={job[name]} must be at least 1")
    for name in ("caps_mb", "granularity", "skip", "trainings", "ranks"):
        if not job[name]:
            raise SystemExit(f"error: {name}={job[name]} must not be empty")
    if min(job["caps_mb"]) < 0 or min(job["skip"] + job["ranks"] + job["granularity"] + job["hosts"]) < 1:
        raise SystemExit("error: caps_mb must be at least 0; skip, ranks, granularity and hosts at least 1")
    job["cores"] = len(os.sched_getaffinity(0))
    return job


if __name__ == "__main__":
    main()
