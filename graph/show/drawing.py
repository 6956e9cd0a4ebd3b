"""The picture of a step: workers as boxes in a row, and one arrow for all tensors of a kind that one sends to another.

Arrows to the right run above the boxes, those to the left below, each group of overlapping ones on lanes of its own. They rise
and sink only over boxes, and what they carry is written in the gaps between boxes: so nothing ever covers anything else.
Lengths are points (1/72 inch). Needs matplotlib, and only when it draws.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...transport import NotSupported
from .records import Crossing, WorkerRecord
from .tables import shortened, size

INK, QUIET, PAPER, BOX = "#1a1a1a", "#5f6368", "#ffffff", "#eef2f5"
COLORS = {"activation": "#0072b2", "gradient": "#d55e00", "weight": "#00795c", "parameter": "#00795c", "input": "#6b4c9a"}
"""Okabe and Ito's palette, green a little darker: it has to carry text."""
TITLE, TEXT, SMALL = 14.0, 11.0, 9.0
MARGIN, PAD, PORT, LANE, LINE = 18.0, 10.0, 9.0, 17.0, 14.0
_PARTS, _NOTES = 8, 6

Measure = Callable[[str, float], float]
"""Width of a text in a font size."""


@dataclass(slots=True)
class Arrow:
    """All crossings of one kind between two workers. ``lane`` counts from the boxes outwards, from 0."""

    source: int
    target: int
    kind: str
    crossings: list[Crossing]
    lane: int = 0
    start: float = 0.0
    end: float = 0.0

    @property
    def span(self) -> tuple[int, int]:
        return min(self.source, self.target), max(self.source, self.target)

    @property
    def rightward(self) -> bool:
        return self.source < self.target

    @property
    def fan(self) -> tuple[Any, ...]:
        """Equal for arrows that carry the same tensors: they leave by one port."""
        return self.source, self.rightward, self.kind, frozenset(crossing.name for crossing in self.crossings)

    @property
    def label(self) -> str:
        amount = size(sum(crossing.nbytes * crossing.times for crossing in self.crossings))
        count = sum(crossing.times for crossing in self.crossings)
        return f"{count} tensors · {amount}" if count > 1 else f"{shortened(self.crossings[0].name, 28)} · {amount}"


@dataclass(slots=True)
class Box:
    left: float
    width: float
    lines: list[str]


@dataclass(slots=True)
class Picture:
    """``bottom`` and ``top`` are those of all boxes; y grows upwards."""

    width: float
    height: float
    bottom: float
    top: float
    title: str
    kinds: list[str]
    boxes: list[Box]
    arrows: list[Arrow]
    notes: list[str]

    def lane_y(self, arrow: Arrow) -> float:
        away = LANE * (arrow.lane + 1)
        return self.top + away if arrow.rightward else self.bottom - away

    def label_at(self, arrow: Arrow) -> tuple[float, float]:
        """Left end of the label's baseline: over the arrow, in the gap beside its source."""
        box = self.boxes[arrow.source if arrow.rightward else arrow.source - 1]
        return box.left + box.width + PAD, self.lane_y(arrow) + 3.0


