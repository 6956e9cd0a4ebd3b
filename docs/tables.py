"""Writes the tables of ``formats.md`` anew, and the rooms in ``protocols.md``: ``python docs/tables.py``.

``tests/test_reference.py`` compares them with the code. A table stands between marks that say where the code has it::

    <!-- from rdmarpc.links.frames: REQUEST -->
    ...
    <!-- end -->

``REQUEST``: all names of the assignment that makes this one (``REQUEST, RESPONSE, ... = range(1, 11)``); several are separated
by commas. Names and values come from the code; a ``struct.Struct`` shows its format and its size. What they mean stays as it is
in the page, where it is edited. A new name has nothing there, which the test refuses. ``<!-- rooms that import compiled -->``
lists the folders of which a file imports a module of that name.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / name for name in ("protocols.md", "formats.md")]
TABLE = re.compile(r"(<!-- from ([\w.]+): ([\w, ]+) -->\n)(.*?)(<!-- end -->)", re.S)
ROOMS = re.compile(r"(<!-- rooms that import (\w+) -->\n)(.*?)(<!-- end -->)", re.S)


def assigned_with(module: ModuleType, name: str) -> list[str]:
    """The names that one assignment binds together with ``name``."""
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.Assign):
            found = [each.id for each in ast.walk(node.targets[0]) if isinstance(each, ast.Name)]
            if name in found:
                return [each for each in found if isinstance(getattr(module, each), int | struct.Struct)]
    raise LookupError(f"{module.__name__} assigns no {name}")


def shown(value: int | struct.Struct) -> str:
    return f"`{value.format}`, {value.size} bytes" if isinstance(value, struct.Struct) else str(value)


def meanings(text: str) -> dict[str, str]:
    """What people wrote beside each name."""
    return dict(re.findall(r"^\| `(\w+)` \|[^|]*\| ?(.*?) ?\|$", text, re.M))


def table(found: re.Match[str]) -> str:
    module, written = importlib.import_module(found[2]), meanings(found[4])
    lines = ["| name | value | meaning |", "|---|---|---|"]
    for name in (each for first in found[3].split(", ") for each in assigned_with(module, first)):
        lines.append(f"| `{name}` | {shown(getattr(module, name))} | {written.get(name, '')} |")
    return found[1] + "\n".join(lines) + "\n" + found[5]


def rooms(found: re.Match[str]) -> str:
    there = set()
    for top in ("transport", "graph", "rdmarpc"):
        for path in (ROOT / top).glob("*/**/*.py"):
            if re.search(rf"^from \S+ import (\([^)]*|.*)\b{found[2]}\b", path.read_text(), re.M):
                there.add(f"`{path.relative_to(ROOT).parent}`")
    return found[1] + ", ".join(sorted(there)) + "\n" + found[4]


def page(before: str) -> str:
    """The page as it should be, with the meanings of the one that was before."""
    rewrite: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = ((TABLE, table), (ROOMS, rooms))
    for pattern, written in rewrite:
        before = pattern.sub(written, before)
    return before


def without_meaning(text: str) -> list[str]:
    """The names in its tables of which it says nothing."""
    return [name for found in TABLE.finditer(text) for name, said in meanings(found[4]).items() if not said.strip()]


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path.read_text()))
