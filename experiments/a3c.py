"""Asynchronous reinforcement learning (A3C) on gymnasium's CartPole: actors fetch a global network and push gradients; how
long a fetch and an update take, and how long it takes to a reward, over rdmarpc, torch RPC and gRPC by turns.

    python -m experiments.a3c
    python -m experiments.a3c quick=true    # everything in conf/a3c.yaml can be overridden

Seeds fix the network and the games, but not the order in which gradients come: times to the reward differ from run to run. The
run's folder receives a3c.json.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from .harness.findings import Findings, print_findings, ratio, text

CONF = str(Path(__file__).parent / "conf")
PUBLISHED = {1: (46.9, 90.9, 7.7, 52.7), 7: (37.6, 91.5, 9.0, 54.6)}
"""Super Mario, by actors: milliseconds of a fetch and an update over gRPC, and over torch RPC with tensors in main memory; from
the plots of the first author's harness (github.com/mrshenli/grpc_benchmark)."""


@hydra.main(version_base="1.3", config_path=CONF, config_name="a3c")
def main(cfg: DictConfig) -> None:
    """All turns, then the table and the file. Fails where rdmarpc does."""
    job = checked(cfg)
    folder = Path(HydraConfig.get().runtime.output_dir)
    findings = Findings("Asynchronous reinforcement learning", "ms")
    try:
        failed = run(job, folder, findings)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    judge(findings, job)
    found = findings.write(folder, "a3c", job)
    print_findings(found)
    print(f"a3c.json is in {folder}")
    if failed:
        raise SystemExit(f"error: {failed}")


def run(job: dict[str, Any], folder: Path, findings: Findings) -> str:
    """All turns. Returns why rdmarpc failed, if it did; other libraries that fail are left out from then on."""
    from .peers.libraries import TITLES
    from .peers.turns import missing, turn

    common = job | {"register": f"{__package__}.actors.learner", "drive": f"{__package__}.actors.actor:drive"}
    common |= {"clients": job["actors"], "servers": 1, "calls": 1, "threads": 16, "functions": ["fetch", "push"]}
    out: set[str] = set()
    failed = ""
    for seed in job["seeds"]:
        for library in (each for each in job["libraries"] if each not in out):
            print(f"seed {seed}: {TITLES[library]}", flush=True)
            given = common | {"library": library, "seed": seed}
            reason = missing(library, job["device"]) or turn(given, folder, partial(findings.keep, library))
            if reason:
                out.add(library)
                findings.left_out(TITLES[library], reason)
                failed = f"{TITLES[library]}: {reason}" if library == "rdmarpc" else failed
    return failed


def judge(findings: Findings, job: dict[str, Any]) -> None:
    """The table, and the targets."""
    from .peers.libraries import TITLES

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
            rows.append([f"published: {title}, {number} actors", text(fetch), text(update), "-", "-", "-", "-"])
    findings.table(
        f"{actors} actors over {job['device']}",
        ["library", "a fetch, ms", "an update, ms", f"s until {job['goal']:g} moves", "reached", "games", "moves"],
        rows,
        "Medians of the turns; fetch and update are those of actor 0. published: Super Mario, other machines, another network;"
        " the plots of PyTorch RPC's first author.",
    )
    for other in (each for each in job["libraries"] if each != "rdmarpc" and "rdmarpc" in job["libraries"]):
        both = [[findings.median(case, actors, each) for case in ("fetch", "update")] for each in (other, "rdmarpc")]
        sums = [None if None in each else sum(value for value in each if value is not None) for each in both]
        findings.target(f"a fetch and an update, times faster than {TITLES[other]}", ratio(*sums), "≥", 1)


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values, with `quick` applied; ends the program if it makes no sense."""
    from .peers.libraries import TITLES

    job: Any = OmegaConf.to_container(cfg, resolve=True)
    if importlib.util.find_spec("gymnasium") is None:
        raise SystemExit("error: a3c needs gymnasium: pip install 'rdmarpc[examples]'")
    if job["quick"]:
        job |= {"seeds": job["seeds"][:1], "width": min(job["width"], 64), "most_games": min(job["most_games"], 60)}
    if not job["libraries"] or not set(job["libraries"]) <= set(TITLES):
        raise SystemExit(f"error: libraries={job['libraries']} must be some of {', '.join(TITLES)}")
    if not job["seeds"]:
        raise SystemExit("error: seeds=[] must name at least one")
    for name in ("actors", "width", "most_games"):
        if job[name] < 1:
            raise SystemExit(f"error: {name}={job[name]} must be at least 1")
    return job


if __name__ == "__main__":
    main()
