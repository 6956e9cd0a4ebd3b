"""The house: storeys and rooms, what may import what. Late imports and those for type checkers count."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STOREYS = {"transport": "rdmarpc.transport", "graph": "rdmarpc.graph", "rdmarpc": "rdmarpc"}
"""Folder and import name of each, the lowest first."""

ORDER = {
    "transport": [
        ["words"],
        ["errors.py", "interrupts.py", "region.py", "timeouts.py"],
        ["peers"],
        ["memory"],
        ["tls"],
        ["notify.py", "channel.py", "device.py", "listening.py"],
        ["gpu", "nic"],
        ["shm", "tcp", "verbs"],
        ["cuda", "exchange"],
        ["kinds.py"],
        ["__init__.py"],
    ],
    "graph": [
        ["fragments.py"],
        ["show.py"],
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
        ["autograd.py", "timeline.py"],
        ["api.py"],
        ["nn.py", "profiling.py", "transfers.py", "torch_names.py"],
        ["servers"],
        ["optim.py"],
        ["__init__.py"],
        ["__main__.py"],
    ],
}
"""Rooms, and files at a storey's root, from the bottom to the top. A room imports what is below it, never its neighbours."""

BEAR_NAMES = {"rdmarpc/places", "transport/exchange"}
"""Rooms that users, or the storeys above, import by name: their ``__init__.py`` has what they import."""

FOLDERS = STOREYS | {"experiments": "rdmarpc.experiments"}
"""The storeys, and what stands on them."""

Place = tuple[str, str]
"""A storey, and a room or a file at its root."""


class Module:
    def __init__(self, root: Path, storey: str, path: Path) -> None:
        within = path.relative_to(root / storey)
        self.path, self.is_package = path, path.name == "__init__.py"
        self.place: Place = storey, within.parts[0]
        parts = [FOLDERS[storey], *within.with_suffix("").parts]
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.tree = ast.parse(path.read_text(encoding="utf-8"))


def modules(root: Path, storeys: Iterable[str] = STOREYS) -> dict[str, Module]:
    found = (Module(root, storey, path) for storey in storeys for path in sorted((root / storey).rglob("*.py")))
    return {module.name: module for module in found}


