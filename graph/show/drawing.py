"""The picture of a step, as a sequence diagram: a column for each worker, and below them a row for each arrow, which stands for
all tensors of a kind that one worker sends to another, in the order in which the first of them crosses. No two arrows share a
row, so nothing covers anything else. Needs matplotlib, and only when it draws."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ...transport import NotSupported
from .records import Crossing, WorkerRecord
from .tables import shortened, size

_INK, _QUIET, _PAPER, _BOX = "#1a1a1a", "#5f6368", "#ffffff", "#eef2f5"
_COLORS = {"activation": "#0072b2", "gradient": "#d55e00", "weight": "#00795c", "parameter": "#00795c", "input": "#6b4c9a"}
"""Okabe and Ito's palette, green a little darker: it has to carry text."""
_POINTS, _CHARACTER, _LINE, _ROW = 9, 0.08, 0.15, 0.4
"""Of text; inches of a character, of a line, and of a row."""
_PARTS, _NOTES = 8, 6


def draw(crossings: Sequence[Crossing], workers: Sequence[WorkerRecord], path: str | os.PathLike[str]) -> None:
    """See ``Transfers.draw``."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NotSupported(
            f"a picture needs matplotlib: {error}", hint="pip install 'rdmarpc[experiments]', or print and save instead"
        ) from None
    arrows, boxes = bundles(crossings), {worker.name: _lines(worker) for worker in workers}
    texts = [*map(label, arrows.values()), *(line for lines in boxes.values() for line in lines)]
    width = _CHARACTER * max(map(len, texts)) + 0.4
    columns = {name: width * at for at, name in enumerate(boxes)}
    bottom, top = -_ROW * (len(arrows) + 1), 0.35 + _LINE * max(map(len, boxes.values()))
    figure = Figure(figsize=(width * len(boxes), top - bottom), facecolor=_PAPER)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(-width / 2, width * (len(boxes) - 0.5)), ylim=(bottom, top))
    axes.axis("off")
    text: dict[str, Any] = {"family": "DejaVu Sans", "fontsize": _POINTS, "ha": "center", "va": "bottom"}
    for name, lines in boxes.items():
        axes.vlines(columns[name], bottom, 0, color=_QUIET, linewidth=0.8)
        box = {"boxstyle": "round,pad=0.6", "facecolor": _BOX, "edgecolor": _QUIET}
        axes.text(columns[name], 0.15, "\n".join(lines), color=_INK, bbox=box, **text)
    for row, ((source, target, kind), found) in enumerate(arrows.items(), 1):
        color, y = _COLORS.get(kind, _QUIET), -_ROW * row
        style = "solid" if all(crossing.static for crossing in found) else "dashed"
        line = {"arrowstyle": "-|>", "color": color, "linestyle": style, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (columns[target], y), (columns[source], y), arrowprops=line)
        middle, over = (columns[source] + columns[target]) / 2, {"facecolor": _PAPER, "edgecolor": "none", "pad": 0.5}
        axes.text(middle, y + 0.05, label(found), color=color, bbox=over, **text)
    total = size(sum(crossing.nbytes * crossing.times for crossing in crossings))
    below = [f"{_count(crossings, 'edge')}, {total} cross in a training step", *notes(crossings)]
    axes.text(-width / 2, bottom - _LINE, "\n".join(below), color=_QUIET, **{**text, "ha": "left", "va": "top"})
    figure.savefig(path, dpi=160, bbox_inches="tight")


def bundles(crossings: Sequence[Crossing]) -> dict[tuple[str, str, str], list[Crossing]]:
    """What an arrow stands for, by source, target and kind."""
    found: dict[tuple[str, str, str], list[Crossing]] = {}
    for crossing in crossings:
        found.setdefault((crossing.source, crossing.target, crossing.kind), []).append(crossing)
    return found


def label(found: Sequence[Crossing]) -> str:
    """What is written over an arrow."""
    amount, one = size(sum(crossing.nbytes * crossing.times for crossing in found)), found[0]
    several = len(found) > 1 or one.times > 1
    return f"{one.kind}: {_count(found, 'tensor') if several else shortened(one.name, 28)} · {amount}"


def _count(crossings: Sequence[Crossing], what: str) -> str:
    count = sum(crossing.times for crossing in crossings)
    return f"{count} {what}{'s' * (count != 1)}"


def _lines(worker: WorkerRecord) -> list[str]:
    parts = [shortened(part, 32) for part in worker.parts[:_PARTS]]
    if len(worker.parts) > _PARTS:
        parts.append(f"and {len(worker.parts) - _PARTS} more")
    weights = [f"{size(worker.parameter_bytes)} of parameters"] if worker.parameter_bytes else []
    made = [f"{size(worker.peak_bytes)} at most in a step"] if worker.peak_bytes else []
    return [shortened(worker.name, 32), *parts, *weights, *made]


def notes(crossings: Sequence[Crossing]) -> list[str]:
    """Tensors that are sent to several workers, and what dashed lines mean."""
    fans: dict[tuple[str, str, str], dict[str, None]] = {}
    for crossing in crossings:
        fans.setdefault((crossing.kind, crossing.name, crossing.source), {})[crossing.target] = None
    found = [
        shortened(f"{kind} {name}: one source at {source}, to {', '.join(targets)}", 140)
        for (kind, name, source), targets in fans.items()
        if len(targets) > 1
    ]
    if len(found) > _NOTES:
        found[_NOTES:] = [f"and {len(found) - _NOTES} more that are sent to several workers"]
    dynamic = sum(not crossing.static for crossing in crossings)
    return [*found, f"dashed: {dynamic} that not every step has in this shape"] if dynamic else found
