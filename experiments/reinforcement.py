"""The shape of PyTorch's reinforcement-learning benchmark: observers ask one agent for actions, one by one or in batches;
over rdmarpc and over torch RPC, by turns, with the same rewards, losses and policy.

    python -m experiments.reinforcement
    python -m experiments.reinforcement quick=true observers=[4]    # everything in conf/reinforcement.yaml can be overridden

The run's folder receives reinforcement.json and reinforcement.png.
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
CASES = ("one by one", "in batches")


@hydra.main(version_base="1.3", config_path=CONF, config_name="reinforcement")
def main(cfg: DictConfig) -> None:
    """All turns, then the tables, the file and the picture. Fails if results differ."""
    job = checked(apps.plain(cfg), CASES) | {"program": "observers"}
    apps.numbers(job, 1, "observers")
    if job["quick"]:
        job["observers"] = job["observers"][:2]
    run_app("reinforcement", Findings("An agent and its observers", "ms, or actions a second"), job, run, judge)


def run(job: dict[str, Any], turns: Turns) -> None:
    take_all(job, turns, [1 + count for count in job["observers"]])


def judge(findings: Findings, job: dict[str, Any], folder: Path) -> None:
    """The tables, the targets and the picture."""
    from .latency.shapes_picture import draw

    note = "From an observer's question to the agent's answer, medians"
    table(findings, job, "An action, ms", "latency", False, note)
    table(findings, job, "Actions a second", "actions", True, "Of all observers together, medians of the episodes")
    ahead(findings, job, "an action", "latency")
    label = "processes: an agent and its observers"
    draw(findings, job, "latency", "milliseconds an action", label, folder / "reinforcement.png")


if __name__ == "__main__":
    apps.start(main)
