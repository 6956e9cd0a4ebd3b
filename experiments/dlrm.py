"""A recommendation model as in DLRM: embedding tables at servers, by RPC and RRef; the dense part at every trainer, by DDP; one
distributed autograd over both; over rdmarpc and over torch RPC, by turns, with the same losses, dense weights and tables.

    python -m experiments.dlrm
    python -m experiments.dlrm quick=true device=tcp    # everything in conf/dlrm.yaml can be overridden

The run's folder receives dlrm.json and dlrm.png.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from .harness import apps
from .harness.findings import Findings
from .harness.turns import Turns, run_app
from .latency.shapes_runs import ahead, checked, table, take_all

CONF = apps.CONF


@hydra.main(version_base="1.3", config_path=CONF, config_name="dlrm")
def main(cfg: DictConfig) -> None:
    """All turns, then the tables, the file and the picture. Fails if results differ."""
    run_app("dlrm", Findings("A recommendation model", "ms"), job_of(cfg), run, judge)


def job_of(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values; ends the program if it makes no sense."""
    job = apps.plain(cfg)
    apps.numbers(job, 1, "batches")
    if job["quick"]:
        job |= {"batches": job["batches"][:1], "rows": min(job["rows"], 2000), "steps": min(job["steps"], 5)}
    cases = [f"batch of {count}" for count in job["batches"]]
    job = checked(job | {"cases": cases, "program": "recommendation"}, tuple(cases))
    if job["rows"] < job["trainers"]:
        raise SystemExit(f"error: rows={job['rows']} must be at least one for each of trainers={job['trainers']}")
    return job


def run(job: dict[str, Any], turns: Turns) -> None:
    take_all(job, turns, [job["trainers"] + job["servers"]])


def judge(findings: Findings, job: dict[str, Any], folder: Path) -> None:
    """The tables, the targets and the picture."""
    from .latency.shapes_picture import draw

    tables = job["tables"] * job["servers"]
    note = f"Trainers: {job['trainers']}, servers: {job['servers']}, each with {job['tables']} tables"
    note += f" of {job['rows']:,} x {job['width']};"
    note += f" a batch of a trainer takes a bag of {job['bag']} rows from each of the {tables} tables"
    table(findings, job, "A step, ms", "step", False, note)
    note = "from the question for all bags of a batch to their arrival; a part of the step"
    table(findings, job, "The forward calls alone, ms", "lookup", False, note)
    ahead(findings, job, "a step", "step")
    draw(findings, job, "step", "milliseconds a step", "processes: trainers and servers", folder / "dlrm.png")


if __name__ == "__main__":
    apps.start(main)
