"""The pictures: pieces and buckets, a step in parts, steps without synchronisation, more ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from ..harness.findings import Findings
from ..harness.pictures import BLUE, QUIET, SKY, STYLE, VERMILLION, plain_logarithmic, save
from . import ddp_report as report

COLOURS = {"rdmarpc": BLUE, "gloo": VERMILLION}


@contextmanager
def _figure(path: Path, count: int) -> Iterator[list[Any]]:
    """So many axes side by side; drawn to ``path`` at the end."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, count, figsize=(6.4 * count, 5.2), squeeze=False)
        yield list(axes[0])
        save(figure, path, dpi=120)


def draw(findings: Findings, job: dict[str, Any], folder: Path) -> list[str]:
    """All pictures of the parts that were measured. Returns their names."""
    pictures = {
        "ddp_granularity.png": ("granularity", _granularity),
        "ddp_buckets.png": ("buckets", _buckets),
        "ddp_breakdown.png": ("breakdown", _breakdown),
        "ddp_skipping.png": ("skipping", _skipping),
        "ddp_convergence.png": ("convergence", _convergence),
        "ddp_scaling.png": ("scaling", _scaling),
    }
    found = []
    for name, (part, picture) in pictures.items():
        if part in job["parts"]:
            picture(findings, job, folder / name)
            found.append(name)
    return found


def _line(axes: Any, points: dict[Any, float | None], *style: Any, **how: Any) -> None:
    known = {at: value for at, value in points.items() if value is not None}
    axes.plot(list(known), list(known.values()), *style, **how)


def _granularity(findings: Findings, job: dict[str, Any], path: Path) -> None:
    with _figure(path, 1) as (axes,):
        for group, colour in COLOURS.items():
            points = {count: findings.median("granularity, all", count, group) for count in job["granularity"]}
            _line(axes, points, "-o", color=colour, label=group)
        axes.set(xscale="log", yscale="log", xlabel="numbers in an all_reduce", ylabel="milliseconds in all")
        plain_logarithmic(axes.xaxis, axes.yaxis)
        axes.set_title(f"{job['numbers'] / 1e6:g} million float32, 2 ranks")
        axes.legend(frameon=False)


def _buckets(findings: Findings, job: dict[str, Any], path: Path) -> None:
    with _figure(path, len(job["models"])) as all_axes:
        for axes, model in zip(all_axes, job["models"]):
            for group, colour in COLOURS.items():
                for end, style in (("", "-o"), (" without overlap", "--o")):
                    points = {
                        f"{cap:g}": findings.median(f"buckets, {model}", int(cap * (1 << 20)), group + end)
                        for cap in job["caps_mb"]
                    }
                    _line(axes, points, style, color=colour, label=group + end)
            axes.set(xlabel="MiB of a bucket (0: one for each parameter)", ylabel="milliseconds of a step", title=model)
            axes.set_ylim(bottom=0)
            axes.legend(frameon=False, fontsize=11)


def _breakdown(findings: Findings, job: dict[str, Any], path: Path) -> None:
    colours = {"forward": SKY, "backward": BLUE, "exposed": VERMILLION, "hidden": "#cccccc"}
    titles = {
        "forward": "forward",
        "backward": "backward",
        "exposed": "communication, exposed",
        "hidden": "communication, hidden by overlap",
    }
    with _figure(path, len(job["models"])) as all_axes:
        for axes, model in zip(all_axes, job["models"]):
            for row, group in enumerate(report.GROUPS):
                found = report.breakdown(findings, model, group)
                left = 0.0
                for name, value in zip(colours, found or ()):
                    width = max(value, 0.0)
                    axes.barh(row, width, left=left, height=0.55, color=colours[name], label=None if row else titles[name])
                    left += width
            axes.set_yticks(range(len(report.GROUPS)), report.GROUPS)
            axes.set_ylim(len(report.GROUPS) - 0.4, -0.6)
            axes.set(xlabel="milliseconds of a step", title=model)
        all_axes[0].legend(frameon=False, fontsize=11, loc="lower center", bbox_to_anchor=(0.5, -0.42), ncol=2)


def _skipping(findings: Findings, job: dict[str, Any], path: Path) -> None:
    with _figure(path, len(job["models"])) as all_axes:
        for axes, model in zip(all_axes, job["models"]):
            for group, colour in COLOURS.items():
                points = {every: findings.median(f"skipping, {model}", every, group) for every in job["skip"]}
                _line(axes, points, "-o", color=colour, label=group)
            axes.set(xlabel="steps for each synchronised one", ylabel="milliseconds of a mean step", title=model)
            axes.set_xticks(job["skip"])
            axes.set_ylim(bottom=0)
            axes.legend(frameon=False)


def _smooth(losses: list[float], width: int) -> list[float]:
    """Means of neighbours, of each loss and those before it."""
    found = []
    for at in range(len(losses)):
        near = losses[max(0, at + 1 - width) : at + 1]
        found.append(sum(near) / len(near))
    return found


def _convergence(findings: Findings, job: dict[str, Any], path: Path) -> None:
    shades = plt.get_cmap("viridis")
    with _figure(path, len(job["trainings"])) as all_axes:
        for axes, training in zip(all_axes, job["trainings"]):
            for number, every in enumerate(job["skip"]):
                losses = report.losses(findings, training, every, "rdmarpc")
                colour = shades(0.85 * number / max(1, len(job["skip"]) - 1))
                axes.plot(_smooth(losses, 20), color=colour, label=f"every {every}", linewidth=1.6)
            axes.set(xlabel="batches", ylabel="loss (mean of 20)", title=f"batch {training[0]}, rate {training[1]:g}")
            axes.set_yscale("log")
            plain_logarithmic(axes.yaxis)
            axes.legend(frameon=False, title="synchronised")


def _scaling(findings: Findings, job: dict[str, Any], path: Path) -> None:
    with _figure(path, 1) as (axes,):
        for group, colour in COLOURS.items():
            points = {ranks: findings.median("scaling, step", ranks, group) for ranks in job["ranks"]}
            _line(axes, points, "-o", color=colour, label=f"{group}, measured on {job['cores']} cores")
            if beyond := report.steps_beyond(findings, job, group):
                axes.plot(list(beyond), list(beyond.values()), "--x", color=colour, label=f"{group}, simulated hosts")
        axes.axhline(job["compute_ms"], linestyle=":", color=QUIET, label="the emulated computation")
        axes.set_xscale("log", base=2)
        plain_logarithmic(axes.xaxis, base=2)
        axes.set(xlabel="ranks on this machine, or simulated hosts", ylabel="milliseconds of a step")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=11)
