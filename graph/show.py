"""The tensors that cross between workers in a step, as plain data: to print as tables, to save, to draw."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..transport import NotSupported
from .fragments import Flow, Kind, Move, Operation, Phase, Recorded, crossings, varying


@dataclass(frozen=True, slots=True)
class Crossing:
    """One tensor on its way to one worker: one write in a step, or ``times`` ones of different tensors of one name (of as many
    micro-batches). ``again`` of them take over what was copied there already.

    ``kind``: activation, gradient, parameter, input, update (made in an optimizer's step), weight (sent by a parameter server).
    ``nbytes``: payload of one write. ``static``: every step that was seen has it in this shape. ``allocator``: the operation in
    whose memory the tensor lies, with the module in which that ran, where both are known. ``first`` and ``last``: operations
    that read it at the target.
    """

    number: int
    name: str
    kind: str
    source: str
    target: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    static: bool
    times: int = 1
    again: int = 0
    allocator: str = ""
    first: str = ""
    last: str = ""


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """Bytes that land at and leave a worker in a step, of what the step makes there and lives at once (``peak_bytes``), and of
    the model's parameters that lie there (0 where nobody said). ``parts`` are the modules that run there."""

    name: str
    parameter_bytes: int
    bytes_in: int
    bytes_out: int
    peak_bytes: int
    parts: tuple[str, ...]


# -- tables, histograms

_CELL = 44
_BAR = 40


@dataclass(frozen=True, slots=True)
class Bucket:
    """How many sizes of ``low <= size < high``, in bytes, and their sum."""

    low: int
    high: int
    count: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Histogram:
    """Sizes in bytes of the tensors of one kind. The buckets are powers of two (``[0, 1)`` for empty tensors), from the
    smallest to the largest without a gap."""

    kind: str
    buckets: tuple[Bucket, ...]

    @property
    def count(self) -> int:
        return sum(bucket.count for bucket in self.buckets)

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def average(self) -> float:
        """Bytes a tensor; 0 where there are none."""
        return self.nbytes / self.count if self.buckets else 0.0

    def __str__(self) -> str:
        most = max((bucket.count for bucket in self.buckets), default=1)
        lines = [f"{self.kind}: {self.count} tensors, {self.nbytes:,} bytes, {self.average:,.1f} bytes on average"]
        for bucket in self.buckets:
            bar = "#" * -(-bucket.count * _BAR // most)
            lines.append(f"  {size(bucket.low):>8} to {size(bucket.high):>8}  {bucket.count:>6}  {bar}".rstrip())
        return "\n".join(lines)


def histogram(kind: str, sizes: Collection[int]) -> Histogram:
    """``sizes`` in bytes, none negative."""
    ranks = [size.bit_length() for size in sizes]
    buckets = []
    for rank in range(min(ranks, default=0), max(ranks, default=-1) + 1):
        inside = [size for size in sizes if size.bit_length() == rank]
        buckets.append(Bucket(1 << rank >> 1, 1 << rank, len(inside), sum(inside)))
    return Histogram(kind, tuple(buckets))


def size(count: int) -> str:
    """``1.5 MiB``"""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}".replace(".0 ", " ")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Columns of equal width, those of ``right`` flush right. The middle of long cells is left out; it is in the JSON."""
    cells = [[shortened(cell, _CELL) for cell in row[:-1]] + [row[-1]] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells)]
    lines = [
        "  ".join(cell.rjust(w) if at in right else cell.ljust(w) for at, (cell, w) in enumerate(zip(row, widths)))
        for row in (head, ["-" * width for width in widths], *cells)
    ]
    return "\n".join(line.rstrip() for line in lines)


def shortened(text: str, width: int) -> str:
    """``encoder.la…norm2``"""
    if len(text) <= width:
        return text
    front = (width - 1) // 2
    return text[:front] + "…" + text[len(text) - (width - 1 - front) :]


# -- a step

Sizes = Mapping[str, int]
"""Bytes, by worker."""
_FORMAT, _VERSION = "rdmarpc transfers", 2


