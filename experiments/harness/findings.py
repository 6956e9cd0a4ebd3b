"""What an experiment found, in one form: tables, targets, what was left out, and every sample with its spread.

``NAME.json`` in the run's folder holds it, ``experiments.paper`` puts many of them into one report. Nothing here imports torch.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from .versions import versions

Key = tuple[str, int, str]
"""Case, size (bytes, workers, ...), and what was measured."""

RELATIONS = {"≥": lambda measured, asked: measured >= asked, "≤": lambda measured, asked: measured <= asked}


def quantile(values: list[float], part: float) -> float:
    """Linear between the two nearest samples; ``part`` from 0 to 1."""
    ordered = sorted(values)
    at = part * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def spread(values: list[float]) -> dict[str, float]:
    """The number of samples, their median, and the tenth and ninetieth percentile."""
    return {
        "n": len(values),
        "median": statistics.median(values),
        "p10": quantile(values, 0.1),
        "p90": quantile(values, 0.9),
    }


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

    def table(self, title: str, columns: list[str], rows: list[list[str]], note: str = "") -> None:
        """The cells are text. ``note`` stands below and says what the columns mean."""
        self.tables.append({"title": title, "columns": columns, "rows": rows, "note": note})

    def target(self, name: str, measured: float | None, relation: str, asked: float) -> None:
        """Of a number without a spread. ``met`` is `None` where nothing was measured."""
        met = None if measured is None else RELATIONS[relation](measured, asked)
        self.targets.append({"name": name, "measured": measured, "relation": relation, "asked": asked, "met": met})

    def target_times(self, name: str, over: Key, under: Key, relation: str, asked: float) -> None:
        """A target of the median of ``over`` by that of ``under``. Met or missed is what the tenth percentile of one by the
        ninetieth of the other says as well as the reverse; else ``met`` is `None`: the spread, or one sample alone, leaves it
        open."""
        self.target(name, ratio(self.median(*over), self.median(*under)), relation, asked)
        target = self.targets[-1]
        if target["measured"] is None:
            return
        above, below = spread(self.samples(*over)), spread(self.samples(*under))
        low, high = above["p10"] / below["p90"], above["p90"] / below["p10"]
        holds = {RELATIONS[relation](value, asked) for value in (low, high)}
        known = len(holds) == 1 and min(above["n"], below["n"]) > 1  # one sample has no spread
        target |= {"low": low, "high": high, "met": target["met"] if known else None}

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


def ratio(slower: float | None, faster: float | None) -> float | None:
    """`None` where one of both was not measured."""
    return slower / faster if slower is not None and faster else None


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


def target_text(target: dict[str, Any]) -> str:
    """One line: met, missed, open or not measured."""
    if target["measured"] is None:
        return f"not measured: {target['name']} (asked {target['relation']} {target['asked']:g})"
    measured, asked = number_text(target["measured"]), number_text(target["asked"])
    if "low" in target:
        measured += f" ({number_text(target['low'])} to {number_text(target['high'])})"
    return f"{verdict(target)}: {target['name']}: {measured}, asked {target['relation']} {asked}"


def verdict(target: dict[str, Any]) -> str:
    """``open``: the spread has values on both sides of what is asked, or there is one sample alone."""
    if target["measured"] is None:
        return "not measured"
    return {True: "met", False: "missed", None: "open"}[target["met"]]


def verdicts(targets: list[dict[str, Any]]) -> str:
    """How many of each: "3 met, 1 missed, 2 open"."""
    found = [verdict(target) for target in targets]
    counts = {name: found.count(name) for name in ("met", "missed", "open", "not measured")}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count or name in ("met", "missed"))


def number_text(value: float) -> str:
    """Three digits at least, and never an exponent where a reader would not want one."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


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
        console.print(f" target {target_text(target)}", soft_wrap=True)
    for left in found["left_out"]:
        console.print(f" left out: {left['what']}: {left['why']}", soft_wrap=True)
