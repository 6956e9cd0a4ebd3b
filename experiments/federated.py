"""Federated learning over a slow link: FedAvg and FedSGD, ten clients, a model of 25 million parameters, 10 and 1 Gb/s.

    python -m experiments.federated
    python -m experiments.federated quick=true    # everything in conf/federated.yaml can be overridden

The server is in a network namespace of its own, behind a link of that rate in each direction. Local steps are sleeps; what goes
to the server and back is real, and every mean is checked. The run's folder receives federated.json.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from .harness import apps
from .harness.findings import Findings, available_gib, text, times
from .harness.libraries import TITLES
from .harness.targets import end_to_end, ratio
from .harness.turns import Turns, run_app

CONF = apps.CONF
COPIES = 7
"""Memory that a turn may need, in models for each client: its own, its result, what it must be, and as much at the server."""


@hydra.main(version_base="1.3", config_path=CONF, config_name="federated")
def main(cfg: DictConfig) -> None:
    """All turns, then the table and the file. Fails where rdmarpc does."""
    run_app("federated", Findings("Federated learning", "ms"), checked(cfg), run, judge)


def run(job: dict[str, Any], turns: Turns) -> None:
    from .training import federation_worker as worker
    from .training import namespaces

    needs = COPIES * job["clients"] * 4 * job["parameters"] / 2**30
    if (has := available_gib()) < needs:
        why = f"they may need {needs:.1f} GiB of memory, {has:.1f} GiB are available"
        turns.findings.left_out(f"{job['clients']} clients", why)
        return
    os.environ["RDMARPC_SECRET"] = secrets.token_hex(32)  # workers of several namespaces are as workers of several hosts
    drive = f"{__package__}.training.federation_worker:drive"
    common = job | {"device": "tcp", "drive": drive, "servers": 1, "calls": 1, "threads": job["clients"] + 2}
    common |= {"functions": ["averaged"]}
    for number in range(job["turns"]):
        for gbits in job["gbits"]:
            if reason := namespaces.leave() if gbits else "":
                turns.findings.left_out(rate(gbits), reason)
                continue
            for library in job["libraries"]:
                title = f"{TITLES[library]} at {rate(gbits)}, turn {number + 1} of {job['turns']}"
                turns.take(common | {"library": library, "gbits": gbits}, f"{library} {gbits:g}", title, worker.main)


def rate(gbits: float) -> str:
    return f"{gbits:g} Gb/s" if gbits else "loopback"


def judge(findings: Findings, job: dict[str, Any], folder: Path) -> None:
    """The table, and the targets."""
    from .training.federation_worker import METHODS

    libraries = job["libraries"]
    others = [each for each in libraries if each != "rdmarpc"] if "rdmarpc" in libraries else []
    rows = []
    for gbits in job["gbits"]:
        for method, title in METHODS.items():
            ms = {each: findings.median(method, job["clients"], f"{each} {gbits:g}") for each in libraries}
            # The server's link carries the model of every client in each direction, both at once at best.
            exchanges = job["local_steps"] if method == "fedsgd" else 1
            wire = exchanges * 32e-6 * job["parameters"] * job["clients"] / gbits if gbits else 0.0
            least = job["local_steps"] * job["compute_ms"] + wire
            cells = [text(ms[each], "{:,.0f}") for each in libraries]
            ratios = [times(ratio(ms[each], ms["rdmarpc"])) for each in others]
            rows.append([rate(gbits), title, f"{least:,.0f}", *cells, *ratios])
            for other in others:
                name = f"{title} at {rate(gbits)}: times faster than {TITLES[other]}"
                theirs, ours = ((method, job["clients"], f"{each} {gbits:g}") for each in (other, "rdmarpc"))
                findings.target_times(name, theirs, ours, "≥", 1, end_to_end(other))
    findings.table(
        f"{job['local_steps']} local steps of {job['clients']} clients, {job['parameters']:,} parameters, ms",
        ["link", "method", "least", *(TITLES[each] for each in libraries), *(f"times {TITLES[each]}" for each in others)],
        rows,
        "FedSGD exchanges after every step, FedAvg after the last. A local step is a sleep. least: the sleeps, and the time"
        " that all models of an exchange need through the server's link in one direction. All processes share this machine.",
        better="ms: lower is better; times: higher is better.",
    )


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values, with `quick` applied; ends the program if it makes no sense."""
    job = apps.plain(cfg)
    if job["quick"]:
        job |= {"parameters": min(job["parameters"], 1_000_000), "clients": min(job["clients"], 2), "turns": 1, "rounds": 1}
    apps.some_of(job, libraries=TITLES)
    apps.numbers(job, 0, "gbits")
    apps.at_least_one(job, "parameters", "clients", "local_steps", "rounds", "turns")
    return job


if __name__ == "__main__":
    apps.start(main)
