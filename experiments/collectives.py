"""Collectives beside gloo's and beside the floor, by turns in one run.

    python -m experiments.collectives                         # everything in conf/collectives.yaml can be overridden
    python -m experiments.collectives quick=true --json       # JSON on standard output instead of a table

The run's folder receives collectives.json.
"""

from collections import defaultdict
from typing import Any

import hydra
from omegaconf import DictConfig

from .exchange import collective_worker as worker
from .exchange.collective_cases import CASES
from .exchange.collective_models import MODELS
from .exchange.collective_report import NOTE, Times, print_table, summary, table_of
from .harness import apps
from .harness.findings import machine, of_rich
from .harness.processes import Group, run_job
from .harness.versions import versions

CONF = apps.CONF
QUICK = {"models": ["GRU"], "ranks": [2], "up_to": 4 << 20, "rounds": 2, "round_s": 0.1}


@hydra.main(version_base="1.3", config_path=CONF, config_name="collectives")
def main(cfg: DictConfig) -> None:
    """One benchmark: run the ranks, write and show what they measured."""
    job = checked(cfg)
    times: Times = defaultdict(list)
    with apps.ending():
        for size in job["ranks"]:

            def keep(_: str, event: tuple[Any, ...], size: int = size) -> None:
                case, nbytes, what, taken = event
                times[size, case, nbytes, what].append(taken)

            with apps.meeting(apps.run_folder()) as place:
                run_job([Group(f"{size} ranks", worker.main, size)], job | place | {"size": size}, keep, job["timeout_s"])
    result = summary(times, job["targets"]) | {"config": job, "versions": versions(), "machine": machine()}
    result["tables"] = [of_rich(table_of(result["rows"]), NOTE)]
    apps.write_and_show("collectives", result, job, lambda: print_table(result))


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain values. Raises SystemExit for one that makes no sense."""
    job = apps.plain(cfg)
    job["up_to"] = 1 << 40
    if job["quick"]:
        job |= QUICK
    apps.some_of(job, cases=CASES, models=MODELS)
    apps.numbers(job, 2, "ranks")
    apps.at_least_one(job, "rounds")
    return job


if __name__ == "__main__":
    apps.start(main)
