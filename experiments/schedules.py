"""How long a batch in micro-batches takes in each order, beside torch.distributed.pipelining over gloo and beside the
schedule's length.

    python -m experiments.schedules
    python -m experiments.schedules workers='[2]' rounds=2   # everything in conf/schedules.yaml can be overridden
    python -m experiments.schedules --json

Each of n workers has two layers of a chain of 2n: both in one stage, or each in a stage of its own, interleaved. Workers have
one thread each; of ours the caller is a process more. Both libraries take turns, case by case and round by round. The run's
folder receives schedules.json.
"""

import sys
from functools import partial
from typing import Any

import hydra
from omegaconf import DictConfig

from .harness import apps
from .harness.processes import Group, run_job
from .harness.versions import versions

CONF = apps.CONF

# Workers import this module too; what only the launcher needs is imported where it is needed.


@hydra.main(version_base="1.3", config_path=CONF, config_name="schedules")
def main(cfg: DictConfig) -> None:
    """One run."""
    from .harness.findings import of_rich
    from .training.pipeline_report import print_tables, summary, tables_of

    job = checked(cfg)
    told: dict[str, list[dict[str, Any]]] = {"measured": []}
    with apps.ending():
        for count in job["workers"]:
            print(f"{count} workers", file=sys.stderr, flush=True)
            with apps.meeting(apps.run_folder()) as place:
                here = job | place | {"count": count}
                run_job(groups(here), here, partial(note, told, count), job["timeout_s"])
    rows = summary(told["measured"], job)
    result = {"rows": rows, **told, "config": job, "versions": versions()}
    result["tables"] = [of_rich(table, note) for table, note in tables_of(rows)]
    apps.write_and_show("schedules", result, job, lambda: print_tables(rows))


def groups(job: dict[str, Any]) -> list[Group]:
    """The processes that take turns."""
    from .training import pipeline_workers as workers

    found = [Group("rdmarpc", workers.ours, job["count"] + 1)]
    return [*found, Group("torch", workers.theirs, job["count"])] if job["torch"] else found


def note(told: dict[str, list[dict[str, Any]]], count: int, group: str, event: tuple[Any, ...]) -> None:
    what, found = event
    told[what].extend(each | {"workers": count, "library": group} for each in found)


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values; ends the program if it makes no sense."""
    job = apps.plain(cfg)
    apps.device(job)
    apps.numbers(job, 2, "workers")
    apps.at_least_one(job, "rounds", "chunks_a_worker")
    job["cases"] = {name: case for name, case in job["cases"].items() if case}
    for case in job["cases"].values():
        apps.at_least_one(case, "width", "samples", "steps")
    return job


if __name__ == "__main__":
    apps.start(main)
