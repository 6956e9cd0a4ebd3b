"""Time until a model is good: a convolutional net on images of CIFAR's size, a sequence-to-sequence model and an encoder of
sentences learn through a parameter server, over rdmarpc, torch RPC and gRPC by turns.

    python -m experiments.convergence
    python -m experiments.convergence quick=true    # everything in conf/convergence.yaml can be overridden

Model, data, seeds, hyperparameters and the bytes of a step are the same over each library, and so are the losses and the
weights, bit for bit: libraries differ in the time of a step alone. The run's folder receives convergence.json, convergence.png
(loss and held-out samples by seconds) and convergence_steps.png (what a step is made of).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from .harness import apps
from .harness.findings import Findings, size_text, text, times
from .harness.libraries import TITLES
from .harness.targets import ratio
from .harness.turns import Turns, main_with_results, run_app

CONF = apps.CONF
NAMES = ("images", "sequences", "sentences")
QUICK_STEPS = 5
FEWEST_TENSORS = 5
PARTS = ("computation", "at servers", "communication")
SOONER, SHARE = 1.3, 1 / 3
"""Asked: so many times sooner than torch RPC where communication is more than this share of torch RPC's step."""


@hydra.main(version_base="1.3", config_path=CONF, config_name="convergence")
def main(cfg: DictConfig) -> None:
    """All turns, then the tables, the file and the pictures. Fails if the libraries' losses or weights differ."""
    run_app("convergence", Findings("Convergence to a target", "ms"), checked(cfg), run, judge)


def run(job: dict[str, Any], turns: Turns) -> None:
    from .training import learning_server as server
    from .training import learning_trainer as trainer

    common = job | {"register": server.__name__, "drive": f"{trainer.__name__}:drive", "functions": server.NAMES, "calls": 1}
    common |= {"clients": job["workers"], "threads": job["workers"] + 2}
    for number in range(job["rounds"]):
        for problem in job["problems"]:
            for library in job["libraries"]:
                title = f"{TITLES[library]}, {problem}, round {number + 1} of {job['rounds']}"
                given = common | job[problem] | {"library": library, "problem": problem}
                turns.take(given, library, title, main_with_results, problem)


def judge(findings: Findings, job: dict[str, Any], folder: Path) -> None:
    """The tables, the targets and the pictures."""
    from .harness.pictures import draw_parts
    from .training.learning_picture import draw_curves

    rows, parts = [], []
    for problem in job["problems"]:
        theirs = findings.median(f"{problem}: to the target", 0, "torch_rpc")
        for library in job["libraries"]:
            step = {name: findings.median(f"{problem}: {name}", 0, library) for name in ("step", *PARTS)}
            reached = findings.median(f"{problem}: to the target", 0, library)
            share = ratio(step["communication"], step["step"])
            cells = [text(steps_of(findings, problem, library), "{:.0f}"), *(text(value) for value in step.values())]
            cells += [text(share, "{:.0%}"), text(None if reached is None else reached / 1e3), times(ratio(theirs, reached))]
            rows.append([problem, TITLES[library], *cells])
            parts.append((f"{problem}, {TITLES[library]}", {name: step[name] or 0.0 for name in PARTS}))
    columns = ["model", "library", "steps", "a step, ms", *(f"{name}, ms" for name in PARTS)]
    findings.table(
        f"workers: {job['workers']}, servers: {job['servers']}, {job['device']}",
        [*columns, "share", "s to the target", "times torch RPC"],
        rows,
        "Medians. computation: gradients of a batch, one thread. at servers: from the arrival of worker 0's gradients until"
        " the step is made, so with the wait for other workers. communication: what is left of the calls; share: of a step."
        " All turns of a model must have the same losses and weights, bit for bit, so they take the same number of steps.",
        better="ms, s, share: lower is better; times (torch RPC's by that library's): higher is better.",
    )
    findings.table(
        "The models",
        ["model", "is", "learned until", "parameters", "tensors", "average tensor"],
        models(findings, job),
        better="Sizes: neither lower nor higher is better.",
    )
    for problem in job["problems"] if {"rdmarpc", "torch_rpc"} <= set(job["libraries"]) else ():
        judge_one(findings, problem)
    draw_curves(findings, job, folder / "convergence.png")
    draw_parts(parts, "milliseconds a step (medians)", folder / "convergence_steps.png")


def judge_one(findings: Findings, problem: str) -> None:
    """How much sooner than with torch RPC; without a target reached, nothing was measured."""
    ours, theirs = ((f"{problem}: to the target", 0, each) for each in ("rdmarpc", "torch_rpc"))
    share = ratio(*(findings.median(f"{problem}: {name}", 0, "torch_rpc") for name in ("communication", "step")))
    asked = SOONER if share is not None and share > SHARE else 1.0
    name = f"{problem}: the target is reached, times sooner than with torch RPC"
    if share is not None:
        name += f" (communication is {share:.0%} of its step)"
    findings.target_times(name, theirs, ours, "≥", asked, "end_to_end" if asked == 1 else "sooner")


def steps_of(findings: Findings, problem: str, library: str) -> int | None:
    """How many steps a turn made."""
    return max(
        (size for case, size, what in findings.measured() if (case, what) == (f"{problem}: loss", library)), default=None
    )


def models(findings: Findings, job: dict[str, Any]) -> list[list[str]]:
    from .training.problems import PROBLEMS

    rows = []
    for name in job["problems"]:
        counts = [
            next((found for library in job["libraries"] if (found := findings.median(f"{name}: {what}", 0, library))), None)
            for what in ("parameters", "tensors")
        ]
        average = ratio(*counts)
        until = f"{job[name]['target']:.0%} {PROBLEMS[name].good}"
        sizes = [*(text(count, "{:,.0f}") for count in counts), "-" if average is None else size_text(int(4 * average))]
        rows.append([name, PROBLEMS[name].title, until, *sizes])
    return rows


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values, with `quick` applied; ends the program if it makes no sense."""
    job = apps.plain(cfg)
    apps.some_of(job, libraries=TITLES, problems=NAMES)
    apps.device(job)
    apps.at_least_one(job, "workers", "servers", "look_every", "rounds")
    if job["servers"] > FEWEST_TENSORS:
        raise SystemExit(f"error: servers={job['servers']} must be at most {FEWEST_TENSORS}: a model has no more tensors")
    for problem in NAMES:
        named = {f"{problem}.{name}": value for name, value in job[problem].items()}
        apps.at_least_one(named, *(f"{problem}.{name}" for name in ("width", "batch", "most_steps")))
        if not 0 < job[problem]["target"] <= 1:
            raise SystemExit(f"error: {problem}.target={job[problem]['target']} must be a share, above 0 and at most 1")
    if job["quick"]:
        job["rounds"] = 1
        for problem in NAMES:
            job[problem]["most_steps"] = min(job[problem]["most_steps"], QUICK_STEPS)
    return job


if __name__ == "__main__":
    apps.start(main)
