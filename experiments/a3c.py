"""Asynchronous reinforcement learning (A3C) on gymnasium's CartPole: actors fetch a global network and push gradients; how
long a fetch and an update take, and how long it takes to a reward, over rdmarpc, torch RPC and gRPC by turns.

    python -m experiments.a3c
    python -m experiments.a3c quick=true    # everything in conf/a3c.yaml can be overridden

Seeds fix the network and the games, but not the order in which gradients come: times to the reward differ from run to run. The
run's folder receives a3c.json.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from .harness import apps
from .harness.findings import Findings, text
from .harness.libraries import TITLES
from .harness.targets import end_to_end, ratio
from .harness.turns import Turns, run_app

CONF = apps.CONF
PUBLISHED = {1: (46.9, 90.9, 7.7, 52.7), 7: (37.6, 91.5, 9.0, 54.6)}
"""Super Mario, by actors: milliseconds of a fetch and an update over gRPC, and over torch RPC with tensors in main memory; from
the plots of the first author's harness (github.com/mrshenli/grpc_benchmark)."""


@hydra.main(version_base="1.3", config_path=CONF, config_name="a3c")
def main(cfg: DictConfig) -> None:
    """All turns, then the table and the file. Fails where rdmarpc does."""
    run_app("a3c", Findings("Asynchronous reinforcement learning", "ms"), checked(cfg), run, judge)


def run(job: dict[str, Any], turns: Turns) -> None:
    common = job | {"register": f"{__package__}.training.learner", "drive": f"{__package__}.training.actor:drive"}
    common |= {"clients": job["actors"], "servers": 1, "calls": 1, "threads": 16, "functions": ["fetch", "push"]}
    for seed in job["seeds"]:
        for library in job["libraries"]:
            turns.take(common | {"library": library, "seed": seed}, library, f"{TITLES[library]}, seed {seed}")


def judge(findings: Findings, job: dict[str, Any], folder: Path) -> None:
    """The table, and the targets."""
    actors = job["actors"]
    counts = {(each["case"], each["what"]): each["n"] for each in findings.as_dict(job)["samples"]}
    rows = []
    for library in job["libraries"]:
        values = {case: findings.median(case, actors, library) for case in ("fetch", "update", "reached", "games", "moves")}
        seconds = None if values["reached"] is None else values["reached"] / 1e3
        turns = f"{counts.get(('reached', library), 0)} of {counts.get(('games', library), 0)}"
        row = [text(values["fetch"]), text(values["update"]), text(seconds), turns]
        rows.append([TITLES[library], *row, text(values["games"], "{:,.0f}"), text(values["moves"], "{:.0f}")])
    for number, (grpc_fetch, grpc_update, torch_fetch, torch_update) in PUBLISHED.items():
        for title, fetch, update in (("torch RPC", torch_fetch, torch_update), ("gRPC", grpc_fetch, grpc_update)):
            rows.append(
                [f"published: {title}, {number} actor{'s' * (number > 1)}", text(fetch), text(update), "-", "-", "-", "-"]
            )
    findings.table(
        f"{actors} actors over {job['device']}",
        ["library", "a fetch, ms", "an update, ms", f"s until {job['goal']:g} moves", "reached", "games", "moves"],
        rows,
        "Medians of the turns; fetch and update are those of actor 0. published: Super Mario, other machines, another network;"
        " the plots of PyTorch RPC's first author.",
        better="ms, s: lower is better; reached, and moves of a game: higher is better; games that were played: neither.",
    )
    for other in (each for each in job["libraries"] if each != "rdmarpc" and "rdmarpc" in job["libraries"]):
        both = [[findings.median(case, actors, each) for case in ("fetch", "update")] for each in (other, "rdmarpc")]
        sums = [None if None in each else sum(value for value in each if value is not None) for each in both]
        findings.target(f"a fetch and an update, times faster than {TITLES[other]}", ratio(*sums), "≥", 1, end_to_end(other))


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values, with `quick` applied; ends the program if it makes no sense."""
    job = apps.plain(cfg)
    if importlib.util.find_spec("gymnasium") is None:
        raise SystemExit("error: a3c needs gymnasium: pip install 'rdmarpc[examples]'")
    if job["quick"]:
        job |= {"seeds": job["seeds"][:1], "width": min(job["width"], 64), "most_games": min(job["most_games"], 60)}
    apps.some_of(job, libraries=TITLES)
    apps.device(job)
    apps.numbers(job, 0, "seeds")
    apps.at_least_one(job, "actors", "width", "most_games")
    return job


if __name__ == "__main__":
    apps.start(main)