def arrange(crossings: Sequence[Crossing], workers: Sequence[WorkerRecord], measure: Measure) -> Picture:
    """The picture of a step: the places of its boxes and arrows."""
    rank = {worker.name: at for at, worker in enumerate(workers)}
    bundles: dict[tuple[int, int, str], list[Crossing]] = {}
    for crossing in crossings:
        bundles.setdefault((rank[crossing.source], rank[crossing.target], crossing.kind), []).append(crossing)
    arrows = [Arrow(source, target, kind, found) for (source, target, kind), found in bundles.items()]
    _choose_lanes(arrows)
    lines = [_lines(worker) for worker in workers]
    boxes: list[Box] = []
    left = MARGIN
    for at, box_lines in enumerate(lines):
        ports = max(_place_ports(arrows, at, rightward, 0.0, 0.0) for rightward in (True, False))
        text = max(measure(line, TEXT if number == 0 else SMALL) for number, line in enumerate(box_lines))
        boxes.append(Box(left, max(text + 2 * PAD, ports, 80.0), box_lines))
        beside = [arrow for arrow in arrows if (arrow.source if arrow.rightward else arrow.source - 1) == at]
        gap = max((measure(arrow.label, SMALL) for arrow in beside), default=20.0) + 2 * PAD
        left = boxes[-1].left + boxes[-1].width + gap
    for at, box in enumerate(boxes):
        for rightward in (True, False):
            _place_ports(arrows, at, rightward, box.left, box.width)
    notes = _notes(crossings)
    count = sum(crossing.times for crossing in crossings)
    total = size(sum(crossing.nbytes * crossing.times for crossing in crossings))
    title = f"{count} edge{'s' * (count != 1)}, {total} cross in a training step"
    kinds = list(dict.fromkeys(arrow.kind for arrow in arrows))
    above = max((arrow.lane + 1 for arrow in arrows if arrow.rightward), default=0)
    below = max((arrow.lane + 1 for arrow in arrows if not arrow.rightward), default=0)
    bottom = MARGIN + LINE * len(notes) + (LANE * (below + 0.5) if below else 0.0)
    top = bottom + LINE * max(map(len, lines)) + 2 * PAD
    widest = max([measure(title, TITLE), _legend(kinds, measure), *(measure(note, SMALL) for note in notes)])
    right = boxes[-1].left + boxes[-1].width
    height = top + LANE * (above + 1.5) + LINE + TITLE + MARGIN
    return Picture(max(right, MARGIN + widest) + MARGIN, height, bottom, top, title, kinds, boxes, arrows, notes)


