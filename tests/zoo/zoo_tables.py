"""The rows of the zoo as lines, and as the tables of ``docs/models.md``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from .compare import EQUAL, REFUSED, Row

BEGIN, END = "<!-- tables: make zoo -->", "<!-- end of tables -->"


def line(row: Row) -> str:
    mark = "" if row.expected else "!! "
    text = f"{mark}{row.family}: {row.name}, {row.how}: {row.outcome}"
    if row.outcome == EQUAL and row.ratio:
        text += f", {row.staged} staged, {row.ratio:.1f}x"
    return text + (f"\n      {row.detail}" if row.detail else "")


def counted(rows: Iterable[Row]) -> str:
    rows = list(rows)
    found = Counter(row.outcome for row in rows)
    strange = sum(not row.expected for row in rows)
    said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(found.items()))
    return f"{len({(row.family, row.name) for row in rows})} entries, {len(rows)} rows: {said}; {strange} not as expected"


def write_tables(path: Path, rows: list[Row]) -> None:
    """The tables of other families stay."""
    text = path.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    found, after = rest.split(END)
    known = {part.partition("\n")[0]: f"### {part.strip()}\n" for part in found.split("### ")[1:]}
    for family in dict.fromkeys(row.family for row in rows):
        own = [row for row in rows if row.family == family]
        known[family] = f"### {family}\n\n{counted(own)}.\n\n{table(own)}"
    tables = "\n".join(known.values())
    path.write_text(f"{before}{BEGIN}\n\n{tables}\n{END}{after}", encoding="utf-8")


def table(rows: list[Row]) -> str:
    lines = ["| entry | how | outcome | staged | step |", "|---|---|---|---|---|"]
    for row in rows:
        outcome = row.outcome if row.outcome != REFUSED else f"refused: {_short(row.detail)}"
        numbers = (f"{row.staged:,}", f"{row.ratio:.1f}×") if row.outcome == EQUAL and row.ratio else ("", "")
        lines.append(f"| {row.name} | {row.how} | {outcome} | {numbers[0]} | {numbers[1]} |")
    return "\n".join(lines) + "\n"


def _short(text: str) -> str:
    text = text.split(": ", 1)[-1] if text.startswith("NotSupported") else text
    text = text.replace("|", "\\|")
    return text if len(text) <= 110 else text[:107] + "..."
