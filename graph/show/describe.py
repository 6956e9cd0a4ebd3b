"""The tensors that cross between workers in one plan, as plain data: to print, to save, to draw.

Everything is known before the first step; nothing here touches a tensor.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .drawing import draw
from .records import Crossing, SegmentRecord, Use, WorkerRecord
from .tables import Histogram, histogram, table

_FORMAT, _VERSION = "rdmarpc transfers", 1


@dataclass(frozen=True, slots=True)
class Transfers:
    """All that crosses in one plan. ``depth``: the fewest slots that an edge has. ``print`` shows everything, ``table`` the
    crossings alone. Totals are bytes of payload in a training step, without edges whose shape is free. ``reordered``: tensors
    and parameters whose gradients are not summed in the order of one process, so that they are equal up to rounding."""

    number: int
    caller: str
    depth: int
    crossings: tuple[Crossing, ...]
    workers: tuple[WorkerRecord, ...]
    segments: tuple[SegmentRecord, ...]
    reordered: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(crossing.nbytes or 0 for crossing in self.crossings)

    @property
    def slot_bytes(self) -> int:
        return sum(crossing.slot_bytes for crossing in self.crossings)

    def writes(self, crossing: Crossing) -> list[Crossing]:
        """All crossings of the same tensor from the same worker: that many writes from one source."""
        same = (crossing.kind, crossing.name, crossing.source)
        return [other for other in self.crossings if (other.kind, other.name, other.source) == same]

    def histogram(self) -> list[Histogram]:
        """The number of crossings of each size, for each kind. Triggers and crossings of unknown size do not count."""
        sizes: dict[str, list[int]] = {}
        for crossing in self.crossings:
            if crossing.nbytes is not None and not crossing.trigger:
                sizes.setdefault(crossing.kind, []).append(crossing.nbytes)
        return [histogram(kind, found) for kind, found in sizes.items()]

    def table(self) -> str:
        """One line a crossing, one with the sums, one for each tensor that was staged, and one for all that is ``reordered``;
        no empty lines."""
        head = ("tensor", "kind", "from", "to", "shape", "bytes", "slots", "edge", "write", "memory of")
        rows = []
        for crossing in self.crossings:
            writes = self.writes(crossing)
            rows.append(
                (
                    crossing.name,
                    crossing.kind,
                    crossing.source,
                    f"{crossing.target}/{crossing.device}" if crossing.device else crossing.target,
                    shape_text(crossing),
                    "?" if crossing.nbytes is None else f"{crossing.nbytes:,}",
                    str(crossing.depth),
                    "static" if crossing.static else "dynamic",
                    f"{writes.index(crossing) + 1}/{len(writes)}",
                    crossing.allocator,
                )
            )
        free = sum(crossing.nbytes is None for crossing in self.crossings)
        more = f" and what {free} of free shape have" if free else ""
        count = len(self.crossings)
        total = f"{count} edges, {self.nbytes:,} bytes cross in a training step{more}, {self.slot_bytes:,} bytes of slots"
        staged = [
            f"{c.kind} {c.name} from {c.source} to {c.target}: {c.staged:,} bytes staged so far"
            + (f" ({c.why})" if c.why else "")
            for c in self.crossings
            if c.staged
        ]
        if self.reordered:
            staged.append(f"gradients not summed in the order of one process: {', '.join(self.reordered)}")
        return "\n".join([table(head, rows, right=(5, 6)), total, *staged])

    def uses(self) -> str:
        """One line for each tensor and worker that reads it: the operation that makes it, and the first and last use."""
        head = ("tensor", "made by", "at", "read at", "first use", "last use", "gradient")
        rows = [
            (c.name, c.producer, c.source, c.target, str(c.first or ""), str(c.last or ""), "yes" if c.needs_gradient else "no")
            for c in self.crossings
            if c.kind == "activation"
        ]
        return table(head, rows)

    def __str__(self) -> str:
        head = ("worker", "parameters", "bytes in", "bytes out", "slots", "runs")
        workers = [
            (w.name, f"{w.parameter_bytes:,}", f"{w.bytes_in:,}", f"{w.bytes_out:,}", f"{w.slot_bytes:,}", _few(w.parts))
            for w in self.workers
        ]
        segments = [(str(s.number), s.worker, "yes" if s.backward else "no", _few(s.operations)) for s in self.segments]
        blocks = [self.table(), table(head, workers, right=(1, 2, 3, 4))]
        if self.segments:
            blocks[1:1] = [self.uses(), table(("segment", "worker", "backward", "operations"), segments)]
        return "\n\n".join([*blocks, *(str(sizes) for sizes in self.histogram())])

    def to_json(self) -> str:
        """This plan alone; ``from_json`` reads it."""
        return to_json([self])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it where ``load`` reads it."""
        save(path, [self])

    def draw(self, path: str | os.PathLike[str]) -> None:
        """A picture: workers as boxes, an arrow for all that one sends to another. The ending of ``path`` says which format
        (png, svg, pdf). ``NotSupported`` without matplotlib."""
        draw(self, path)


