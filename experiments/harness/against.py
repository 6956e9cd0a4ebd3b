"""Another commit beside this one: the same experiment of both by turns, each in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from .compare import figures
from .findings import Key
from .versions import ROOT

FOLDER = ROOT / ".against"
"""Where commits are checked out and installed, each once: a minute or more, and 1.5 GB."""


def by_turns(module: str, overrides: list[str], revision: str, rounds: int) -> dict[str, Any]:
    """Run ``python -m MODULE OVERRIDES rounds=1`` of a commit and of this tree, ``rounds`` times, and the one that begins
    changes. Returns {"commit": its name, "pairs": [{"key": [case, size, what], "unit", "before": its medians, "after": ours}]}
    of the figures that both have. Ends the program where git does not know the commit, or a run fails."""
    commit = _named(revision)
    turns = [(commit, _installed(commit)), ("this one", ROOT)]
    found: dict[str, dict[Key, list[float]]] = {name: {} for name, _ in turns}
    units: dict[Key, str] = {}
    for number in range(rounds):
        for name, folder in turns if number % 2 == 0 else turns[::-1]:
            print(f"pair {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            for key, record in _run(module, overrides, folder).items():
                found[name].setdefault(key, []).extend(record["samples"])
                units[key] = record.get("unit", "")
    before, after = found.values()
    both = [key for key in after if len(before.get(key, ())) == len(after[key]) == rounds]
    pairs = [{"key": list(key), "unit": units[key], "before": before[key], "after": after[key]} for key in both]
    return {"commit": commit, "pairs": pairs}


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: against: git {' '.join(arguments)}: {done.stderr.decode().strip()}")
    return done.stdout


def _named(revision: str) -> str:
    return _git("rev-parse", "--verify", "--short=12", f"{revision}^{{commit}}").decode().strip()


def _installed(commit: str) -> Path:
    """The folder of a commit, with a virtual environment in it."""
    folder = FOLDER / commit
    done = folder / ".venv" / ".installed"
    if done.exists():
        return folder
    print(f"installing {commit} into {folder}, once: some minutes", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=_git("archive", commit), check=True)
    venv.create(folder / ".venv", clear=True, with_pip=True)
    pip = [_python(folder), "-m", "pip", "install", "--quiet", "-c", "constraints.txt"]
    subprocess.run([*pip, "torch"], cwd=folder, check=True)  # first, so that no later requirement chooses another build of it
    subprocess.run([*pip, "-e", ".[experiments,bench]"], cwd=folder, check=True)
    done.touch()
    return folder


def _python(folder: Path) -> str:
    return sys.executable if folder == ROOT else str(folder / ".venv" / "bin" / "python")


def _run(module: str, overrides: list[str], folder: Path) -> dict[Key, dict[str, Any]]:
    command = [_python(folder), "-m", module, *overrides, "rounds=1", "--json"]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise SystemExit(f"error: against: {' '.join(command)} ended with {done.returncode}")
    return figures(json.loads(done.stdout))


def print_pairs(found: dict[str, Any]) -> None:
    """For each figure of ours, and each floor, both medians, and in how many pairs this tree gave less, on standard output."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from .targets import spread

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 160
    table = Table(title=f"{found['commit']} and this commit, by turns", title_justify="left", box=SIMPLE_HEAD)
    for number, column in enumerate(("", "size", "of", "unit", found["commit"], "this", "×", "less in")):
        table.add_column(column, justify="right" if number > 3 or number == 1 else "left", no_wrap=True)
    for each in found["pairs"]:
        case, size, what = each["key"]
        if what not in ("floor", "rdmarpc"):
            continue
        before, after = spread(each["before"])["median"], spread(each["after"])["median"]
        times = f"{after / before:.2f}" if before else ""
        less = sum(ours < theirs for theirs, ours in zip(each["before"], each["after"]))
        medians = f"{before:,.4g}", f"{after:,.4g}"
        table.add_row(case, f"{size:,}", what, each["unit"], *medians, times, f"{less} of {len(each['after'])}")
    console.print(table)
