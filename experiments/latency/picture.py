"""The benchmark's picture: latency against size, one way and there and back."""

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from ..harness.pictures import BLUE, INK, QUIET, STYLE, VERMILLION, save
from .report import time_text
from .rows import size_text

LINES = (
    ("torch_rpc", "torch RPC", VERMILLION, "s"),
    ("rdmarpc", "rdmarpc", BLUE, "o"),
    ("floor", "floor", QUIET, None),
)
PANELS = {
    "one_way": "One way: prepared write, seen by the waiting peer",
    "identity": "There and back: rpc_sync(identity, tensor)",
}


def draw_bench(bench: dict[str, Any], path: Path) -> None:
    """Two log-log panels with the floor, rdmarpc and torch RPC."""
    with plt.rc_context(STYLE):
        figure, both = plt.subplots(1, 2, figsize=(14, 6.2), sharey=True)
        for axes, (case, title) in zip(both, PANELS.items()):
            _panel(axes, [row for row in bench["rows"] if row["case"] == case])
            axes.set_title(title, loc="left", fontsize=13.5, pad=12)
        both[0].set_ylabel("time (median)")
        both[1].legend(frameon=False, loc="lower right", labelcolor="linecolor", prop={"weight": "bold", "size": 13})
        both[0].set_ylim(bottom=0.2 * min(row["floor_us"] for row in bench["rows"]))
        figure.suptitle(_finding(bench["rows"]), x=0.02, ha="left", fontsize=18, fontweight="bold")
        figure.text(0.02, 0.015, _how_measured(bench), fontsize=10, color=QUIET, ha="left", va="bottom")
        save(figure, path, dpi=160, rect=(0, 0.05, 1, 0.99))


def _panel(axes: Axes, rows: list[dict[str, Any]]) -> None:
    sizes = [row["bytes"] for row in rows]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for name, title, colour, marker in LINES:
        times = [row[f"{name}_us"] for row in rows]
        style = "--" if name == "floor" else "-"
        axes.plot(sizes, times, style, color=colour, marker=marker, markersize=6, linewidth=2.2, clip_on=False, label=title)
    for row in rows:
        axes.plot([row["bytes"]] * 2, [row["rdmarpc_us"], row["torch_rpc_us"]], color="#c8ccd0", linewidth=1, zorder=0)
        axes.annotate(
            times_text(row["times_faster_than_torch"]),
            (row["bytes"], row["torch_rpc_us"]),
            xytext=(0, 10),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=11.5,
            color=INK,
        )
    axes.set_xticks(sizes, [size_text(size).replace(" ", "\n") for size in sizes], fontsize=11)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda us, _: time_text(us)))
    axes.grid(axis="y", color="#e8eaed", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)


def _finding(rows: list[dict[str, Any]]) -> str:
    ratios = [row["times_faster_than_torch"] for row in rows if row["case"] in PANELS]
    return f"rdmarpc moves a tensor {times_text(min(ratios))} to {times_text(max(ratios))} as fast as torch RPC"


def times_text(ratio: float) -> str:
    return f"{ratio:.0f}×" if ratio >= 10 else f"{ratio:.1f}×"


def _how_measured(bench: dict[str, Any]) -> str:
    config = bench["config"]
    return (
        f"Two processes on one machine ({bench['versions']['cores']} cores), device {config['device']}; medians of"
        f" {config['rounds']} rounds in turns in one run. Above each point: times faster than torch RPC (TensorPipe).\n"
        "Floor: a warm memcpy and a flag handed to the other process; there and back, twice as much."
    )
