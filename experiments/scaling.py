"""More workers: mini-batches a second of 1 to 8 workers that train one model with parameter servers, and a simulation beyond.

    python -m experiments.scaling
    python -m experiments.scaling quick=true    # everything in conf/scaling.yaml can be overridden

The computation is emulated: each worker sleeps for as long as the paper's GPUs computed, because a machine with two cores
cannot compute for eight. The communication is real, of all workers at once, in processes of their own. What is beyond eight
workers is simulated, by arithmetic over the measured latency and bandwidth. The run's folder receives scaling.json and
scaling.png.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from .harness import apps
from .harness.findings import Findings, text
from .harness.libraries import TITLES
from .harness.turns import Turns, run_app
from .training.scaling_simulated import COMPUTE_MS

CONF = apps.CONF


@hydra.main(version_base="1.3", config_path=CONF, config_name="scaling")
def main(cfg: DictConfig) -> None:
    """All turns, then the tables, the file and the picture. Fails where rdmarpc does."""
    run_app("scaling", Findings("More workers", "ms"), checked(cfg), run, judge)


def run(job: dict[str, Any], turns: Turns) -> None:
    common = job | {"drive": f"{__package__}.training.scaling_worker:drive", "calls": 1, "threads": 16}
    common |= {"functions": ["swapped", "identity"]}
    for number in range(job["rounds"]):
        for count in job["workers"]:
            servers = min(job["servers"], count)
            for library in job["libraries"]:
                title = f"{TITLES[library]}, {count} workers and {servers} servers, round {number + 1} of {job['rounds']}"
                turns.take(common | {"library": library, "clients": count, "servers": servers}, library, title)


def judge(findings: Findings, job: dict[str, Any], folder: Path) -> None:
    """The tables, the targets and the picture."""
    from .training import scaling_simulated as simulated
    from .training.scaling_picture import draw_scaling

    compute, libraries = job["compute_ms"], job["libraries"]
    rows = []
    for count in job["workers"]:
        steps = [findings.median("step", count, library) for library in libraries]
        ups = [None if step is None else count * compute / step for step in steps]
        rows.append([str(count), str(min(job["servers"], count)), *map(text, steps), *map(text, ups)])
    heads = [*(f"{TITLES[each]}, ms" for each in libraries), *(f"{TITLES[each]}, speed-up" for each in libraries)]
    how = f"computation of {compute:g} ms emulated, {job['placement']}"
    findings.table(
        f"Measured: a mini-batch of {job['net']} over {job['device']}, {how}",
        ["workers", "servers", *heads],
        rows,
        "speed-up: mini-batches a second of all workers, by those of one that computes alone and exchanges nothing. The"
        " computation is a sleep; the communication of all workers shares this machine's cores and memory.",
        better="ms: lower is better; speed-up: higher is better.",
    )
    found: dict[str, dict[int, float]] = {}
    for library in libraries:
        exchange, latency = findings.median("exchange", 1, library), findings.median("latency", 1, library)
        if exchange is not None and latency is not None:
            rate = simulated.bandwidth(job["tensors"], exchange, latency)
            found[library] = {n: simulated.speed_up(n, job["tensors"], compute, latency, rate) for n in job["hosts"]}
    if found:
        rows = [[str(n), *(text(found[each][n], "{:,.1f}") for each in found)] for n in job["hosts"]]
        note = (
            "Arithmetic, not a measurement: one worker and one server a host, tensors dealt out round-robin, links that do not"
            " disturb each other, with the latency and bandwidth that were measured between one worker and one server here."
        )
        findings.table(
            "Simulated: speed-up of more hosts",
            ["hosts", *(TITLES[each] for each in found)],
            rows,
            note,
            better="Higher is better.",
        )
    if "rdmarpc" in libraries and "torch_rpc" in libraries:
        for count in job["workers"]:
            name = f"{count} worker{'s' * (count > 1)}: a mini-batch, times faster than torch RPC"
            findings.target_times(name, ("step", count, "torch_rpc"), ("step", count, "rdmarpc"), "≥", 1, "end_to_end")
    draw_scaling(findings, found, job, folder / "scaling.png")


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values, with `quick` applied; ends the program if it makes no sense."""
    from .exchange.models import MODELS
    from .training.scaling_worker import PLACEMENTS

    job = apps.plain(cfg)
    if job["quick"]:
        job |= {"rounds": 1, "net": "GRU", "steps": min(job["steps"], 5)}
        job["workers"] = [count for count in job["workers"] if count <= 2]
    if job["net"] not in MODELS:
        raise SystemExit(f"error: net={job['net']} must be one of {', '.join(MODELS)}")
    if job["compute_ms"] is None and job["net"] not in COMPUTE_MS:
        raise SystemExit(f"error: net={job['net']} needs compute_ms=: the paper did not measure it")
    apps.some_of(job, libraries=TITLES)
    apps.device(job)
    apps.numbers(job, 1, "workers", "hosts")
    apps.at_least_one(job, "servers", "steps", "rounds")
    if job["placement"] not in PLACEMENTS:
        raise SystemExit(f"error: placement={job['placement']} must be one of {', '.join(PLACEMENTS)}")
    job["compute_ms"] = COMPUTE_MS[job["net"]] if job["compute_ms"] is None else job["compute_ms"]
    import torch

    with torch.device("meta"):
        net = MODELS[job["net"]].make()
    job["tensors"] = [parameter.numel() for parameter in net.parameters()]
    return job


if __name__ == "__main__":
    apps.start(main)
