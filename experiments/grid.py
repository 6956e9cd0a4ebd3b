"""The grid of the PyTorch RPC paper: calls that are under way at the same time, of 40 KB to 400 MB, that return their argument
or run 200 operations on it; over rdmarpc, torch RPC and gRPC, by turns.

    python -m experiments.grid
    python -m experiments.grid quick=true devices=[shm]    # everything in conf/grid.yaml can be overridden

Each turn has new processes, so no idle library is there while another is measured. The first batch of every cell does not
count; its results are compared with what they must be. The run's folder receives grid.json and grid.png.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from .harness import apps
from .harness.findings import Findings, available_gib, size_text
from .harness.libraries import TITLES
from .harness.turns import Turns, run_app

CONF = apps.CONF
DEVICES = ("shm", "tcp", "verbs")
QUICK_ROUNDS = 1

# Workers import this module too; what only the launcher needs is imported where it is needed.


@hydra.main(version_base="1.3", config_path=CONF, config_name="grid")
def main(cfg: DictConfig) -> None:
    """All rounds, then the tables, the file and the picture. Fails where rdmarpc does."""
    run_app("grid", Findings("Many calls at once", "ms"), checked(cfg), run, judge)


def judge(findings: Findings, job: dict[str, Any], folder: Path) -> None:
    """The tables, the targets and the picture."""
    from .latency import grid_tables as tables
    from .latency.grid_picture import draw_grid

    tables.judge(findings, job)
    draw_grid(findings, job, folder / "grid.png")


def run(job: dict[str, Any], turns: Turns) -> None:
    for part, number, rounds in parts(job, turns.findings):
        names = " and ".join(map(size_text, part["sizes"]))
        local(part, turns.findings)
        for device, library in ((device, library) for device in job["devices"] for library in job["libraries"]):
            title = f"{TITLES[library]} over {device}, {names}, round {number} of {rounds}"
            turns.take(part | {"library": library, "device": device}, f"{library} {device}", title)


def parts(job: dict[str, Any], findings: Findings) -> Iterator[tuple[dict[str, Any], int, int]]:
    """(what all libraries' turns of this round measure, number of the round, number of rounds): the small sizes together, then
    each large one, if there is memory for it."""
    common = job | {"clients": 1, "servers": 1, "drive": f"{__package__}.latency.grid_client:drive"}
    small = [size for size in job["sizes"] if size < job["large"]]
    scripts = [f"{name}_script" for name in job["functions"]] if job["script"] else []
    for number in range(job["rounds"] if small else 0):
        yield common | {"sizes": small, "functions": job["functions"] + scripts}, number + 1, job["rounds"]
    for size in job["sizes"]:
        for number in range(job["rounds_large"] if size >= job["large"] else 0):
            if (has := available_gib()) < job["large_gib"]:
                why = f"a turn may need large_gib={job['large_gib']:g} of memory, {has:.1f} GiB are available"
                findings.left_out(size_text(size), why)
                break
            yield common | {"sizes": [size]}, number + 1, job["rounds_large"]


def local(part: dict[str, Any], findings: Findings) -> None:
    """The same functions in this process."""
    import torch

    from .latency.grid_client import local_ms, under_way

    torch.set_num_threads(1)  # as workers have it
    for size in part["sizes"]:
        for name in part["functions"]:
            findings.add(f"{name} total", size, "local", local_ms(size, name, under_way(size, part)))


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values, with `quick` applied; ends the program if it makes no sense."""
    from .harness.functions import FUNCTIONS

    job = apps.plain(cfg)
    if job["quick"]:
        job["sizes"] = [size for size in job["sizes"] if size < job["large"]]
        job |= {"rounds": min(job["rounds"], QUICK_ROUNDS), "script": False}
    apps.some_of(job, devices=DEVICES, libraries=TITLES, functions=FUNCTIONS)
    apps.numbers(job, 4, "sizes")
    apps.at_least_one(job, "calls", "calls_large", "batches", "batches_large", "rounds", "rounds_large", "threads")
    if max(job["calls"], job["calls_large"]) > job["threads"]:
        raise SystemExit(f"error: calls={job['calls']} at once need as many threads, not {job['threads']}")
    return job


if __name__ == "__main__":
    apps.start(main)
