"""The benchmark: every latency beside its physical floor and beside torch RPC, measured in turns in one run.

    python -m experiments.bench                         # or: rdmarpc bench
    python -m experiments.bench quick=true device=tcp   # everything in conf/bench.yaml can be overridden
    python -m experiments.bench --json                  # JSON on standard output instead of a table

The run's folder receives bench.json and bench.png.
"""

import json
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from . import bench_torch, bench_worker
from .processes import Group, WorkerFailed, run_job
from .versions import versions

CONF = str(Path(__file__).parent / "conf")
QUICK_UP_TO = 4 << 20
QUICK_ROUNDS = 2


@hydra.main(version_base="1.3", config_path=CONF, config_name="bench")
def app(cfg: DictConfig) -> None:
    """One benchmark: run the workers, judge what they measured, write and show it."""
    from .bench_report import BenchDisplay, print_tables, summary
    from .pictures_bench import draw_bench

    job = checked(cfg)
    folder = Path(HydraConfig.get().runtime.output_dir)
    groups = [Group("rdmarpc", bench_worker.main, 2), Group("torch RPC", bench_torch.main, 2, freeze=True)]
    display = BenchDisplay()
    links = multiprocessing.get_context("spawn").Pipe()
    try:
        with display, tempfile.TemporaryDirectory(dir=folder, prefix=".meeting-") as meeting_place:
            run_job(groups, job | {"meeting_place": meeting_place, "links": links}, display.on_event, job["timeout_s"])
    except WorkerFailed as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        for link in links:
            link.close()

    bench = summary(display.records, job) | {"config": job, "versions": versions()}
    (folder / "bench.json").write_text(json.dumps(bench, indent=2) + "\n")
    draw_bench(bench, folder / "bench.png")
    if job["json"]:
        json.dump(bench, sys.stdout, indent=2)
        print()
    else:
        print_tables(bench)
        print(f"bench.json and bench.png are in {folder}")


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values, with `quick` applied; ends the program if it makes no sense."""
    job: Any = OmegaConf.to_container(cfg, resolve=True)
    if job["quick"]:
        job["sizes"] = [size for size in job["sizes"] if size <= QUICK_UP_TO]
        job["rounds"] = QUICK_ROUNDS
    if not job["sizes"] or min(job["sizes"]) < 1:
        raise SystemExit(f"error: sizes={job['sizes']} must name at least one number of bytes, each of at least 1")
    if job["rounds"] < 1:
        raise SystemExit(f"error: rounds={job['rounds']} must be at least 1")
    return job


def main() -> None:
    """The app with the ordinary flag `--json` besides hydra's `json=true`."""
    sys.argv[1:] = ["json=true" if argument == "--json" else argument for argument in sys.argv[1:]]
    app()


if __name__ == "__main__":
    main()
