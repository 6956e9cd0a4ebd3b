"""One report of many experiments: ``report.md`` for people, ``results.json`` for programs, and the pictures beside them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..harness.targets import spread, target_text, verdicts
from . import goals
from .catalogue import PAPERS, Experiment


@dataclass
class Entry:
    """One experiment in the report. ``place``: its folder, if it has finished; ``reason``: why it has not."""

    experiment: Experiment
    place: Path | None = None
    reason: str = ""
    failed: bool = False
    record: dict[str, Any] = field(default_factory=dict)
    output: str = ""
    """The end of what it wrote, if it failed."""
    again: bool = False
    """Finished earlier, and not run again."""


def write(folder: Path, entries: list[Entry], surroundings: dict[str, Any], quick: bool, interrupted: bool) -> dict[str, Any]:
    """Both files and the pictures; returns what ``results.json`` holds."""
    results = [_result(folder, entry) for entry in entries]
    common = {"quick": quick, "interrupted": interrupted, **surroundings}
    whole = common | {"goals": goals.found(results), "experiments": results}
    (folder / "results.json").write_text(json.dumps(whole, indent=2) + "\n")
    (folder / "report.md").write_text("\n".join(_lines(whole)) + "\n")
    return whole


def _result(folder: Path, entry: Entry) -> dict[str, Any]:
    """An experiment's own JSON in the common form, whichever of the programs wrote it."""
    experiment = entry.experiment
    result: dict[str, Any] = {
        "name": experiment.name, "paper": experiment.paper, "title": experiment.title, "about": experiment.about,
        "state": "finished" if entry.place else "failed" if entry.failed else "left out",
        "reason": entry.reason, "again": entry.again, **entry.record,
        "tables": [], "targets": [], "left_out": [], "samples": [], "pictures": [], "output": entry.output,
    }  # fmt: skip
    if entry.place is None:
        return result
    samples: list[dict[str, Any]] = []
    for path in sorted(entry.place.glob("*.json")):
        found = json.loads(path.read_text())
        if path.name == "run.json" or not isinstance(found, dict) or not ({"samples", "records", "config"} & set(found)):
            continue
        result["tables"] += found.get("tables", [])
        result["left_out"] += found.get("left_out", []) + [_failure(each) for each in found.get("failed", [])]
        result["targets"] += found.get("targets", [])
        samples += found.get("samples") or found.get("records") or []
        result["config"], result["versions"] = found.get("config"), found.get("versions")
        result["details"] = found if path.name == "result.json" else None
    result["samples"] += [_sample(each) for each in samples]
    for picture in sorted(entry.place.glob("*.png")):
        name = picture.name if picture.name.startswith(experiment.name) else f"{experiment.name}_{picture.name}"
        shutil.copyfile(picture, folder / name)
        result["pictures"].append(name)
    return result


def _failure(found: dict[str, Any]) -> dict[str, str]:
    return {"what": f"{found.get('part', '')} of {found.get('what', '')}", "why": str(found.get("reason", ""))}


def _sample(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, **spread(found["samples"])} if found.get("samples") else found


def _lines(whole: dict[str, Any]) -> list[str]:
    machine = whole["machine"]
    results = whole["experiments"]
    finished = [each for each in results if each["state"] == "finished"]
    targets = [target for each in finished for target in each["targets"]]
    known = {name: version for name, version in machine["packages"].items() if name != "cores"}
    packages = ", ".join(version if name == "machine" else f"{name} {version}" for name, version in known.items())
    lines = [
        "# The experiments of the papers",
        "",
        f"{len(finished)} of {len(results)} experiments; of {len(targets)} targets {verdicts(targets)}."
        + (" **Quick run: few samples and small sizes; no figure here is a result.**" if whole["quick"] else "")
        + (" **Not complete: the same command goes on from here.**" if whole["interrupted"] else ""),
        "",
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB,"
        f" GPUs: {', '.join(machine['gpus']) or 'none'}; {packages}. Commit {whole['commit']}.",
        "",
        "Every figure is a median; `results.json` has n, the tenth and ninetieth percentile and all samples beside it."
        " A target is met or missed where the tenth and the ninetieth percentile say so as well; it is open where they do not,"
        " or where there is one sample alone. (Of counts, and of numbers that a run has once, it is what the number says.)"
        " Each table says of what lower is better and of what higher is.",
        "",
        *goals.lines(results),
        "",
        "## The experiments",
        "",
        "minutes: of the clock. processor: minutes of all cores that the experiment's processes used. load: programs that"
        " wanted a core in the minute before it began; on an idle machine less than 1, and with more its minutes say little.",
        "",
        "| experiment | state | targets | minutes | processor | load |",
        "|---|---|---|---|---|---|",
        *map(_row, results),
        f"| together | | | {_minutes(results, 'seconds')} | {_minutes(results, 'processor_s')} | |",
    ]
    missed = [(each["name"], target) for each in finished for target in each["targets"] if target["met"] is False]
    lines += ["", "## Targets missed", "", *([f"* {name}: {target_text(t)}" for name, t in missed] or ["None."])]
    failed = [f"* {each['name']}: {each['reason']}" for each in results if each["state"] == "failed"]
    lines += ["", "## What failed", "", *(failed or ["Nothing."])]
    for each in results:
        if each["state"] == "failed":
            lines += ["", f"The end of the output of {each['name']}:", "", "```", each["output"], "```"]
    left = [f"* {each['name']}: {each['reason']}" for each in results if each["state"] == "left out"]
    left += [f"* {each['name']}: {part['what']}: {part['why']}" for each in finished for part in each["left_out"]]
    lines += ["", "## What was left out", "", *(left or ["Nothing."])]
    for paper, title in PAPERS.items():
        chapter = [each for each in finished if each["paper"] == paper]
        if chapter:
            lines += ["", f"## {title}", *(line for each in chapter for line in _section(each))]
    return lines


def _row(result: dict[str, Any]) -> str:
    state = result["state"] + (" earlier" if result["again"] else "")
    said = verdicts(result["targets"]) if result["targets"] else "-"
    minutes = [_minutes([result], name) for name in ("seconds", "processor_s")]
    load = f"{result['load']:.1f}" if "load" in result else "-"
    title = goals.heading(result)
    link = f"[{title}](#{goals.anchor(title)})" if result["state"] == "finished" else title
    return f"| {link} | {state} | {said} | {minutes[0]} | {minutes[1]} | {load} |"


def _minutes(results: list[dict[str, Any]], name: str) -> str:
    known = [result[name] for result in results if name in result]
    return f"{sum(known) / 60:.1f}" if known else "-"


def _section(result: dict[str, Any]) -> list[str]:
    lines = ["", f"### {goals.heading(result)}", "", result["about"]]
    lines += ["", f"`{' '.join(['python', *result['command'][1:]])}`, ended {result['ended']}"]
    if counts := [each["n"] for each in result["samples"] if "n" in each]:
        low, high = min(counts), max(counts)
        lines[-1] += f"; samples of a figure: n = {low}" + (f" to {high}" if high > low else "")
    for table in result["tables"]:
        lines += ["", f"**{table['title']}**", "", "| " + " | ".join(map(_cell, table["columns"])) + " |"]
        lines += ["|" + "---|" * len(table["columns"])]
        lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in table["rows"]]
        lines += ["", table["note"]] if table["note"] else []
    for picture in result["pictures"]:
        lines += ["", f"![{result['title']}]({picture})"]
    if result["targets"]:
        lines += ["", "Targets:", "", *(f"* {target_text(target)}" for target in result["targets"])]
    return lines


def _cell(value: str) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
