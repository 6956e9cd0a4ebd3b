"""The tensors that cross between workers in a step, as plain data: to print, to save, to draw."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..fragments.cut import crossings, varying
from ..fragments.flow import ACTIVATION, Flow
from ..fragments.records import BACKWARD, Move, Operation, Recorded
from .drawing import draw
from .records import Crossing, WorkerRecord
from .tables import Histogram, histogram, table

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
    return json.dumps({"format": _FORMAT, "version": _VERSION, "steps": [dataclasses.asdict(each) for each in found]}, indent=1)


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
    caller: str,
    crossings: Sequence[Crossing],
    parameter_bytes: Mapping[str, int],
    parts: Mapping[str, Iterable[str]] | None = None,
    peaks: Mapping[str, int] | None = None,
    steps: int = 1,
) -> Transfers:
    """``parameter_bytes``: of the model, by worker; ``parts``: the modules that run at each; ``peaks``: see ``WorkerRecord``.
    Workers are listed in the order of their first crossing, the caller first."""
    ran, most = parts or {}, peaks or {}
    ends = [name for crossing in crossings for name in (crossing.source, crossing.target)]
    workers = [
        WorkerRecord(
            name,
            parameter_bytes.get(name, 0),
            sum(c.nbytes * c.times for c in crossings if c.target == name),
            sum(c.nbytes * c.times for c in crossings if c.source == name),
            most.get(name, 0),
            tuple(ran.get(name, ())),
        )
        for name in dict.fromkeys([caller, *ends, *parameter_bytes, *ran])
    ]
    return Transfers(caller, tuple(crossings), tuple(workers), steps)


def described(recorded: Sequence[Recorded], parameter_bytes: Mapping[str, int]) -> Transfers:
    """The last of some steps that were recorded; the others say what varies."""
    step = recorded[-1]
    flow, dynamic = Flow(step), varying(recorded)
    again = {number for number, _ in flow.again()}
    found: dict[Any, list[tuple[int, Move, bool]]] = {}
    for key, moves in crossings(step).items():
        for at, (event, move) in enumerate(moves):
            static = (key, at) not in dynamic
            row = key, move.operand.shape, move.operand.dtype, move.nbytes, static, move.phase == BACKWARD
            found.setdefault(row, []).append((event, move, static))
    rows = sorted(found.items(), key=lambda each: each[1][0][0])
    called: dict[int, str] = {}
    shown = [_crossing(number, flow, key[0], same, again, called) for number, (key, same) in enumerate(rows, 1)]
    parts: dict[str, dict[str, None]] = {}
    for each in step.events:
        if isinstance(each, Operation) and each.path and each.phase != BACKWARD:
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
    name = name or called.setdefault(origin, maker if maker and kind == ACTIVATION else f"for {first}" if first else kind)
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
