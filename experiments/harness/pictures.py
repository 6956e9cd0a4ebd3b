"""The pictures. Colours are from Okabe and Ito's palette, which stays apart for every kind of colour vision."""

import logging
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

plt.switch_backend("Agg")
logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it reports its font cache

INK, QUIET = "#1a1a1a", "#5f6368"
SKY, VERMILLION, BLUE = "#9fc9e6", "#d55e00", "#0072b2"
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 13,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": QUIET,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
DEVICES = {"shm": "shared memory", "tcp": "TCP", "verbs": "RDMA verbs", "cuda": "GPU memory"}


class _Plain(LogFormatter):
    """10, 60 and 2,000,000 instead of powers of ten."""

    def __call__(self, x: float, pos: Any = None) -> str:
        return f"{x:,.10g}" if super().__call__(x, pos) else ""


def plain_logarithmic(*axes: Any, base: float = 10) -> None:
    """Label these logarithmic axes (``.xaxis``, ``.yaxis``) with plain numbers; between powers, too, where there are few."""
    for axis in axes:
        axis.set_major_formatter(_Plain(base))
        axis.set_minor_formatter(_Plain(base, minor_thresholds=(1, 0.5)))


def save(figure: Figure, path: Path, dpi: int = 130, rect: tuple[float, float, float, float] = (0, 0, 1, 1)) -> None:
    """Lay out what is in ``rect`` of the figure, write the file, forget the figure."""
    figure.tight_layout(rect=rect)
    figure.savefig(path, dpi=dpi)
    plt.close(figure)


def draw_comm_comp(result: dict[str, Any], path: Path) -> None:
    """Computation and communication of one step as stacked bars: rdmarpc above, torch RPC (if measured) below."""
    config, communication = result["config"], result["communication_ms"]
    computation = result["step_ms"]["single_process"]
    names = [name for name in ("rdmarpc", "torch_rpc") if name in communication]
    longest = computation + max(communication.values())
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(11, 1.9 + 1.25 * len(names)))
        for row, name in enumerate(names):
            axes.barh(row, computation, height=0.58, color=SKY)
            axes.barh(row, communication[name], left=computation, height=0.58, color=VERMILLION)
            axes.text(computation / 2, row, f"{computation:.2f} ms", ha="center", va="center")
            label = f"{communication[name]:.2f} ms"
            inside = communication[name] > 0.12 * longest
            axes.text(
                computation + (communication[name] / 2 if inside else communication[name] + 0.01 * longest),
                row,
                label,
                ha="center" if inside else "left",
                va="center",
                color="white" if inside else VERMILLION,
                fontweight="bold",
            )
        axes.text(computation / 2, -0.38, "computation", ha="center", va="bottom", color="#2b6a94")
        axes.text(computation, -0.38, " communication", ha="left", va="bottom", color=VERMILLION)
        axes.set_yticks(range(len(names)), [_bar_title(name, config["device"]) for name in names])
        axes.set_xlim(0, longest * 1.12)
        axes.set_ylim(len(names) - 0.5, -0.62)
        axes.spines["left"].set_visible(False)
        axes.tick_params(length=0)
        axes.set_xlabel("milliseconds per training step (median)")
        figure.suptitle(finding(communication), x=0.02, ha="left", fontsize=16, fontweight="bold")
        figure.text(0.02, 0.02, _how_measured(result), fontsize=9.5, color=QUIET, ha="left", va="bottom")
        save(figure, path, dpi=160, rect=(0, 0.09, 1, 1))


PARTS = {"computation": SKY, "at servers": "#f0c67a", "communication": VERMILLION}
"""What a step is made of, and its colour."""


def draw_parts(rows: list[tuple[str, dict[str, float]]], axis: str, path: Path) -> None:
    """Stacked bars, one for each (title, {a name of ``PARTS``: how much}); a number in each that is wide enough for it."""
    longest = max((sum(parts.values()) for _, parts in rows), default=0.0) or 1.0
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(11, 1.6 + 0.5 * len(rows)))
        for number, (_, parts) in enumerate(rows):
            left = 0.0
            for name, value in parts.items():
                axes.barh(number, value, left=left, height=0.68, color=PARTS[name], label=None if number else name)
                if value > 0.06 * longest:
                    colour = "white" if name == "communication" else INK
                    axes.text(left + value / 2, number, f"{value:.3g}", ha="center", va="center", color=colour, fontsize=11)
                left += value
        axes.set_yticks(range(len(rows)), [title for title, _ in rows])
        axes.invert_yaxis()
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(axis)
        axes.legend(frameon=False, ncols=len(PARTS), loc="lower left", bbox_to_anchor=(0, 1))
        save(figure, path)


def _bar_title(name: str, device: str) -> str:
    return f"rdmarpc\n({DEVICES.get(device, device)})" if name == "rdmarpc" else "torch RPC\n(TensorPipe)"


def finding(communication: dict[str, float]) -> str:
    """The picture's title."""
    ours, theirs = communication["rdmarpc"], communication.get("torch_rpc")
    if theirs is None:
        return f"rdmarpc adds {ours:.2f} ms of communication to a training step"
    if ours == 0 or theirs == 0:
        return f"Communication adds {ours:.2f} ms to a step; with torch RPC {theirs:.2f} ms"
    if theirs >= ours:
        return f"A training step spends {theirs / ours:.1f}× less time on communication than with torch RPC"
    return f"A training step spends {ours / theirs:.1f}× more time on communication than with torch RPC"


def _how_measured(result: dict[str, Any]) -> str:
    config = result["config"]
    return (
        f"{config['model']['name'].upper()} on 8×8 digits, batch {config['batch_size']}, {config['workers']} workers"
        f" on one machine; {result['counters']['steps']:,} steps of each kind, in turns, in one run.\n"
        "Computation: the same step in a single process. Communication: what a step takes above that, not below 0."
    )
