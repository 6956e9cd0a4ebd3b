"""A graph network whose nodes' features are at several servers: every step fetches those of another neighbourhood, sends the
net's gradients to the same servers and gets its weights; over rdmarpc, torch RPC and gRPC by turns, with the same losses and
weights, bit for bit.

    python -m experiments.graph_network
    python -m experiments.graph_network quick=true device=tcp    # everything in conf/graph_network.yaml can be overridden

The run's folder receives graph_network.json and graph_network.png.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from .harness import apps
from .harness.findings import Findings
from .harness.libraries import TITLES
from .harness.turns import Turns, main_with_results, run_app
from .training.spread_report import judge as judge_all

CONF = apps.CONF
MOST_NODES = 1 << 24
"""Nodes' numbers travel as float32."""


@hydra.main(version_base="1.3", config_path=CONF, config_name="graph_network")
def main(cfg: DictConfig) -> None:
    """All turns, then the table, the file and the picture. Fails if results differ."""
    run_app("graph_network", Findings("A graph network", "ms"), checked(cfg), run, judge)


def run(job: dict[str, Any], turns: Turns) -> None:
    from .training import graphs

    common = job | {"register": graphs.__name__, "functions": graphs.NAMES, "drive": f"{graphs.__name__}:drive", "calls": 1}
    common |= {"clients": job["workers"], "threads": job["workers"] + 2}
    for number in range(job["rounds"]):
        for library in job["libraries"]:
            title = f"{TITLES[library]}, round {number + 1} of {job['rounds']}"
            turns.take(common | {"library": library}, library, title, main_with_results, "the network")


def judge(findings: Findings, job: dict[str, Any], folder: Path) -> None:
    note = f"{job['nodes']:,} nodes with {job['features']} features; GraphSAGE of two layers. fetched: in a step;"
    note += (
        " average tensor: of those from one server, and of gradients and weights. at servers: rows are looked up, and the step"
    )
    note += " is made, with the wait for other workers;"
    judge_all(findings, job, folder / "graph_network.png", "fetched", note)


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values, with `quick` applied; ends the program if it makes no sense."""
    job = apps.plain(cfg)
    if job["quick"]:
        job |= {"rounds": 1, "steps": min(job["steps"], 5), "nodes": min(job["nodes"], 2000), "batch": min(job["batch"], 16)}
    apps.some_of(job, libraries=TITLES)
    apps.device(job)
    apps.at_least_one(job, "workers", "servers", "nodes", "features", "batch", "width", "steps", "rounds")
    if job["nodes"] > MOST_NODES:
        raise SystemExit(f"error: nodes={job['nodes']} must be at most {MOST_NODES}")
    if job["servers"] > 4:
        raise SystemExit(f"error: servers={job['servers']} must be at most 4: each keeps one of the net's four tensors")
    return job


if __name__ == "__main__":
    apps.start(main)
