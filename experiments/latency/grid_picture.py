"""The grid's picture: a bar for each library, cell by cell, on a logarithmic scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from ..harness.findings import Findings
from ..harness.libraries import TITLES
from ..harness.pictures import BLUE, INK, QUIET, SKY, STYLE, VERMILLION, plain_logarithmic, save
from .grid_tables import OTHERS, PUBLISHED, cells_of, title

COLOURS = {"rdmarpc": BLUE, "torch_rpc": VERMILLION, "grpc": SKY}


def draw_grid(findings: Findings, job: dict[str, Any], path: Path) -> None:
    """A panel for each device; diamonds are the published figures."""
    devices = [device for device in job["devices"] if cells_of(findings, job, device)]
    if not devices:
        return
    with plt.rc_context(STYLE):
        rows = max(len(cells_of(findings, job, device)) for device in devices)
        figure, panels = plt.subplots(1, len(devices), figsize=(8 * len(devices), 2 + 0.75 * rows), squeeze=False)
        for axes, device in zip(panels[0], devices):
            cells = cells_of(findings, job, device)
            for at, (size, name) in enumerate(cells):
                for number, library in enumerate(job["libraries"]):
                    ms = findings.median(f"{name} delay", size, f"{library} {device}")
                    if ms is not None:
                        label = TITLES[library] if not at else None
                        axes.barh(at + 0.27 * (number - 1), ms, height=0.25, color=COLOURS[library], label=label)
                    if library in OTHERS and (published := PUBLISHED.get((name, size))):
                        place = published[OTHERS[library]], at + 0.27 * (number - 1)
                        axes.plot(*place, "D", color="white", markeredgecolor=INK, markersize=7)
            axes.set_xscale("log")
            plain_logarithmic(axes.xaxis)
            axes.set_yticks(range(len(cells)), [title(size, name, job) for size, name in cells], fontsize=10)
            axes.invert_yaxis()
            axes.set_xlabel("milliseconds a call (median)")
            axes.set_title(device, loc="left")
            axes.legend(frameon=False, fontsize=10)
        figure.text(
            0.01,
            0.01,
            "diamonds: published for that library in PyTorch RPC's paper, another machine",
            fontsize=9.5,
            color=QUIET,
        )
        save(figure, path, rect=(0, 0.03, 1, 1))