def draw(crossings: Sequence[Crossing], workers: Sequence[WorkerRecord], path: str | os.PathLike[str]) -> None:
    """See ``Transfers.draw``."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.font_manager import FontProperties
        from matplotlib.patches import FancyBboxPatch, PathPatch, Polygon
        from matplotlib.path import Path
        from matplotlib.textpath import TextPath
    except ImportError as error:
        raise NotSupported(
            f"a picture needs matplotlib: {error}", hint="pip install 'rdmarpc[experiments]', or print and save instead"
        ) from None
    font = FontProperties(family="DejaVu Sans")  # comes with matplotlib, so it is as wide everywhere

    def measure(text: str, points: float) -> float:
        return float(TextPath((0, 0), text, size=points, prop=font).get_extents().width) * 1.03 if text.strip() else 0.0

    picture = arrange(crossings, workers, measure)
    figure = Figure(figsize=(picture.width / 72, picture.height / 72), facecolor=PAPER)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, picture.width), ylim=(0, picture.height))
    axes.axis("off")

    def write(x: float, y: float, text: str, points: float, color: str = INK, center: bool = False) -> None:
        axes.text(x, y, text, fontproperties=font, fontsize=points, color=color, ha="center" if center else "left")

    write(MARGIN, picture.height - MARGIN - TITLE * 0.7, picture.title, TITLE)
    for number, kind in enumerate(picture.kinds):
        x = MARGIN + _legend(picture.kinds[:number], measure)
        write(x, picture.height - MARGIN - TITLE - LINE * 0.8, f"→ {kind}", SMALL, COLORS.get(kind, QUIET))
    for box in picture.boxes:
        height = picture.top - picture.bottom
        shape = "round,pad=0,rounding_size=5"
        axes.add_patch(FancyBboxPatch((box.left, picture.bottom), box.width, height, shape, facecolor=BOX, edgecolor=QUIET))
        for number, line in enumerate(box.lines):
            y = picture.top - PAD - LINE * (number + 0.75)
            write(box.left + box.width / 2, y, line, SMALL if number else TEXT, QUIET if number else INK, center=True)
    for arrow in picture.arrows:
        color = COLORS.get(arrow.kind, QUIET)
        edge = picture.top if arrow.rightward else picture.bottom
        y, tip = picture.lane_y(arrow), 6.0 if arrow.rightward else -6.0
        points, codes = _rounded(arrow.start, arrow.end, edge, y, edge + tip)
        style = "solid" if all(crossing.static for crossing in arrow.crossings) else "dashed"
        axes.add_patch(PathPatch(Path(points, codes), facecolor="none", edgecolor=color, linewidth=1.4, linestyle=style))
        head = [(arrow.end, edge), (arrow.end - 3.5, edge + tip * 1.2), (arrow.end + 3.5, edge + tip * 1.2)]
        axes.add_patch(Polygon(head, facecolor=color, edgecolor="none"))
        axes.plot([arrow.start], [edge], marker="o", markersize=4.5, color=color)
        write(*picture.label_at(arrow), arrow.label, SMALL, color)
    for number, note in enumerate(picture.notes):
        write(MARGIN, MARGIN + LINE * (len(picture.notes) - 1 - number), note, SMALL, QUIET)
    figure.savefig(path, dpi=160)


def _choose_lanes(arrows: list[Arrow]) -> None:
    """Short arrows near the boxes; those that share a lane at most meet over a box, where one ends and the next begins."""
    taken: list[Arrow] = []
    for arrow in sorted(arrows, key=lambda arrow: (arrow.span[1] - arrow.span[0], arrow.kind, arrow.span)):
        first, last = arrow.span
        over = {o.lane for o in taken if o.rightward == arrow.rightward and o.span[0] < last and o.span[1] > first}
        arrow.lane = next(lane for lane in range(len(arrows)) if lane not in over)
        taken.append(arrow)


def _place_ports(arrows: list[Arrow], at: int, rightward: bool, left: float, width: float) -> float:
    """Place the points where arrows leave and enter one side of a box. Returns the width that they need. From the left: arrows
    from (or to) that side, then the others; in the middle the outermost lanes, so that arrows of one box do not cross."""
    ends = [arrow for arrow in arrows if arrow.rightward == rightward and arrow.target == at]
    fans: dict[tuple[Any, ...], list[Arrow]] = {}
    for arrow in arrows:
        if arrow.rightward == rightward and arrow.source == at:
            fans.setdefault(arrow.fan, []).append(arrow)
    arriving = [[arrow] for arrow in sorted(ends, key=lambda arrow: arrow.lane)]
    leaving = sorted(fans.values(), key=lambda fan: max(arrow.lane for arrow in fan))
    ports = [*arriving, *reversed(leaving)] if rightward else [*leaving, *reversed(arriving)]
    for number, port in enumerate(ports):
        x = left + width * (number + 1) / (len(ports) + 1)
        for arrow in port:
            if arrow.target == at:
                arrow.end = x
            else:
                arrow.start = x
    return PORT * (len(ports) + 1)


def _rounded(start: float, end: float, edge: float, y: float, tip: float) -> tuple[list[tuple[float, float]], list[int]]:
    """Up, across, down, with round corners, as vertices and codes of a matplotlib path."""
    away = 5.0 if y > edge else -5.0
    along = 5.0 if end > start else -5.0
    move, line, curve = 1, 2, 3
    points = [
        (start, edge),
        (start, y - away),
        (start, y),
        (start + along, y),
        (end - along, y),
        (end, y),
        (end, y - away),
        (end, tip),
    ]
    return points, [move, line, curve, curve, line, curve, curve, line]


def _legend(kinds: list[str], measure: Measure) -> float:
    return sum(measure(f"→ {kind}", SMALL) + 2 * PAD for kind in kinds)


def _lines(worker: WorkerRecord) -> list[str]:
    parts = [shortened(part, 32) for part in worker.parts[:_PARTS]]
    if len(worker.parts) > _PARTS:
        parts.append(f"and {len(worker.parts) - _PARTS} more")
    weights = [f"{size(worker.parameter_bytes)} of parameters"] if worker.parameter_bytes else []
    made = [f"{size(worker.peak_bytes)} at most in a step"] if worker.peak_bytes else []
    return [shortened(worker.name, 32), *parts, *weights, *made]


def _notes(crossings: Sequence[Crossing]) -> list[str]:
    """Tensors that are sent to several workers, and what dashed lines mean."""
    fans: dict[tuple[str, str, str], dict[str, None]] = {}
    for crossing in crossings:
        fans.setdefault((crossing.kind, crossing.name, crossing.source), {})[crossing.target] = None
    notes = [
        shortened(f"{kind} {name}: one source at {source}, to {', '.join(targets)}", 140)
        for (kind, name, source), targets in fans.items()
        if len(targets) > 1
    ]
    if len(notes) > _NOTES:
        notes[_NOTES:] = [f"and {len(notes) - _NOTES} more that are sent to several workers"]
    dynamic = sum(not crossing.static for crossing in crossings)
    return [*notes, f"dashed: {dynamic} that not every step has in this shape"] if dynamic else notes
