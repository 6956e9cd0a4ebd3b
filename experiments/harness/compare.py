"""What has changed from one run of an experiment to a later one, beyond the spread of both.

A file has its samples under ``records`` (``bench``) or ``samples`` (``Findings``): case, size, what, and a number for each
round.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from .findings import Key
from .targets import spread

LEAST = 3
"""Rounds that both runs need of a figure: one or two have no spread."""

APART = ("compare", "targets", "json")
"""Settings that no figure depends on."""


class Change(NamedTuple):
    """One figure in both runs (``findings.spread``). ``times``: the later median by the earlier one. ``floor``: the same of the
    floor beside it, where both measured one: how the machine has changed."""

    key: Key
    unit: str
    before: dict[str, float]
    after: dict[str, float]
    times: float
    floor: float | None

    @property
    def beyond(self) -> bool:
        """Whether tenth to ninetieth percentile of one run lie outside of those of the other."""
        return self.before["p90"] < self.after["p10"] or self.after["p90"] < self.before["p10"]


def load(path: Path) -> dict[str, Any]:
    """The result of an earlier run. Raises ``ValueError`` for a file that is none."""
    try:
        found = json.loads(path.read_text())
        figures(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the result of an experiment: {error}") from None
    return found


def figures(result: dict[str, Any]) -> dict[Key, dict[str, Any]]:
    """The records of a result by their keys."""
    records = result["records"] if "records" in result else result["samples"]
    return {(record["case"], record["size"], record["what"]): record for record in records}


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """{"changed": a record for each figure that has changed beyond the spread, "compared": how many figures could be compared,
    "few": those with fewer than ``LEAST`` rounds in one of both, "missing", "new": those of one run only,
    "surroundings": {name: (before, after)} of what the figures were measured with, where it differs}."""
    old, new = figures(before), figures(after)
    both = [key for key in new if key in old]
    enough = [key for key in both if min(len(old[key]["samples"]), len(new[key]["samples"])) >= LEAST]
    changes = [_change(key, old, new) for key in enough]
    return {
        "changed": [_record(change) for change in changes if change.beyond],
        "compared": len(enough),
        "few": len(both) - len(enough),
        "missing": [list(key) for key in old if key not in new],
        "new": [list(key) for key in new if key not in old],
        "surroundings": {
            name: [there, here]
            for name in ("commit", "machine", "versions", "config")
            if (there := _plain(before.get(name))) != (here := _plain(after.get(name)))
        },
    }


def _plain(value: Any) -> Any:
    """As it is in a file, without what says nothing about the figures."""
    left = {name: each for name, each in value.items() if name not in APART} if isinstance(value, dict) else value
    return json.loads(json.dumps(left))


def _change(key: Key, old: dict[Key, dict[str, Any]], new: dict[Key, dict[str, Any]]) -> Change:
    before, after = (spread(records[key]["samples"]) for records in (old, new))
    floor = (key[0], key[1], "floor")
    is_beside = key != floor and floor in old and floor in new
    beside = _times(spread(old[floor]["samples"]), spread(new[floor]["samples"])) if is_beside else None
    return Change(key, new[key].get("unit", ""), before, after, _times(before, after), beside)


def _times(before: dict[str, float], after: dict[str, float]) -> float:
    return after["median"] / before["median"] if before["median"] else float("inf")


def _record(change: Change) -> dict[str, Any]:
    case, size, what = change.key
    return {"case": case, "size": size, "what": what, **change._asdict(), "key": list(change.key)}


def print_changes(found: dict[str, Any], earlier: str) -> None:
    """What ``compare`` found, on standard output."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 160
    console.print(f" since {earlier}:", soft_wrap=True)
    for name, (before, after) in found["surroundings"].items():
        console.print(f"   another {name}: {_differences(before, after)}", soft_wrap=True)
    if found["changed"]:
        table = Table(title="changed beyond the spread (median, p10 to p90)", title_justify="left", box=SIMPLE_HEAD)
        for number, column in enumerate(("", "size", "of", "unit", "before", "after", "×", "× of the floor")):
            table.add_column(column, justify="right" if number > 3 or number == 1 else "left", no_wrap=True)
        for row in found["changed"]:
            floor = "" if row["floor"] is None else f"{row['floor']:.2f}"
            cells = (row["case"], f"{row['size']:,}", row["what"], row["unit"], _text(row["before"]), _text(row["after"]))
            table.add_row(*cells, f"{row['times']:.2f}", floor)
        console.print(table)
    said = [f"{len(found['changed'])} of {found['compared']} figures changed beyond the spread"]
    said += [f"{found['few']} have fewer than {LEAST} rounds"] * bool(found["few"])
    said += [f"{len(found[name])} are {name}" for name in ("missing", "new") if found[name]]
    console.print(f" {'; '.join(said)}", soft_wrap=True)


def _differences(before: Any, after: Any) -> str:
    if not isinstance(before, dict) or not isinstance(after, dict):
        return f"{before} -> {after}"
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return ", ".join(f"{name} {before.get(name)} -> {after.get(name)}" for name in names)


def _text(values: dict[str, float]) -> str:
    return f"{values['median']:,.4g} ({values['p10']:,.4g} to {values['p90']:,.4g})"