def statements(module: Module) -> Iterator[tuple[int, str, str]]:
    """Each import anywhere in its text: the line, from which module, and which name (empty: the module itself)."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            base = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
            start = base[: len(base) - node.level + 1] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            yield from ((node.lineno, source, item.name) for item in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, item.name, "") for item in node.names)


def imports(module: Module, known: dict[str, Module]) -> dict[str, int]:
    """The modules that one imports, with a line."""
    found: dict[str, int] = {}
    for line, source, item in statements(module):
        name = f"{source}.{item}" if f"{source}.{item}" in known else source
        if name in known and name != module.name:
            found[name] = line
    return found


def face(root: Module) -> set[str]:
    """What the ``__init__.py`` at a storey's root names: what it binds, and modules beside it that its docstring speaks of."""
    found = set(re.findall(r"``(\w+)``", ast.get_docstring(root.tree) or ""))
    for node in ast.walk(root.tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            found |= {item.asname or item.name for item in node.names}
    return found


def past_a_face(known: dict[str, Module]) -> Iterator[str]:
    """Imports of another storey that do not take what its root names from its root."""
    roots = {name: storey for storey, name in FOLDERS.items() if name in known}
    faces = {name: face(known[name]) | {root.rpartition(".")[2] for root in roots} for name in roots}
    for module in known.values():
        for line, source, item in statements(module):
            storey = next((roots[root] for root in sorted(roots, reverse=True) if f"{source}.".startswith(f"{root}.")), None)
            if storey in (None, module.place[0]) or (source in faces and (not item or item in faces[source])):
                continue
            yield f"{module.path}:{line}: {item or source} from {source}, past what the root of {storey}/ names"


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


def code_lines(module: Module) -> int:
    """Without blanks, comments and docstrings."""
    texts = (node for node in ast.walk(module.tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    docstrings = {line for node in texts for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = enumerate(map(str.strip, module.path.read_text(encoding="utf-8").splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and number not in docstrings for number, line in lines)


def rooms(root: Path) -> list[Path]:
    return sorted(path.parent for storey in STOREYS for path in (root / storey).glob("*/__init__.py"))


@functools.cache
def everything() -> dict[str, Module]:
    return modules(ROOT, FOLDERS)


def house() -> dict[str, Module]:
    return {name: module for name, module in everything().items() if module.place[0] in STOREYS}


def test_every_file_has_a_room():
    known = {storey: {room for rooms in levels for room in rooms} for storey, levels in ORDER.items()}
    strange = [str(module.path) for module in house().values() if module.place[1] not in known[module.place[0]]]
    assert len(house()) > 150 and not strange


def test_imports_go_down():
    assert not list(upward(house()))


def test_imports_from_above_name_the_storeys_root_only():
    assert not list(past_a_face(everything()))


def test_no_circles():
    assert not circles(house())


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
        ("import rdmarpc.graph.fragments", True),
        ("from ..peers import auth", False),
    ],
)
def test_an_import_that_goes_up_is_seen(tmp_path: Path, text: str, above: bool):
    for file in ("transport/peers/auth.py", "transport/shm/device.py", "graph/fragments.py"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("")
    (tmp_path / "transport/memory").mkdir()
    (tmp_path / "transport/memory/arena.py").write_text(text)
    assert bool(list(upward(modules(tmp_path)))) == above
    assert not circles(modules(tmp_path))


@pytest.mark.parametrize(
    ("file", "text", "past"),
    [
        ("graph/show.py", "from ..transport import Arena, exchange, timeouts", False),
        ("graph/show.py", "from .. import transport", False),
        ("graph/show.py", "from ..transport import guard", True),
        ("graph/show.py", "from ..transport.memory import Arena", True),
        ("graph/show.py", "def late():\n    import rdmarpc.transport.memory", True),
        ("transport/guard.py", "from .memory import Arena", False),
        ("experiments/latency/end.py", "import rdmarpc as rpc\nfrom rdmarpc import graph, transport, wrap", False),
        ("experiments/latency/end.py", "from rdmarpc import calls", True),
        ("experiments/latency/end.py", "from rdmarpc.places.wrap import wrap", True),
    ],
)
def test_an_import_past_a_face_is_seen(tmp_path: Path, file: str, text: str, past: bool):
    roots = {
        "transport": '"""``exchange``."""\nfrom . import timeouts\nfrom .memory import Arena',
        "graph": "",
        "rdmarpc": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .places.wrap import wrap",
        "experiments": "",
    }
    for storey, names in roots.items():
        (tmp_path / storey).mkdir()
        (tmp_path / storey / "__init__.py").write_text(names)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert bool(list(past_a_face(modules(tmp_path, FOLDERS)))) == past


def test_sizes_are_told():
    """Lines of code by room, without blanks, comments and docstrings: ``pytest -s``. Nothing here fails because of them."""
    lines = Counter[str]()
    for module in everything().values():
        storey, room = module.place
        lines[f"{storey}/" if room.endswith(".py") else f"{storey}/{room}/"] += code_lines(module)
    print("", *(f"{count:7,} {room}" for room, count in lines.most_common()), f"{lines.total():7,} all", sep="\n")
    assert lines["transport/"] > 100


def test_a_circle_is_seen(tmp_path: Path):
    (tmp_path / "graph/fragments").mkdir(parents=True)
    (tmp_path / "graph/fragments/header.py").write_text("from .layout import Layout")
    (tmp_path / "graph/fragments/layout.py").write_text("def late():\n    from . import metadata")
    (tmp_path / "graph/fragments/metadata.py").write_text("import rdmarpc.graph.fragments.header")
    assert circles(modules(tmp_path)) == [[f"rdmarpc.graph.fragments.{name}" for name in ("header", "layout", "metadata")]]
