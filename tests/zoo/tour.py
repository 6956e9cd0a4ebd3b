"""``python -m tests.zoo.tour``: train every model and loop of the zoo three ways, and print what came of it.

Arguments choose: names of families, or parts of names of entries. ``--tables docs`` writes the rows of whole families into
``docs/models.tsv`` and their numbers between the marks of ``docs/models.md``. The status is 1 if an entry is not what it
should be: equal, or refused with the reason it states.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from group import run_group

import rdmarpc as rpc

from . import families
from .compare import CRASH, Row, rows_of
from .entry import Entry
from .zoo_tables import counted, line, write_tables

LIMIT_S = 240.0
"""That one entry may take."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.tour", description=__doc__)
    parser.add_argument("chosen", nargs="*", help="families, or parts of names")
    parser.add_argument("--tables", type=Path, default=None, metavar="FOLDER")
    parser.add_argument("--save", type=Path, default=None, help="all rows, as JSON")
    options = parser.parse_args()
    if options.tables is not None and not set(options.chosen) <= set(families.NEEDS):
        parser.error("--tables takes whole families")
    rows: list[Row] = []
    for family, names in choose(options.chosen):
        for row in visit(family, names):
            rows.append(row)
            print(line(row), flush=True)
    if options.save is not None:
        options.save.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if options.tables is not None:
        write_tables(options.tables, rows)
    print(counted(rows))
    return int(any(not row.expected for row in rows))


def choose(chosen: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    for family in families.NEEDS:
        if absent := families.missing(family):
            if not chosen or family in chosen:
                print(f"{family}: left out, {', '.join(absent)} cannot be imported (needs the zoo extra)")
            continue
        if chosen and family not in chosen and all(other in families.NEEDS for other in chosen):
            continue
        names = [
            name
            for name in families.entries(family)
            if not chosen or family in chosen or any(part.lower() in name.lower() for part in chosen)
        ]
        if names:
            yield family, names


def visit(family: str, names: list[str]) -> Iterator[Row]:
    """One group of workers for all of them, and a new one where an entry has ended it."""
    left = list(names)
    with tempfile.TemporaryDirectory() as folder:
        while left:
            diary = Path(folder) / f"diary{len(left)}"
            diary.touch()
            try:
                run_group(
                    partial(_worker, family, left, str(diary)),
                    3,
                    timeout=LIMIT_S * len(left) + 60,
                    transport="shm",
                    rpc_timeout=120,
                )
            except AssertionError as error:
                print(f"the group has ended: {error}", file=sys.stderr)
            done, rows = _read(diary)
            yield from rows
            left = left[len(done) :]
            if left:
                text = "its process has ended, or it took too long"
                yield Row(family, left[0], "", CRASH, text, expected=False)
                left = left[1:]


def _read(diary: Path) -> tuple[list[str], list[Row]]:
    entries = [json.loads(text) for text in diary.read_text().splitlines()]
    return [entry["name"] for entry in entries], [Row(**row) for entry in entries for row in entry["rows"]]


def _worker(family: str, names: list[str], diary: str, rank: int) -> None:
    try:
        if rank:  # operators that packages register
            families.import_packages(family)
            return
        shown = families.entries(family)
        with open(diary, "a", encoding="utf-8") as file:
            for name in names:
                faulthandler.dump_traceback_later(LIMIT_S, exit=True)
                rows = _rows(family, name, shown[name])
                faulthandler.cancel_dump_traceback_later()
                file.write(json.dumps({"name": name, "rows": [asdict(row) for row in rows]}) + "\n")
                file.flush()
    finally:
        rpc.shutdown()


def _rows(family: str, name: str, entry: Any) -> list[Row]:
    try:
        return rows_of(family, name, entry) if isinstance(entry, Entry) else entry.rows(family, name)
    except Exception:
        return [Row(family, name, "", CRASH, traceback.format_exc(limit=-4)[-800:], expected=False)]


if __name__ == "__main__":
    sys.exit(main())
