"""The picture of a program: one figure of both libraries, a panel a case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from ..harness.findings import Findings
from ..harness.libraries import TITLES
from ..harness.pictures import BLUE, QUIET, STYLE, VERMILLION, save

COLOURS = {"rdmarpc": BLUE, "torch_rpc": VERMILLION}


def draw(findings: Findings, job: dict[str, Any], name: str, axis: str, size_title: str, path: Path) -> None:
    """Medians over the number of processes, or as bars where there is one; marks from the tenth to the ninetieth percentile."""
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, len(job["cases"]), figsize=(6.5 * len(job["cases"]), 4.6), squeeze=False)
        samples = findings.as_dict(job)["samples"]
        all_sizes = sorted({each["size"] for each in samples})
        for axes, case in zip(panels[0], job["cases"]):
            for library in job["libraries"]:
                found = sorted(
                    (each for each in samples if each["case"] == f"{case}: {name}" and each["what"] == library),
                    key=lambda each: each["size"],
                )
                middle = [each["median"] for each in found]
                around = [[each["median"] - each["p10"] for each in found], [each["p90"] - each["median"] for each in found]]
                sizes = [each["size"] for each in found]
                look = {"color": COLOURS[library], "label": TITLES[library], "capsize": 4}
                if len(all_sizes) > 1:
                    axes.errorbar(sizes, middle, yerr=around, marker="o", **look)
                else:
                    axes.bar([TITLES[library]] * len(middle), middle, yerr=around, width=0.5, **look)
            if len(all_sizes) > 1:
                axes.set_xticks(all_sizes)
                axes.legend(frameon=False)
            axes.set_ylim(0)
            axes.set_xlabel(size_title if len(all_sizes) > 1 else f"{all_sizes[0] if all_sizes else 'no'} {size_title}")
            axes.set_ylabel(axis)
            axes.set_title(case, loc="left")
        figure.text(
            0.01, 0.01, f"{job['device']}, one machine; medians, tenth to ninetieth percentile", fontsize=9.5, color=QUIET
        )
        save(figure, path, rect=(0, 0.04, 1, 1))
