"""The benchmark: every latency beside its physical floor and beside torch RPC, measured in turns in one run.

    python -m experiments.bench                         # or: rdmarpc bench
    python -m experiments.bench quick=true device=tcp   # everything in conf/bench.yaml can be overridden
    python -m experiments.bench all_to_all=32           # 32 workers that all call each other, as well
    python -m experiments.bench pair=false start=0      # distributed autograd only
    python -m experiments.bench --json                  # JSON on standard output instead of a table
    python -m experiments.bench --compare OLD.json      # and what has changed since that run beyond the spread
    python -m experiments.bench --against COMMIT rounds=6 start=0   # pairs of runs, of another commit and this one

The run's folder receives bench.json, with the commit and the machine, and, from the two workers, bench.png.
"""

import multiprocessing
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from .harness import against, apps, compare
from .harness.findings import machine
from .harness.processes import Group, run_job
from .harness.versions import commit, versions

if TYPE_CHECKING:
    from .latency.report import BenchDisplay

CONF = apps.CONF
QUICK_UP_TO = 4 << 20
QUICK_ROUNDS = 2

# Workers import this module too; what only the launcher or only some of them need is imported where it is needed.


@hydra.main(version_base="1.3", config_path=CONF, config_name="bench")
def app(cfg: DictConfig) -> None:
    """One benchmark: run the workers, judge what they measured, write and show it."""
    from .harness.findings import of_rich
    from .latency.report import BenchDisplay, print_tables, tables
    from .latency.rows import summary

    job = checked(cfg)
    if job["against"]:
        pairs = against.by_turns("experiments.bench", given(), job["against"], job["rounds"])
        apps.write_and_show("against", pairs, job, lambda: against.print_pairs(pairs))
        return
    earlier = compared(job["compare"])
    display = BenchDisplay()
    with apps.ending(), display, apps.meeting(apps.run_folder()) as place:
        run(job | place, display)
    bench = summary(display.records, job) | {"config": job, "versions": versions(), "machine": machine(), "commit": commit()}
    bench["tables"] = [of_rich(table, note) for table, note in tables(bench)]
    if earlier is not None:
        bench["changes"] = compare.compare(earlier, bench)
    if job["pair"]:
        from .latency.picture import draw_bench

        draw_bench(bench, apps.run_folder() / "bench.png")

    def show() -> None:
        print_tables(bench)
        if earlier is not None:
            compare.print_changes(bench["changes"], job["compare"])

    apps.write_and_show("bench", bench, job, show)


def run(job: dict[str, Any], display: "BenchDisplay") -> None:
    """The parts that were asked for, one after the other; what they measure arrives at `display`."""
    if job["pair"]:
        from .latency import torch_worker, worker

        pair = [Group("rdmarpc", worker.main, 2), Group("torch RPC", torch_worker.main, 2, freeze=True)]
        links = multiprocessing.get_context("spawn").Pipe()
        try:
            run_job(pair, job | {"links": links}, display.on_event, job["timeout_s"])
        finally:
            for link in links:
                link.close()
    if job["start"]:
        from .latency import start

        start.measure(job, display.on_event)
    if job["autograd"]:
        from .latency import autograd

        run_job(autograd.groups(), job, display.on_event, job["timeout_s"])
    if job["all_to_all"]:
        from .latency import all_to_all

        run_job(all_to_all.groups(job["all_to_all"]), job, display.on_event, job["timeout_s"])


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values, with `quick` applied; ends the program if it makes no sense."""
    from .latency.cells import NEW_FUNCTIONS
    from .latency.fresh import COUNT

    job = apps.plain(cfg)
    for name, sizes in {"sizes": job["sizes"], **job["cells"]}.items():
        if not isinstance(sizes, list) or any(not isinstance(size, int) or size < 1 for size in sizes):
            raise SystemExit(f"error: {name}={sizes} are numbers of bytes, each of at least 1")
    if job["quick"]:
        job["sizes"] = [size for size in job["sizes"] if size <= QUICK_UP_TO]
        job["cells"] = {case: [size for size in sizes if size <= QUICK_UP_TO] for case, sizes in job["cells"].items()}
        job["rounds"], job["start"] = QUICK_ROUNDS, min(job["start"], QUICK_ROUNDS)
    if not job["sizes"]:
        raise SystemExit("error: sizes=[] must name at least one number of bytes")
    most = COUNT // NEW_FUNCTIONS // max(len(job["cells"].get("first", [])), 1)
    if not 1 <= job["rounds"] <= most:
        raise SystemExit(f"error: rounds={job['rounds']} must be from 1 to {most}")
    apps.at_least_one(job, "linear")
    apps.device(job)
    if job["all_to_all"] == 1 or job["all_to_all"] < 0:
        raise SystemExit(f"error: all_to_all={job['all_to_all']} must be 0 or at least 2 workers")
    if job["all_to_all"] and job["all_to_all_torch"] == "auto":
        from .latency.all_to_all import torch_transport

        job["all_to_all_torch"] = torch_transport(job["all_to_all"])
    if not (job["pair"] or job["start"] or job["autograd"] or job["all_to_all"]):
        raise SystemExit("error: pair=false start=0 autograd=false all_to_all=0 leaves nothing to measure")
    return job


def compared(path: str) -> dict[str, Any] | None:
    """The earlier run to compare with, read before anything is measured; ends the program if it cannot be."""
    try:
        return compare.load(Path(path)) if path else None
    except ValueError as error:
        raise SystemExit(f"error: compare: {error}") from None


def given() -> list[str]:
    """The overrides that this run was given, but for those of a comparison."""
    overrides = HydraConfig.get().overrides.task
    return [each for each in overrides if each.partition("=")[0] not in ("against", "compare", "rounds", "json")]


def flags(arguments: list[str]) -> list[str]:
    """The flags `--compare OLD.json` and `--against COMMIT` as hydra's overrides."""
    found, left = [], iter(arguments)
    for argument in left:
        if argument in ("--compare", "--against"):
            name, value = argument.removeprefix("--"), next(left, "")
            if not value:
                raise SystemExit(f"error: {argument} needs {'a file' if name == 'compare' else 'a commit'} behind it")
            argument = f"{name}='{value}'"
        found.append(argument)
    return found


def main() -> None:
    """The app with the ordinary flags besides hydra's overrides; also the command ``rdmarpc bench``."""
    sys.argv[1:] = flags(sys.argv[1:])
    apps.start(app)


if __name__ == "__main__":
    main()
