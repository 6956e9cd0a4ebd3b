"""The pages of ``docs/`` say what the code is: signatures of the reference, rooms of the picture, links between pages."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def signatures(page: str) -> list[str]:
    """The page without its sentences."""
    return [line for line in page.splitlines() if line.strip() and not line.lstrip().startswith("# ")]


def test_the_reference_has_every_public_name_with_its_signature() -> None:
    written = (DOCS / "api.md").read_text()
    assert signatures(load(DOCS / "reference.py").page(written)) == signatures(written), "run: python docs/reference.py"


def test_the_tables_of_the_protocols_are_those_of_the_code() -> None:
    tables = load(DOCS / "tables.py")
    for path in tables.PAGES:
        written = path.read_text()
        assert tables.page(written) == written, "run: python docs/tables.py"
        assert not tables.without_meaning(written), "the page does not say what these are"
    assert len(tables.TABLE.findall(written)) > 5 and "| `REQUEST` | 1 |" in written


def test_the_picture_and_the_design_have_every_room() -> None:
    picture, design = (DOCS / "house.svg").read_text(), (DOCS / "design.md").read_text()
    rooms = {path.parent for top in ("transport", "graph", "rdmarpc") for path in (ROOT / top).glob("*/__init__.py")}
    assert not [str(room) for room in rooms if f">{room.name}/<" not in picture or f"`{room.name}/`" not in design]
    assert picture == load(DOCS / "house.py").picture() + "\n", "run: python docs/house.py > docs/house.svg"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", page.read_text())
    found = [(page.parent / link if link else page, anchor) for link, anchor in links]
    assert not [(path, anchor) for path, anchor in found if not path.exists() or (anchor and anchor not in anchors(path))]


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_pages_name_is_there(page: Path) -> None:
    """Tests, by file and by name; programs that ``python -m`` starts, and their options; files, by the room they are in."""
    text = page.read_text()
    files = {path.name: path for path in (ROOT / "tests").rglob("*.py")}
    tests = "".join(path.read_text() for path in files.values())
    missing = [name for name in re.findall(r"`(test_\w+\.py)`", text) if name not in files]
    missing += [name for name in re.findall(r"`(test_\w+)`", text) if f"def {name}(" not in tests]
    programs = re.findall(r"-m ((?:experiments|examples|tests)(?:\.[a-z_]\w*)*)\b(?!\.)", text)
    made = re.findall(r"`experiments/(\w+)\.py`:\n", text)  # by who follows the page
    for name in programs:
        there = ROOT / name.replace(".", "/")
        if not there.with_suffix(".py").exists() and not there.is_dir() and there.name not in made:
            missing.append(name)
    for name, options in re.findall(r"-m experiments\.(\w+) ([^\n`]*=[^\n`]*)", text):
        config = (ROOT / f"experiments/conf/{name}.yaml").read_text() if name not in made else options
        keys = re.findall(r"(?<![\w./])(?!hydra)([a-z_]+)[\w.]*=", options)
        missing += [f"{name} {key}" for key in keys if not re.search(rf"\b{key}[:=]", config)]
    tops = [ROOT / top for top in ("transport", "graph", "rdmarpc", "experiments", "tests")]
    rooms = [*tops, *(path for top in tops for path in top.iterdir())]
    for name, room, within in re.findall(r"`((\w+)/(\w[\w/]*?)(?:\.py)?)`", text):
        found = [path / within for path in rooms if path.name == room]
        if found and within not in made and not any(path.exists() or path.with_suffix(".py").exists() for path in found):
            missing.append(name)
    assert not missing


def test_the_promises_name_tests() -> None:
    """By a file, ``::`` and a word of the test's name; by a parameter, in brackets; what comes next is of the same file."""
    files = {path.stem: path for path in (ROOT / "tests").rglob("test_*.py")}
    helpers = "".join(path.read_text() for path in (ROOT / "tests/helpers").glob("*.py"))
    missing = []
    for line in re.findall(r"^\| .* \| (.*) \|$", (DOCS / "promises.md").read_text(), re.M):
        text = ""
        for entry in re.split(r", (?![^\[]*\])", line.replace("`", "") if line != "test" else ""):
            where, names = re.fullmatch(r"([^\[]*?)(?: \[(.*)\])?", entry).groups()  # type: ignore[union-attr]
            file, _, word = where.partition("::")
            stem, folder = Path(file).stem, ROOT / "tests" / file.removeprefix("tests/")
            if path := files.get(f"test_wrap_{file}", files.get(stem)):
                text = path.read_text()
            elif folder.is_dir():
                text = "".join(path.read_text() for path in folder.rglob("*.py"))
            else:
                word = where
            if not re.search(rf"def test_\w*{word.removeprefix('test_')}", text):
                missing.append(entry)
            missing += [name for name in re.split(r", | \.\.\. ", names or "") if name.strip("* ") not in text + helpers]
    assert not missing


def test_the_example_of_the_readme_says_what_stands_there(tmp_path: Path) -> None:
    page = (ROOT / "README.md").read_text()
    found = re.search(r"```python\n(import os\n.*?)```\n+```\n\$ torchrun[^\n]*\n(.*?)```", page, re.S)
    assert found
    program, output = found.groups()
    (tmp_path / "train.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(tmp_path / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (loss, table), (_, expected) = (text.strip().split("\n", 1) for text in (done.stdout, output))
    assert loss.startswith("loss 0.") and table == expected


def test_the_experiment_of_contributing_runs(tmp_path: Path) -> None:
    page, folder = (ROOT / "CONTRIBUTING.md").read_text(), tmp_path / "experiments"
    (folder / "conf").mkdir(parents=True)
    for path in (*(ROOT / "experiments").iterdir(), *(ROOT / "experiments/conf").iterdir()):
        if path.name != "conf":
            (tmp_path / path.relative_to(ROOT)).symlink_to(path)
    for name, text in re.findall(r"`experiments/((?:conf/)?echo\.\w+)`:\n\n```\w+\n(.*?)```", page, re.S):
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "experiments.echo", "nbytes=65536", "rounds=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "65536" in done.stdout and len(list(tmp_path.rglob("echo.json"))) == 1
