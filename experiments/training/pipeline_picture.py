"""The picture of the GPT pipeline: a group of bars for each model, number of stages and number of micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from ..harness.findings import Findings
from ..harness.pictures import BLUE, QUIET, SKY, STYLE, VERMILLION, save

COLOURS = {"alone": QUIET, "rdmarpc": BLUE, "torch_rpc": VERMILLION, "pipelining": SKY}


def draw_gpt(findings: Findings, job: dict[str, Any], titles: dict[str, str], cells: list[tuple[str, int]], path: Path) -> None:
    """Medians of milliseconds; ``cells``: cases and stages."""
    bars = {"alone": "one process", **{each: titles[each] for each in job["libraries"]}}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(11, 1.8 + 0.32 * len(cells) * (len(bars) + 1)))
        for at, (case, stages) in enumerate(cells):
            for row, (library, title) in enumerate(bars.items()):
                ms, y = findings.median(case, stages, library), at * (len(bars) + 1) + row
                if ms is not None:
                    axes.barh(y, ms, height=0.8, color=COLOURS[library], label=None if at else title)
                    axes.text(ms, y, f" {ms:,.1f}", va="center", fontsize=10)
        middles = [at * (len(bars) + 1) + (len(bars) - 1) / 2 for at in range(len(cells))]
        axes.set_yticks(middles, [f"{case}\n{stages} stages" for case, stages in cells])
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("milliseconds a batch, forward and backward (median)")
        axes.legend(frameon=False, ncols=len(bars), loc="lower left", bbox_to_anchor=(0, 1))
        save(figure, path)
