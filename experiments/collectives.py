"""Collectives beside gloo's and beside the floor, by turns in one run.

    python -m experiments.collectives                         # everything in conf/collectives.yaml can be overridden
    python -m experiments.collectives quick=true --json       # JSON on standard output instead of a table

The run's folder receives collectives.json.
"""

import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from .harness.processes import Group, WorkerFailed, run_job
from .harness.versions import versions
from .together import worker
from .together.cases import CASES
from .together.report import print_table, rows

CONF = str(Path(__file__).parent / "conf")
QUICK = {"ranks": [2], "up_to": 4 << 20, "rounds": 2, "round_s": 0.1}


@hydra.main(version_base="1.3", config_path=CONF, config_name="collectives")
def app(cfg: DictConfig) -> None:
    """One benchmark: run the ranks, write and show what they measured."""
    job = checked(cfg)
    folder = Path(HydraConfig.get().runtime.output_dir)
    times: dict[tuple[int, str, int, str], list[float]] = defaultdict(list)
    try:
        for size in job["ranks"]:

            def keep(_: str, event: tuple[Any, ...], size: int = size) -> None:
                case, nbytes, what, taken = event
                times[size, case, nbytes, what] += taken

            with tempfile.TemporaryDirectory(dir=folder, prefix=".meeting-") as place:
                group = Group(f"{size} ranks", worker.main, size)
                run_job([group], job | {"size": size, "meeting_place": place}, keep, job["timeout_s"])
    except WorkerFailed as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    found = rows(times, job["targets"])
    result = {"rows": found, "config": job, "versions": versions()}
    (folder / "collectives.json").write_text(json.dumps(result, indent=2) + "\n")
    if job["json"]:
        json.dump(result, sys.stdout, indent=2)
        print()
    else:
        print_table(found)
        print(f"collectives.json is in {folder}")


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain values. Raises SystemExit for one that makes no sense."""
    job: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    job["up_to"] = 1 << 40
    if job["quick"]:
        job |= QUICK
    if unknown := set(job["cases"]) - set(CASES):
        raise SystemExit(f"error: cases={sorted(unknown)}: some of {', '.join(CASES)} are expected")
    if not job["cases"] or not job["ranks"] or min(job["ranks"]) < 2 or job["rounds"] < 1:
        raise SystemExit("error: at least one case, two ranks and one round are expected")
    return job


if __name__ == "__main__":
    sys.argv = [argument if argument != "--json" else "json=true" for argument in sys.argv]
    app()
