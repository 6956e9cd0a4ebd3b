"""A GPT in stages, by micro-batches: rdmarpc, torch RPC, and torch.distributed.pipelining over gloo, by turns, beside one
process. Their losses are those of one process.

    python -m experiments.gpt
    python -m experiments.gpt quick=true stages='[2]'    # everything in conf/gpt.yaml can be overridden

The run's folder receives gpt.json and gpt.png.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from .harness import apps
from .harness.findings import Findings, text, times
from .harness.targets import end_to_end, ratio
from .harness.turns import Turns, run_app
from .training.gpt_workers import main as worker

CONF = apps.CONF
TITLES = {"rdmarpc": "rdmarpc", "torch_rpc": "torch RPC", "pipelining": "torch pipelining"}


@hydra.main(version_base="1.3", config_path=CONF, config_name="gpt")
def main(cfg: DictConfig) -> None:
    """All turns, then the table, the file and the picture. Fails where rdmarpc does."""
    run_app("gpt", Findings("A GPT in stages", "ms"), checked(cfg), run, judge)


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values, with `quick` applied; ends the program if it makes no sense."""
    job = apps.plain(cfg)
    job["models"] = {name: model for name, model in job["models"].items() if model}
    apps.some_of(job, libraries=TITLES)
    apps.at_least_one(job, "rounds", "steps", "samples", "tokens", "vocabulary")
    if not job["models"]:
        raise SystemExit("error: models has none that is not null")
    apps.device(job)
    apps.numbers(job, 2, "stages")
    apps.numbers(job, 1, "micro_batches")
    if job["quick"]:
        job |= {"stages": job["stages"][:1], "models": dict([*job["models"].items()][:1]), "rounds": 1, "steps": 3}
    if any(job["samples"] % count for count in job["micro_batches"]):
        raise SystemExit(f"error: micro_batches={job['micro_batches']} must divide samples={job['samples']}")
    for name, model in job["models"].items():
        if model["blocks"] < max(job["stages"]) or model["width"] % model["heads"]:
            raise SystemExit(f"error: models.{name}={model}: a block a stage, and a width that heads divide, are needed")
    return job


def run(job: dict[str, Any], turns: Turns) -> None:
    for number in range(job["rounds"]):
        for name, model in job["models"].items():
            for stages in job["stages"]:
                for chunks in job["micro_batches"]:
                    case = f"{name}, {chunks} micro-batches"
                    given = job | model | {"case": case, "stages": stages, "chunks": chunks}
                    for library in ("alone", *job["libraries"]):
                        processes = 1 if library == "alone" else stages
                        title = f"{TITLES.get(library, 'one process')}, {case}, {stages} stages, round {number + 1}"
                        turns.take(given | {"library": library, "processes": processes}, library, title, worker)


def judge(findings: Findings, job: dict[str, Any], folder: Path) -> None:
    """The table, the targets and the picture."""
    from .training.pipeline_picture import draw_gpt

    others = [each for each in job["libraries"] if each != "rdmarpc"]
    rows = []
    cells = [
        (f"{name}, {count} micro-batches", stages)
        for name in job["models"]
        for stages in job["stages"]
        for count in job["micro_batches"]
    ]
    for case, stages in cells:
        ms = {each: findings.median(case, stages, each) for each in ("alone", *job["libraries"])}
        ratios = [ratio(ms[each], ms.get("rdmarpc")) for each in others]
        rows.append([case, str(stages), *map(text, ms.values()), *map(times, ratios)])
        for other in others if "rdmarpc" in ms else ():
            name = f"{case}, {stages} stages: a batch, times faster than {TITLES[other]}"
            findings.target_times(name, (case, stages, other), (case, stages, "rdmarpc"), "≥", 1, end_to_end(other))
    heads = [f"{TITLES[each]}, ms" for each in job["libraries"]]
    sizes = [f"{name}: {each['blocks']} blocks of width {each['width']}" for name, each in job["models"].items()]
    findings.table(
        f"A batch of {job['samples']} x {job['tokens']} tokens, forward and backward, {job['device']}",
        ["model", "stages", "one process, ms", *heads, *(f"times {TITLES[each]}" for each in others)],
        rows,
        f"{'; '.join(sizes)}; each stage is a process with one thread; more stages than cores share these. times: that"
        " library's time by rdmarpc's. torch pipelining: torch.distributed.pipelining over gloo. one process computes the same"
        " micro-batches one after the other. rdmarpc and torch pipelining run 1F1B (torch's needs as many"
        " micro-batches as stages and is GPipe below that), torch RPC all forwards at once, then one distributed backward."
        " Every library's losses, before and after a step of SGD, are those of one process.",
        better="ms: lower is better; times: higher is better.",
    )
    draw_gpt(findings, job, TITLES, cells, folder / "gpt.png")


if __name__ == "__main__":
    apps.start(main)
