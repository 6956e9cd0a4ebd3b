"""The mini-batch benchmark's picture: computation and communication of every model, by the library that moved the tensors."""

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from ..harness.pictures import INK, QUIET, SKY, STYLE, VERMILLION, save
from .report import WAYS

COLUMNS = 4
"""Panels side by side, at most."""
NARROWEST = 8.5
"""Inches; for this the title and the lines below have room."""


def draw_minibatch(result: dict[str, Any], path: Path) -> None:
    """A panel a model, a bar a way: computation, then communication."""
    rows = result["rows"]
    columns = min(COLUMNS, len(rows))
    lines = -(-len(rows) // columns)
    with plt.rc_context(STYLE | {"font.size": 11}):
        figure, panels = plt.subplots(
            lines, columns, figsize=(max(NARROWEST, 4.25 * columns), 1.6 + 2.9 * lines), squeeze=False
        )
        for axes, row in zip(panels.flat, rows):
            _panel(axes, row)
        for axes in list(panels.flat)[len(rows) :]:
            axes.axis("off")
        size = 18 if columns == COLUMNS else 11
        figure.suptitle(_finding(rows), x=0.01, ha="left", fontsize=size, fontweight="bold")
        figure.text(0.01, 0.01, _how_measured(result), fontsize=min(10, size), color=QUIET, ha="left", va="bottom")
        save(figure, path, rect=(0, 0.09, 0.985, 0.99))


def _panel(axes: Axes, row: dict[str, Any]) -> None:
    ways = [way for way in WAYS if row[f"{way}_ms"] is not None]
    computation = row["computation_ms"] or 0.0
    longest = computation + max(row[f"{way}_ms"] for way in ways)
    for at, way in enumerate(ways):
        communication = row[f"{way}_ms"]
        axes.barh(at, computation, height=0.62, color=SKY)
        axes.barh(at, communication, left=computation, height=0.62, color=VERMILLION)
        axes.text(
            computation + communication + 0.02 * longest,
            at,
            f"{communication:,.1f}",
            va="center",
            color=VERMILLION,
            fontweight="bold",
        )
    floor = computation + row["floor_ms"]
    axes.plot([floor, floor], [-0.45, len(ways) - 0.55], color=INK, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(ways)), [WAYS[way].replace(", ", "\n") for way in ways])
    axes.set_ylim(len(ways) - 0.4, -0.6)
    axes.set_xlim(0, longest * 1.25)
    axes.spines["left"].set_visible(False)
    axes.tick_params(length=0)
    of = f"computation {computation:,.0f} ms" if row["computation_ms"] else "computation not measured"
    average = row["average_kib"]
    size = f"{average / 1024:,.1f} MiB" if average >= 1024 else f"{average:,.0f} KiB"
    axes.set_title(f"{row['model']}: {row['mib']:,.1f} MiB", loc="left", fontsize=12.5, fontweight="bold", pad=20)
    axes.text(
        0, 1.03, f"{row['tensors']} tensors of {size} on average; {of}", transform=axes.transAxes, fontsize=8.5, color=QUIET
    )
    axes.set_xlabel("milliseconds a mini-batch")


def _finding(rows: list[dict[str, Any]]) -> str:
    torch_rpc = [row["times_faster_than_torch_rpc"] for row in rows if row["times_faster_than_torch_rpc"] is not None]
    floor = [row["times_floor"] for row in rows]
    said = f"Weights and gradients cross in {_span(floor, '.2f')} times a memcpy"
    return f"{said}, {_span(torch_rpc, '.1f')} times faster than torch RPC" if torch_rpc else said


def _span(values: list[float], form: str) -> str:
    return " to ".join(dict.fromkeys(format(value, form) for value in (min(values), max(values))))


def _how_measured(result: dict[str, Any]) -> str:
    config = result["config"]
    batches = ", ".join(f"{name} {config['batch'].get(name) or '-'}" for name in config["models"])
    return (
        f"Blue: computation (forward and backward, one thread; batch: {batches}).\n"
        "Red: all gradients to one parameter server and all weights back. Dotted: the same bytes by a warm memcpy.\n"
        f"Two processes on one machine ({result['versions']['cores']} cores), device {config['device']}; medians of"
        f" {config['rounds']} rounds in turns in one run."
    )