def to_json(plans: Sequence[Transfers]) -> str:
    """Several plans in one text."""
    return json.dumps({"format": _FORMAT, "version": _VERSION, "plans": [dataclasses.asdict(plan) for plan in plans]}, indent=1)


def from_json(text: str) -> list[Transfers]:
    """The plans of a text that ``to_json`` made. ``ValueError`` for anything else."""
    try:
        found = json.loads(text)
        if found["format"] != _FORMAT or found["version"] != _VERSION:
            raise ValueError(f"version {found['version']!r} of {found['format']!r}")
        return [_plan(plan) for plan in found["plans"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"these are not the transfers of a model, version {_VERSION}: {error}") from error


def save(path: str | os.PathLike[str], plans: Sequence[Transfers]) -> None:
    Path(path).write_text(to_json(plans) + "\n")


def load(path: str | os.PathLike[str]) -> list[Transfers]:
    """The plans of a file; ``OSError``, or ``ValueError`` if it is none of ours."""
    return from_json(Path(path).read_text())


def describe(
    caller: str,
    crossings: Sequence[Crossing],
    parameter_bytes: Mapping[str, int],
    parts: Mapping[str, Sequence[str]] | None = None,
) -> Transfers:
    """``parameter_bytes``: of the model, by worker; ``parts``: the modules that each runs. Workers are listed in the order of
    their first crossing, the caller first."""
    ran = {} if parts is None else parts
    ends = [name for crossing in crossings for name in (crossing.source, crossing.target)]
    workers = [
        WorkerRecord(
            name,
            parameter_bytes.get(name, 0),
            sum(c.nbytes or 0 for c in crossings if c.target == name),
            sum(c.nbytes or 0 for c in crossings if c.source == name),
            sum(c.slot_bytes for c in crossings if c.target == name),
            tuple(ran.get(name, ())),
        )
        for name in dict.fromkeys([caller, *ends, *parameter_bytes])
    ]
    depth = min((crossing.depth for crossing in crossings), default=0)
    return Transfers(0, caller, depth, tuple(crossings), tuple(workers), ())


def shape_text(crossing: Crossing) -> str:
    """``float32[8, ?]``"""
    return f"{crossing.dtype}[{', '.join('?' if n is None else str(n) for n in crossing.shape)}]"


def _plan(plan: dict[str, Any]) -> Transfers:
    return Transfers(
        plan["number"],
        plan["caller"],
        plan["depth"],
        tuple(
            Crossing(
                **{
                    **crossing,
                    "shape": tuple(crossing["shape"]),
                    "first": crossing["first"] and Use(**crossing["first"]),
                    "last": crossing["last"] and Use(**crossing["last"]),
                }
            )
            for crossing in plan["crossings"]
        ),
        tuple(WorkerRecord(**{**worker, "parts": tuple(worker["parts"])}) for worker in plan["workers"]),
        tuple(SegmentRecord(**{**segment, "operations": tuple(segment["operations"])}) for segment in plan["segments"]),
        tuple(plan.get("reordered", ())),
    )


def _few(names: Sequence[str], width: int = 60) -> str:
    """As many as fit, and how many more."""
    shown = ", ".join(names)
    kept = len(names)
    while len(shown) > width and kept > 1:
        kept -= 1
        shown = ", ".join(names[:kept]) + f" and {len(names) - kept} more"
    return shown
