"""The rows of the zoo as lines, as ``docs/models.tsv``, and as the summary in ``docs/models.md``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from .compare import EQUAL, REFUSED, WRONG, Row

BEGIN, END = "<!-- summary: make zoo -->", "<!-- end of summary -->"
HEAD = ("family", "entry", "way", "outcome", "detail")

Told = tuple[str, ...]
"""A row as the file has it, in the order of ``HEAD``."""


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


def told(row: Row) -> Told:
    return tuple(" ".join(text.split()) for text in (row.family, row.name, row.how, row.outcome, row.detail))


def write_tables(docs: Path, rows: Iterable[Row]) -> None:
    """``models.tsv`` of a folder, and the summary of it in ``models.md``. Rows of families that were not run stay."""
    new = {told(row) for row in rows}
    run = {family for family, *_ in new}
    kept = {row for row in read(docs / "models.tsv") if row[0] not in run}
    lines = ["\t".join(row) for row in (HEAD, *sorted(new | kept))]
    (docs / "models.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    page = docs / "models.md"
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{summary(new | kept)}{END}{after}", encoding="utf-8")


def read(path: Path) -> list[Told]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [tuple(text.split("\t")) for text in lines[1:]]


def summary(rows: Iterable[Told]) -> str:
    """A line for each family."""
    rows = list(rows)
    lines = ["| family | entries | rows | equal | refused | wrong | crash |", "|---|---|---|---|---|---|---|"]
    for family in (*sorted({row[0] for row in rows}), ""):
        own = [row for row in rows if family in ("", row[0])]
        outcomes = Counter(row[3] for row in own)
        others = len(own) - outcomes[EQUAL] - outcomes[REFUSED] - outcomes[WRONG]
        counts = (len({row[:2] for row in own}), len(own), outcomes[EQUAL], outcomes[REFUSED], outcomes[WRONG], others)
        lines.append(f"| {family or 'all'} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines) + "\n"
