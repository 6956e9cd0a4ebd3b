"""The shape of PyTorch's parameter-server benchmark: trainers, servers, DDP whose hook sends gradients to the servers; over
rdmarpc and over torch RPC, by turns, with the same losses and parameters.

    python -m experiments.parameter_server
    python -m experiments.parameter_server quick=true device=tcp    # everything in conf/parameter_server.yaml can be overridden

The run's folder receives parameter_server.json and parameter_server.png.
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
CASES = ("all buckets", "sparse buckets")


@hydra.main(version_base="1.3", config_path=CONF, config_name="parameter_server")
def main(cfg: DictConfig) -> None:
    """All turns, then the table, the file and the picture. Fails if results differ."""
    job = checked(apps.plain(cfg), CASES) | {"program": "parameters"}
    run_app("parameter_server", Findings("Trainers and parameter servers", "ms"), job, run, judge)


def run(job: dict[str, Any], turns: Turns) -> None:
    take_all(job, turns, [job["trainers"] + job["servers"]])


def judge(findings: Findings, job: dict[str, Any], folder: Path) -> None:
    """The table, the targets and the picture."""
    from .latency.shapes_picture import draw

    note = f"Medians. Trainers: {job['trainers']}, servers: {job['servers']}; {job['layers']} dense"
    note += f" layers of width {job['width']}, a table of {job['rows']} rows, {job['batch']} x {job['bag']} of them a batch"
    table(findings, job, "A step, ms", "step", False, note)
    ahead(findings, job, "a step", "step")
    draw(findings, job, "step", "milliseconds a step", "processes", folder / "parameter_server.png")


if __name__ == "__main__":
    apps.start(main)
