"""How long a batch in micro-batches takes in each order, beside torch.distributed.pipelining over gloo, and beside the
schedule's length.

    python -m experiments.schedules
    python -m experiments.schedules workers='[2]' rounds=3   # everything in conf/schedules.yaml can be overridden
    python -m experiments.schedules --json

Each of n workers has two layers of a chain of 2n: both in one stage, or each in a stage of its own, interleaved. Both libraries
run in as many processes, one thread each, and take turns, case by case and round by round. The run's folder receives
schedules.json.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from .harness.processes import Group, WorkerFailed, run_job
from .harness.versions import versions

CONF = str(Path(__file__).parent / "conf")

# Workers import this module too; what only the launcher needs is imported where it is needed.


@hydra.main(version_base="1.3", config_path=CONF, config_name="schedules")
def app(cfg: DictConfig) -> None:
    """One run."""
    from .pipelines.report import print_table, summary

    job = checked(cfg)
    folder = Path(HydraConfig.get().runtime.output_dir)
    records: list[dict[str, Any]] = []
    try:
        for count in job["workers"]:
            print(f"{count} workers", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".meeting-") as meeting_place:
                here = job | {"count": count, "meeting_place": meeting_place}
                run_job(groups(here), here, partial(note, records, count), job["timeout_s"])
    except WorkerFailed as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    rows = summary(records, job)
    result = {"rows": rows, "records": records, "config": job, "versions": versions()}
    (folder / "schedules.json").write_text(json.dumps(result, indent=2) + "\n")
    if job["json"]:
        json.dump(result, sys.stdout, indent=2)
        print()
    else:
        print_table(rows)
        print(f"schedules.json is in {folder}")


def groups(job: dict[str, Any]) -> list[Group]:
    """The processes that take turns."""
    from .pipelines import workers

    found = [Group("rdmarpc", workers.ours, job["count"])]
    return [*found, Group("torch", workers.theirs, job["count"])] if job["torch"] else found


def note(records: list[dict[str, Any]], count: int, group: str, event: tuple[Any, ...]) -> None:
    records.extend(record | {"workers": count, "library": group} for record in event[1])


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values; ends the program if it makes no sense."""
    job: Any = OmegaConf.to_container(cfg, resolve=True)
    if not job["workers"] or min(job["workers"]) < 2:
        raise SystemExit(f"error: workers={job['workers']} must be numbers from 2 on")
    for name in ("rounds", "steps", "chunks_a_worker"):
        if job[name] < 1:
            raise SystemExit(f"error: {name}={job[name]} must be at least 1")
    job["cases"] = {name: case for name, case in job["cases"].items() if case}
    return job


def main() -> None:
    """The app with the ordinary flag `--json` besides hydra's `json=true`."""
    sys.argv[1:] = ["json=true" if argument == "--json" else argument for argument in sys.argv[1:]]
    app()


if __name__ == "__main__":
    main()
