"""Loss, and what was found on held-out samples, against seconds: a column a problem, a line a library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from ..harness.findings import Findings
from ..harness.libraries import TITLES
from ..harness.pictures import BLUE, QUIET, SKY, STYLE, VERMILLION, save
from .problems import PROBLEMS

COLOURS = {"rdmarpc": BLUE, "torch_rpc": VERMILLION, "grpc": SKY}


def draw_curves(findings: Findings, job: dict[str, Any], path: Path) -> None:
    problems = job["problems"]
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(2, len(problems), figsize=(5.6 * len(problems), 7.4), squeeze=False, sharex="col")
        for (above, below), problem in zip(panels.T, problems):
            for library in job["libraries"]:
                look = {"color": COLOURS[library], "label": TITLES[library], "lw": 2, "marker": "."}
                above.plot(*_curve(findings, problem, "loss", library), **look)
                below.plot(*_curve(findings, problem, "held out", library), **look)
            below.axhline(job[problem]["target"], color=QUIET, ls=":", lw=1)
            above.set_title(problem, loc="left")
            above.set_ylim(0)
            below.set_ylim(0, 1)
            above.set_ylabel("loss")
            below.set_ylabel(PROBLEMS[problem].good, fontsize=11)
            below.set_xlabel("seconds of training")
        panels[0][0].legend(frameon=False)
        note = f"Workers: {job['workers']}, servers: {job['servers']}, one machine, {job['device']}; medians of the turns;\n"
        note += "dotted: the target. Every library takes the same steps, bit for bit."
        figure.text(0.01, 0.01, note, fontsize=9.5, color=QUIET)
        save(figure, path, rect=(0, 0.06, 1, 1))


def _curve(findings: Findings, problem: str, name: str, library: str) -> tuple[list[float], list[float]]:
    """Seconds, and values then; medians of all turns."""
    steps = sorted(size for case, size, what in findings.measured() if (case, what) == (f"{problem}: {name}", library))
    seconds = [(findings.median(f"{problem}: ms", each, library) or 0.0) / 1e3 for each in steps]
    return seconds, [findings.median(f"{problem}: {name}", each, library) or 0.0 for each in steps]
