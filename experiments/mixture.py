"""A mixture of experts: every worker sends each of its tokens to one of many experts and gets back what that says, forward and
backward; by calls to servers of experts over rdmarpc, torch RPC and gRPC, and by all-to-all between workers that own the
experts, over this package's group and gloo's. By turns, with the same losses and weights, bit for bit.

    python -m experiments.mixture
    python -m experiments.mixture quick=true device=tcp    # everything in conf/mixture.yaml can be overridden

The run's folder receives mixture.json and mixture.png.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from .harness import apps
from .harness.findings import Findings
from .harness.turns import Turns, main_with_results, run_app
from .training.spread_report import ALL_TITLES
from .training.spread_report import judge as judge_all

CONF = apps.CONF
GROUPS = ("rdmarpc_group", "gloo")


@hydra.main(version_base="1.3", config_path=CONF, config_name="mixture")
def main(cfg: DictConfig) -> None:
    """All turns, then the table, the file and the picture. Fails if results differ."""
    run_app("mixture", Findings("A mixture of experts", "ms"), checked(cfg), run, judge)


def run(job: dict[str, Any], turns: Turns) -> None:
    from .training import spread_calls as calls
    from .training import spread_collective as collective

    common = job | {"register": calls.__name__, "functions": calls.NAMES, "drive": f"{calls.__name__}:drive", "calls": 1}
    common |= {"clients": job["workers"], "threads": job["workers"] + 2}
    for number in range(job["rounds"]):
        for library in job["libraries"]:
            title = f"{ALL_TITLES[library]}, round {number + 1} of {job['rounds']}"
            if library not in GROUPS:
                turns.take(common | {"library": library}, library, title, main_with_results, "the mixture")
            elif job["workers"] != job["servers"]:
                turns.findings.left_out(ALL_TITLES[library], "every worker owns the experts of one server: workers=servers")
            else:
                given = job | {"library": library, "processes": job["workers"]}
                turns.take(given, library, title, collective.main, "the mixture")


def judge(findings: Findings, job: dict[str, Any], folder: Path) -> None:
    note = f"{job['experts'] * job['servers']} experts, {job['tokens']} tokens of {job['width']} numbers a worker and step,"
    note += " routed to one expert each. sent: tokens and gradients of tokens of a worker and step; as much comes back."
    note += " at servers: the owners of the experts compute and wait for the step before;"
    judge_all(findings, job, folder / "mixture.png", "sent", note)


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values, with `quick` applied; ends the program if it makes no sense."""
    job = apps.plain(cfg)
    if job["quick"]:
        job |= {"rounds": 1, "steps": min(job["steps"], 5), "tokens": min(job["tokens"], 64)}
    apps.some_of(job, libraries=ALL_TITLES)
    apps.device(job)
    apps.at_least_one(job, "workers", "servers", "experts", "tokens", "width", "steps", "rounds")
    return job


if __name__ == "__main__":
    apps.start(main)