@dataclass(frozen=True, slots=True)
class Transfers:
    """All that crosses in one step. ``print`` shows everything, ``table`` the crossings alone. ``caller``: the worker that
    posts. ``steps``: how many were compared to tell static from dynamic crossings."""

    caller: str
    crossings: tuple[Crossing, ...]
    workers: tuple[WorkerRecord, ...]
    steps: int = 1

    @property
    def nbytes(self) -> int:
        return sum(crossing.nbytes * crossing.times for crossing in self.crossings)

    def writes(self, crossing: Crossing) -> list[Crossing]:
        """All crossings of the same tensor from the same worker: that many writes from one source."""
        same = (crossing.kind, crossing.name, crossing.source)
        return [other for other in self.crossings if (other.kind, other.name, other.source) == same]

    def histogram(self) -> list[Histogram]:
        """The number of crossings of each size, for each kind."""
        sizes: dict[str, list[int]] = {}
        for crossing in self.crossings:
            sizes.setdefault(crossing.kind, []).extend([crossing.nbytes] * crossing.times)
        return [histogram(kind, found) for kind, found in sizes.items()]

    def table(self) -> str:
        """One line a crossing, and one with the sums; no empty lines. "x 4": as many of one name; "again": that many of them
        were there already; "dynamic": not in every step, or not always of this shape."""
        head = ("tensor", "kind", "from", "to", "shape", "bytes", "memory of")
        rows = [
            (c.name, c.kind, c.source, c.target, shape_text(c), f"{c.nbytes:,}{f' x {c.times}' * (c.times > 1)}", _memory(c))
            for c in self.crossings
        ]
        count = sum(crossing.times for crossing in self.crossings)
        total = f"{count} edges, {self.nbytes:,} bytes cross in a training step"
        if again := sum(crossing.nbytes * crossing.again for crossing in self.crossings):
            total += f", {again:,} of them again"
        return "\n".join([table(head, rows, right=(5,)), total])

    def uses(self) -> str:
        """One line for each crossing: the operation that made it, and the first and last one that reads it where it goes."""
        head = ("tensor", "made by", "at", "read at", "first use", "last use")
        return table(head, [(c.name, c.allocator, c.source, c.target, c.first, c.last) for c in self.crossings])

    def __str__(self) -> str:
        head = ("worker", "parameters", "bytes in", "bytes out", "peak", "runs")
        workers = [
            (w.name, f"{w.parameter_bytes:,}", f"{w.bytes_in:,}", f"{w.bytes_out:,}", f"{w.peak_bytes:,}", _few(w.parts))
            for w in self.workers
        ]
        blocks = [self.table(), self.uses(), table(head, workers, right=(1, 2, 3, 4))]
        return "\n\n".join([*blocks, *(str(sizes) for sizes in self.histogram())])

    def to_json(self) -> str:
        """This step alone; ``from_json`` reads it."""
        return to_json([self])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it where ``load`` reads it."""
        save(path, [self])

    def draw(self, path: str | os.PathLike[str]) -> None:
        """A picture: workers as boxes, an arrow for all that one sends to another. The ending of ``path`` says which format
        (png, svg, pdf). ``NotSupported`` without matplotlib."""
        draw(self.crossings, self.workers, path)


def to_json(found: Sequence[Transfers]) -> str:
    """Several steps in one text."""
    return json.dumps({"format": _FORMAT, "version": _VERSION, "steps": [asdict(each) for each in found]}, indent=1)


def from_json(text: str) -> list[Transfers]:
    """The steps of a text that ``to_json`` made. ``ValueError`` for anything else."""
    try:
        found = json.loads(text)
        if found["format"] != _FORMAT or found["version"] != _VERSION:
            raise ValueError(f"version {found['version']!r} of {found['format']!r}")
        return [_transfers(each) for each in found["steps"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"these are not the transfers of a model, version {_VERSION}: {error}") from error


def save(path: str | os.PathLike[str], found: Sequence[Transfers]) -> None:
    Path(path).write_text(to_json(found) + "\n")


def load(path: str | os.PathLike[str]) -> list[Transfers]:
    """The steps of a file; ``OSError``, or ``ValueError`` if it is none of ours."""
    return from_json(Path(path).read_text())


def describe(
    caller: str, crossings: Sequence[Crossing], kept: Sizes, parts: Mapping[str, Iterable[str]], peaks: Sizes, steps: int
) -> Transfers:
    """``kept``: parameters of the model; ``parts``: the modules that run at each; ``peaks``: see ``WorkerRecord``.
    Workers are listed in the order of their first crossing, the caller first."""
    ends = [name for crossing in crossings for name in (crossing.source, crossing.target)]
    workers = [
        WorkerRecord(
            name,
            kept.get(name, 0),
            sum(c.nbytes * c.times for c in crossings if c.target == name),
            sum(c.nbytes * c.times for c in crossings if c.source == name),
            peaks.get(name, 0),
            tuple(parts.get(name, ())),
        )
        for name in dict.fromkeys([caller, *ends, *kept, *parts])
    ]
    return Transfers(caller, tuple(crossings), tuple(workers), steps)


def described(recorded: Sequence[Recorded], parameter_bytes: Sizes) -> Transfers:
    """The last of some steps that were recorded; the others say what varies."""
    step = recorded[-1]
    flow, dynamic = Flow(step), varying(recorded)
    again = {number for number, _ in flow.again()}
    found: dict[Any, list[tuple[int, Move, bool]]] = {}
    for key, moves in crossings(step).items():
        for at, (event, move) in enumerate(moves):
            static = (key, at) not in dynamic
            row = key, move.operand.shape, move.operand.dtype, move.nbytes, static, move.phase == Phase.BACKWARD
            found.setdefault(row, []).append((event, move, static))
    rows = sorted(found.items(), key=lambda each: each[1][0][0])
    called: dict[int, str] = {}
    shown = [_crossing(number, flow, key[0], same, again, called) for number, (key, same) in enumerate(rows, 1)]
    parts: dict[str, dict[str, None]] = {}
    for each in step.events:
        if isinstance(each, Operation) and each.path and each.phase != Phase.BACKWARD:
            parts.setdefault(each.place, {})[each.path] = None
    peaks = {place: flow.peak(place) for place in flow.places}
    return describe(step.here, shown, parameter_bytes, parts, peaks, len(recorded))


def _crossing(
    number: int, flow: Flow, key: tuple[str, ...], same: list[tuple[int, Move, bool]], again: set[int], called: dict[int, str]
) -> Crossing:
    """``called``: what values without a name are called, by storage."""
    source, target, kind, name, maker = key
    _, move, static = same[0]
    operand, origin = move.operand, flow.origin(move.operand.storage)
    uses = [str(event) for event in flow.uses(move) if isinstance(event, Operation)]
    first, last = (uses[0], uses[-1]) if uses else ("", "")
    name = name or called.setdefault(origin, maker if maker and kind == Kind.ACTIVATION else f"for {first}" if first else kind)
    repeated = sum(event in again for event, _, _ in same)
    return Crossing(
        number, name, kind, source, target, operand.shape, operand.dtype, move.nbytes, static, len(same), repeated,
        maker or kind, first, last,
    )  # fmt: skip


def shape_text(crossing: Crossing) -> str:
    """``float32[8, 4]``"""
    return f"{crossing.dtype}[{', '.join(map(str, crossing.shape))}]"


def _memory(crossing: Crossing) -> str:
    marks = ["dynamic"] * (not crossing.static)
    if crossing.again:
        marks.append("again" if crossing.times == crossing.again else f"{crossing.again} again")
    return crossing.allocator + (f" ({', '.join(marks)})" if marks else "")


def _transfers(each: dict[str, Any]) -> Transfers:
    return Transfers(
        each["caller"],
        tuple(Crossing(**{**crossing, "shape": tuple(crossing["shape"])}) for crossing in each["crossings"]),
        tuple(WorkerRecord(**{**worker, "parts": tuple(worker["parts"])}) for worker in each["workers"]),
        each["steps"],
    )


def _few(names: Sequence[str], width: int = 60) -> str:
    """As many as fit, and how many more."""
    shown = ", ".join(names)
    kept = len(names)
    while len(shown) > width and kept > 1:
        kept -= 1
        shown = ", ".join(names[:kept]) + f" and {len(names) - kept} more"
    return shown


# -- the picture

_INK, _QUIET, _PAPER, _BOX = "#1a1a1a", "#5f6368", "#ffffff", "#eef2f5"
_COLORS = {"activation": "#0072b2", "gradient": "#d55e00", "weight": "#00795c", "parameter": "#00795c", "input": "#6b4c9a"}
"""Okabe and Ito's palette, green a little darker: it has to carry text."""
_POINTS, _CHARACTER, _LINE, _ROW = 9, 0.08, 0.15, 0.4
"""Of text; inches of a character, of a line, and of a row."""
_PARTS, _NOTES = 8, 6


def draw(crossings: Sequence[Crossing], workers: Sequence[WorkerRecord], path: str | os.PathLike[str]) -> None:
    """A sequence diagram: a column for each worker, and below them a row for each arrow, which stands for all tensors of a kind
    that one worker sends to another, in the order in which the first of them crosses. No two arrows share a row, so nothing
    covers anything else. Needs matplotlib, and only when it draws."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        hint = "pip install 'rdmarpc[experiments]', or print and save instead"
        raise NotSupported(f"a picture needs matplotlib: {error}", hint=hint) from None
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
