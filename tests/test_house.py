"""The house: storeys and rooms, what may import what. Late imports and those for type checkers count."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STOREYS = {"transport": "rdmarpc.transport", "graph": "rdmarpc.graph", "rdmarpc": "rdmarpc"}
"""Folder and import name of each, the lowest first."""

ORDER = {
    "transport": [
        ["words"],
        ["errors.py", "interrupts.py", "region.py", "timeouts.py"],
        ["sandboxed.py"],
        ["peers"],
        ["memory"],
        ["tls"],
        ["notify.py", "channel.py", "device.py", "listening.py"],
        ["gpu", "nic"],
        ["shm", "tcp", "verbs"],
        ["cuda", "exchange"],
        ["auto.py"],
        ["kinds.py"],
        ["__init__.py"],
    ],
    "graph": [
        ["fragments"],
        ["show"],
        ["__init__.py"],
    ],
    "rdmarpc": [
        ["constants.py", "functions.py"],
        ["base"],
        ["message"],
        ["internal.py", "options.py"],
        ["links"],
        ["gradients"],
        ["references"],
        ["calls"],
        ["places"],
        ["collectives"],
        ["tools"],
        ["autograd.py", "gather.py", "timeline.py"],
        ["api.py"],
        ["nn.py", "profiling.py", "transfers.py", "torch_names.py"],
        ["servers"],
        ["optim.py"],
        ["__init__.py"],
        ["cli.py", "__main__.py"],
    ],
}
"""Rooms, and files at a storey's root, from the bottom to the top. A room imports what is below it, never its neighbours."""

BEAR_NAMES = {"rdmarpc/places"}
"""Rooms that users import by name: their ``__init__.py`` has what they import."""

Place = tuple[str, str]
"""A storey, and a room or a file at its root."""


class Module:
    def __init__(self, root: Path, storey: str, path: Path) -> None:
        within = path.relative_to(root / storey)
        self.path, self.is_package = path, path.name == "__init__.py"
        self.place: Place = storey, within.parts[0]
        parts = [STOREYS[storey], *within.with_suffix("").parts]
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.tree = ast.parse(path.read_text(encoding="utf-8"))


def modules(root: Path) -> dict[str, Module]:
    found = (Module(root, storey, path) for storey in STOREYS for path in sorted((root / storey).rglob("*.py")))
    return {module.name: module for module in found}


def imports(module: Module, known: dict[str, Module]) -> dict[str, int]:
    """The modules that one imports anywhere in its text, with a line."""
    found: dict[str, int] = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            base = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
            start = base[: len(base) - node.level + 1] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            names = [f"{source}.{item.name}" if f"{source}.{item.name}" in known else source for item in node.names]
        elif isinstance(node, ast.Import):
            names = [item.name for item in node.names]
        else:
            continue
        found |= {name: node.lineno for name in names if name in known and name != module.name}
    return found


def level(place: Place) -> tuple[int, int]:
    storey, room = place
    return list(STOREYS).index(storey), next(number for number, rooms in enumerate(ORDER[storey]) if room in rooms)


def upward(known: dict[str, Module]) -> Iterator[str]:
    """Imports of something above, or of a neighbour; files at a storey's root may import their neighbours."""
    for module in known.values():
        for name, line in imports(module, known).items():
            here, there = module.place, known[name].place
            beside = level(here) == level(there) and here != there and not here[1].endswith(".py")
            if level(there) > level(here) or beside:
                yield f"{module.path}:{line}: {'/'.join(here)} imports {name}, which is {'beside' if beside else 'above'} it"


def circles(known: dict[str, Module]) -> list[list[str]]:
    """Modules that import each other, directly or by way of others (Tarjan 1972)."""
    graph = {name: imports(module, known) for name, module in known.items()}
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in graph[name]:
            if other not in number:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], number[other])
        if low[name] == number[name]:
            circle = [stack.pop()]
            while circle[-1] != name:
                circle.append(stack.pop())
            if len(circle) > 1:
                found.append(sorted(circle))

    for name in graph:
        if name not in number:
            visit(name)
    return found


def rooms(root: Path) -> list[Path]:
    return sorted(path.parent for storey in STOREYS for path in (root / storey).glob("*/__init__.py"))


HOUSE = modules(ROOT)


def test_every_file_has_a_room():
    known = {storey: {room for rooms in levels for room in rooms} for storey, levels in ORDER.items()}
    strange = [str(module.path) for module in HOUSE.values() if module.place[1] not in known[module.place[0]]]
    assert len(HOUSE) > 150 and not strange


def test_imports_go_down():
    assert not list(upward(HOUSE))


def test_no_circles():
    assert not circles(HOUSE)


def test_a_room_says_what_it_is():
    for room in rooms(ROOT):
        charter = ast.parse((room / "__init__.py").read_text(encoding="utf-8"))
        assert ast.get_docstring(charter), f"{room} has no charter"
        name = f"{room.parent.name}/{room.name}"
        assert len(charter.body) == 1 or name in BEAR_NAMES, f"{room}/__init__.py has more than its charter"


def test_modules_of_tests_have_names_of_their_own():
    """Their folders share one space of names (``tests/__init__.py``)."""
    many = ("conftest.py", "__init__.py", "__main__.py")
    files = [path for path in Path(__file__).parent.rglob("*.py") if path.name not in many]
    twice = {name for name, count in Counter(path.stem for path in files).items() if count > 1}
    assert len(files) > 50 and not twice, [str(path) for path in files if path.stem in twice]


@pytest.mark.parametrize(
    ("text", "above"),
    [
        ("from ..shm import device", True),
        ("def late():\n    from rdmarpc.transport.shm.device import Device", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..shm.device import Device", True),
        ("import rdmarpc.graph.fragments.header", True),
        ("from ..peers import auth", False),
    ],
)
def test_an_import_that_goes_up_is_seen(tmp_path: Path, text: str, above: bool):
    for file in ("transport/peers/auth.py", "transport/shm/device.py", "graph/fragments/header.py"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("")
    (tmp_path / "transport/memory").mkdir()
    (tmp_path / "transport/memory/arena.py").write_text(text)
    assert bool(list(upward(modules(tmp_path)))) == above
    assert not circles(modules(tmp_path))


def test_a_circle_is_seen(tmp_path: Path):
    (tmp_path / "graph/fragments").mkdir(parents=True)
    (tmp_path / "graph/fragments/header.py").write_text("from .layout import Layout")
    (tmp_path / "graph/fragments/layout.py").write_text("def late():\n    from . import metadata")
    (tmp_path / "graph/fragments/metadata.py").write_text("import rdmarpc.graph.fragments.header")
    assert circles(modules(tmp_path)) == [[f"rdmarpc.graph.fragments.{name}" for name in ("header", "layout", "metadata")]]
