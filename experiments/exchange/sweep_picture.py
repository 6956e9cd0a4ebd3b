"""The picture of mini-batches end to end: a panel a model, a group of bars for each number of workers and servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from ..harness.findings import Findings
from ..harness.pictures import BLUE, INK, QUIET, SKY, STYLE, VERMILLION, save
from .sweep import ALONE, NAMES, Case, cases, key, libraries

COLOURS = {ALONE: QUIET, "rdmarpc": BLUE, "torch_rpc": VERMILLION, "grpc": SKY}
COLUMNS = 2
GROUP = 0.8
"""Width of all bars of a group; the next one begins 1 further right."""
INCHES = 0.95
"""Of a group."""


def draw_sweep(findings: Findings, job: dict[str, Any], path: Path) -> None:
    found = {model: [each for each in cases(job) if each.model == model] for model in job["models"]}
    shown = {model: groups for model, groups in found.items() if any(_steps(findings, each, job) for each in groups)}
    if not shown:
        return
    columns = min(COLUMNS, len(shown))
    lines = -(-len(shown) // columns)
    width = max(4.6, 1.2 + INCHES * max(map(len, shown.values())))
    with plt.rc_context(STYLE | {"font.size": 11}):
        size = max(8.5, width * columns), 1.6 + 3.2 * lines
        figure, panels = plt.subplots(lines, columns, figsize=size, squeeze=False)
        for axes in panels.flat[len(shown) :]:
            axes.axis("off")
        for axes, (model, groups) in zip(panels.flat, shown.items()):
            _panel(axes, findings, model, groups, job)
        handles, labels = panels.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, ncols=len(labels), loc="upper left")
        note = (
            f"Milliseconds a mini-batch, lower is better; medians of n = {job['end_to_end_rounds']}. Darker, below: forward and"
            " backward of worker 0.\nAbove it: gradients to the servers, their step, weights back, the wait for slower workers."
            f"\nOne process computes the batches of all workers. One machine, {job['device']}; w: workers, s: servers."
        )
        figure.text(0.01, 0.01, note, fontsize=9, color=QUIET, ha="left", va="bottom")
        save(figure, path, rect=(0, 0.75 / size[1], 1, 1 - 0.4 / size[1]))


def _steps(findings: Findings, case: Case, job: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """{library: (computation, whole step)} of those that were measured."""
    found = {}
    for library in (ALONE, *libraries(job)):
        computation, step = (findings.median(*key(case, part, library)) for part in ("computation", "step"))
        if computation is not None and step is not None:
            found[library] = computation, step
    return found


def _panel(axes: Axes, findings: Findings, model: str, groups: list[Case], job: dict[str, Any]) -> None:
    names = [ALONE, *libraries(job)]
    wide = GROUP / len(names)
    for at, case in enumerate(groups):
        for library, (computation, step) in _steps(findings, case, job).items():
            left = at - GROUP / 2 + wide * names.index(library)
            look: dict[str, Any] = {"width": 0.92 * wide, "align": "edge", "color": COLOURS[library]}
            axes.bar(left, step, label=NAMES[library] if at == 0 else None, **look)
            axes.bar(left, computation, alpha=0.35, **(look | {"color": INK}))
    marks = [f"{each.workers}w {each.servers}s" + (f"\n{each.placement}" if each.servers > 1 else "") for each in groups]
    axes.set_xticks(range(len(groups)), [mark.replace("round_robin", "in turn") for mark in marks], fontsize=9)
    axes.set_title(f"{model}, batch {job['batch'][model]}", loc="left", fontweight="bold")
    axes.set_ylabel("ms a mini-batch")
