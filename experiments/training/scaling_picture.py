"""Speed-up against workers: what was measured as lines, what was simulated as dashes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from ..harness.findings import Findings
from ..harness.libraries import TITLES
from ..harness.pictures import BLUE, QUIET, SKY, STYLE, VERMILLION, plain_logarithmic, save

COLOURS = {"rdmarpc": BLUE, "torch_rpc": VERMILLION, "grpc": SKY}


def draw_scaling(findings: Findings, simulated: dict[str, dict[int, float]], job: dict[str, Any], path: Path) -> None:
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(9, 6))
        for library in job["libraries"]:
            steps = {count: findings.median("step", count, library) for count in job["workers"]}
            measured = {count: count * job["compute_ms"] / step for count, step in steps.items() if step is not None}
            axes.plot(list(measured), list(measured.values()), "-o", color=COLOURS[library], label=TITLES[library])
            if beyond := simulated.get(library):
                axes.plot(list(beyond), list(beyond.values()), "--", marker="x", color=COLOURS[library])
        counts = [*job["workers"], *job["hosts"]]
        axes.plot(counts, counts, ":", color=QUIET, label="computation alone")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        plain_logarithmic(axes.xaxis, axes.yaxis, base=2)
        axes.set_xlabel("workers (lines: measured here, computation emulated) or hosts (dashes: simulated)")
        axes.set_ylabel("speed-up")
        axes.legend(frameon=False)
        save(figure, path)
