"""Message sizes from 4 bytes to 1 GB in five ways, the micro-benchmark of "Fast Distributed Deep Learning over RDMA":
one tensor a step to a consumer that takes its maximum.

    python -m experiments.sizes
    python -m experiments.sizes quick=true devices=[shm]    # everything in conf/sizes.yaml can be overridden

The ways: gRPC, torch RPC (over ibv where there is RDMA), a call of rdmarpc, and a prepared write with and without a copy at the
sender. Each turn has new processes. The run's folder receives sizes.json and sizes.png.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from .harness import apps
from .harness.findings import Findings, available_gib, text, times
from .harness.targets import ratio
from .harness.turns import Turns, run_app
from .harness.turns import main as by_calls

CONF = apps.CONF
DEVICES = ("shm", "tcp", "verbs")
WAYS = {
    "grpc": "gRPC",
    "torch_rpc": "torch RPC",
    "rdmarpc": "a call of rdmarpc",
    "sender_copy": "write, copied at the sender",
    "zero_copy": "write, zero-copy",
}
QUICK_ROUNDS, QUICK_UP_TO = 1, 4 << 20


@hydra.main(version_base="1.3", config_path=CONF, config_name="sizes")
def main(cfg: DictConfig) -> None:
    """All rounds, then the tables, the file and the picture. Fails where one of our ways does."""
    run_app("sizes", Findings("Message sizes", "us"), checked(cfg), run, judge)


def judge(findings: Findings, job: dict[str, Any], folder: Path) -> None:
    """The tables, the targets and the picture."""
    from .latency.sizes_picture import draw_sizes

    for device in job["devices"]:
        judge_device(findings, job, device)
    draw_sizes(findings, job, WAYS, folder / "sizes.png")


def run(job: dict[str, Any], turns: Turns) -> None:
    from .latency.sizes_producer import main as by_writes

    for part, way, device in parts(job, turns.findings):
        title = f"{WAYS[way]} over {device}, {part['title']}"
        entry = by_writes if way.endswith("copy") else by_calls
        turns.take(part | {"library": way, "device": device}, f"{way} {device}", title, entry)


def parts(job: dict[str, Any], findings: Findings) -> Iterator[tuple[dict[str, Any], str, str]]:
    """(what a turn measures, way, device): the small sizes together, then each large one where there is memory for it."""
    drive = f"{__package__}.latency.sizes_producer:drive"
    one = {"clients": 1, "servers": 1, "calls": 1, "threads": 16, "functions": ["identity", "largest"], "drive": drive}
    small = [size for size in job["sizes"] if size < job["large"]]
    for sizes in [small, *([size] for size in job["sizes"] if size >= job["large"])]:
        rounds = job["rounds"] if sizes == small else job["rounds_large"]
        for number in range(rounds if sizes else 0):
            for device, way in ((device, way) for device in job["devices"] for way in job["ways"]):
                needs = job["memory"][way] * sizes[-1] / 2**30
                if sizes != small and (has := available_gib()) < needs:
                    why = f"it may need {needs:.1f} GiB of memory, {has:.1f} GiB are available"
                    findings.left_out(f"{sizes[-1]:,} bytes by {WAYS[way]} over {device}", why)
                    continue
                title = f"{sizes[0]:,} to {sizes[-1]:,} bytes, round {number + 1} of {rounds}"
                yield job | one | {"sizes": sizes, "title": title}, way, device


def judge_device(findings: Findings, job: dict[str, Any], device: str) -> None:
    """The table and the targets of one device."""
    rows, others = [], [way for way in job["ways"] if way != "zero_copy"]
    for size in job["sizes"]:
        us = {way: findings.median("step", size, f"{way} {device}") for way in job["ways"]}
        if all(value is None for value in us.values()):
            continue
        ours = us.get("zero_copy")
        rows.append(
            [f"{size:,}", *(text(us[way], "{:,.1f}") for way in job["ways"]), *(times(ratio(us[way], ours)) for way in others)]
        )
        for other, least in job["targets"].items():
            if other in us and ours is not None:
                name = f"{size:,} bytes over {device}: zero-copy, times faster than {WAYS[other]}"
                over, under = (("step", size, f"{way} {device}") for way in (other, "zero_copy"))
                findings.target_times(name, over, under, "≥", least)
    if rows:
        columns = ["bytes", *(WAYS[way] for way in job["ways"]), *(f"times {WAYS[way]}" for way in others)]
        note = (
            "A step: the tensor is there, its maximum is taken, and the answer is back. times: of that way's time by the"
            " zero-copy write's. The paper, as it is remembered and not verified: 1.7 to 61 times faster than gRPC, 1.3 to 14"
            " times than an RPC over RDMA, 1.2 to 1.8 times than with a copy at the sender, on another machine."
        )
        findings.table(
            f"A step over {device}, microseconds",
            columns,
            rows,
            note,
            better="Microseconds: lower is better; times: higher is better.",
        )


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values, with `quick` applied; ends the program if it makes no sense."""
    job = apps.plain(cfg)
    if job["quick"]:
        job["sizes"] = [size for size in job["sizes"] if size <= QUICK_UP_TO]
        job["rounds"] = min(job["rounds"], QUICK_ROUNDS)
    apps.some_of(job, devices=DEVICES, ways=WAYS)
    apps.numbers(job, 4, "sizes")
    if any(size % 4 for size in job["sizes"]):
        raise SystemExit(f"error: sizes={job['sizes']} must be numbers of bytes of float32 tensors")
    apps.at_least_one(job, "rounds", "rounds_large")
    return job


if __name__ == "__main__":
    apps.start(main)
