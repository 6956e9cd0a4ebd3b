"""What an experiment found, in one form: tables, targets, what was left out, and every sample with its spread.

``NAME.json`` in the run's folder holds it, ``experiments.paper`` puts many of them into one report. Nothing here imports torch.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import targets
from .targets import spread
from .versions import versions

if TYPE_CHECKING:
    from rich.table import Table

Key = tuple[str, int, str]
"""Case, size (bytes, workers, ...), and what was measured."""


def machine() -> dict[str, Any]:
    """Processor, cores and memory of this host."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }


def available_gib() -> float:
    """Memory that new processes could have, as the kernel estimates it."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 2**20
    return math.inf


class Findings:
    """Collects what one run of an experiment found. ``unit``: of all samples."""

    def __init__(self, title: str, unit: str) -> None:
        self.title, self.unit = title, unit
        self.tables: list[dict[str, Any]] = []
        self.targets: list[dict[str, Any]] = []
        self.left: list[dict[str, str]] = []
        self._samples: dict[Key, list[float]] = defaultdict(list)

    def add(self, case: str, size: int, what: str, value: float) -> None:
        self._samples[case, size, what].append(value)

    def keep(self, what: str, figures: list[tuple[str, int, float]]) -> None:
        """What one turn measured of ``what``: cases, sizes and numbers."""
        for case, size, value in figures:
            self.add(case, size, what, value)

    def median(self, case: str, size: int, what: str) -> float | None:
        """`None`: not measured."""
        values = self._samples.get((case, size, what))
        return statistics.median(values) if values else None

    def samples(self, case: str, size: int, what: str) -> list[float]:
        """In the order in which they were added; empty: not measured."""
        return list(self._samples.get((case, size, what), ()))

    def measured(self) -> list[Key]:
        return list(self._samples)

    def table(self, title: str, columns: list[str], rows: list[list[str]], note: str = "", *, better: str) -> None:
        """The cells are text. ``note`` stands below and says what the columns mean; in front of it, ``better``: sentences that
        say of which columns lower is better, of which higher, or that the figures are neither."""
        self.tables.append({"title": title, "columns": columns, "rows": rows, "note": f"{better} {note}".strip()})

    def target(self, name: str, measured: float | None, relation: str, asked: float, goal: str = "") -> None:
        """Of a number without a spread. ``met`` is `None` where nothing was measured. ``goal``: a key of ``targets.GOALS``."""
        self.targets.append(targets.of_goal(targets.of_number(name, measured, relation, asked), goal))

    def target_times(self, name: str, over: Key, under: Key, relation: str, asked: float, goal: str = "") -> None:
        """Of the median of ``over`` by that of ``under``: met or missed beyond the spread, or else open."""
        found = targets.of_times(name, self.samples(*over), self.samples(*under), relation, asked)
        self.targets.append(targets.of_goal(found, goal))

    def left_out(self, what: str, why: str) -> None:
        """Once for each pair, however often it is said."""
        entry = {"what": what, "why": why}
        if entry not in self.left:
            self.left.append(entry)

    def as_dict(self, job: dict[str, Any]) -> dict[str, Any]:
        samples = [
            {"case": case, "size": size, "what": what, "unit": self.unit, **spread(values), "samples": values}
            for (case, size, what), values in self._samples.items()
        ]
        return {
            "title": self.title,
            "tables": self.tables,
            "targets": self.targets,
            "left_out": self.left,
            "samples": samples,
            "config": job,
            "versions": versions(),
            "machine": machine(),
        }


def text(value: float | None, form: str = "{:,.2f}") -> str:
    """A cell of a table."""
    return "-" if value is None else form.format(value)


def times(value: float | None) -> str:
    """A cell with a ratio."""
    if value is None:
        return "-"
    return f"{value:,.0f}×" if value >= 10 else f"{value:.2g}×"


def size_text(size: int) -> str:
    """Decimal, as the papers have it."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} B"


def of_rich(table: Table, note: str = "") -> dict[str, Any]:
    """A table for the terminal in the common form. There, an empty first cell stands for the one above it, and a column's head
    that begins with a line break for that of the column before."""
    from rich.text import Text

    def plain(cell: Any) -> str:
        return Text.from_markup(str(cell)).plain

    heads: list[str] = []
    above = ""
    for column in table.columns:
        first, broken, second = plain(column.header).partition("\n")
        above = first or above
        heads.append(f"{above} {second}".strip() if broken else first)
    rows = [list(map(plain, cells)) for cells in zip(*(column.cells for column in table.columns))]
    for before, row in pairwise(rows):
        row[0] = row[0] or before[0]
    return {"title": " ".join(plain(table.title or "").split()), "columns": heads, "rows": rows, "note": " ".join(note.split())}


def print_findings(found: dict[str, Any]) -> None:
    """Tables, targets and what was left out, on standard output."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 160
    for each in found["tables"]:
        table = Table(title=each["title"], title_justify="left", box=SIMPLE_HEAD)
        for number, column in enumerate(each["columns"]):
            table.add_column(column, justify="right" if number else "left", no_wrap=not number)
        for row in each["rows"]:
            table.add_row(*row)
        console.print(table)
        if each["note"]:
            console.print(f" {each['note']}\n", soft_wrap=True)
    for target in found["targets"]:
        console.print(f" target {targets.target_text(target)}", soft_wrap=True)
    for left in found["left_out"]:
        console.print(f" left out: {left['what']}: {left['why']}", soft_wrap=True)
