"""What the project set out to reach, as the first section of the report: each goal, its verdict, and every figure behind it."""

from __future__ import annotations

import re
from typing import Any

from ..harness.targets import GOALS, measured_text, number_text, verdict, verdicts

Result = dict[str, Any]
"""An experiment in ``results.json``."""


def found(results: list[Result]) -> list[dict[str, Any]]:
    """Each of ``GOALS`` as {"goal", "title", "verdict", "targets": those of all experiments with the experiment's name added,
    "absent": {experiment that says nothing about it: why}}."""
    return [_one(name, results) for name in GOALS]


def _one(name: str, results: list[Result]) -> dict[str, Any]:
    goal = GOALS[name]
    targets, absent = [], {}
    chosen = {result["name"] for result in results}
    for result in results:
        if result["name"] not in goal.experiments:
            continue
        mine = [target for target in result["targets"] if target.get("goal") == name]
        targets += [target | {"experiment": result["name"]} for target in mine]
        if result["state"] != "finished":
            absent[result["name"]] = f"{result['state']}: {result['reason']}"
        elif not mine:
            absent[result["name"]] = goal.silent
    absent |= {name: "not chosen for this report" for name in goal.experiments if name not in chosen}
    return {"goal": name, "title": goal.title, "verdict": whole(targets), "targets": targets, "absent": absent}


def whole(targets: list[dict[str, Any]]) -> str:
    """Met where all targets are, missed where one is; else open, or not measured where none was."""
    said = {verdict(target) for target in targets}
    if "missed" in said:
        return "missed"
    if said == {"met"}:
        return "met"
    return "open" if said - {"not measured"} else "not measured"


def lines(results: list[Result]) -> list[str]:
    """The section."""
    goals = found(results)
    titles = {result["name"]: heading(result) for result in results}
    said = ["## What was to be reached", "", "| goal | verdict | its targets |", "|---|---|---|"]
    said += [f"| {each['title']} | **{each['verdict']}** | {verdicts(each['targets'])} |" for each in goals]
    said += ["", "A goal is met where all of its targets are, and missed where one is."]
    for each in goals:
        said += ["", f"**{each['title'][0].upper()}{each['title'][1:]}: {each['verdict']}**"]
        if each["targets"]:
            said += ["", "| section | target | measured (spread) | samples | asked | verdict |", "|---|---|---|---|---|---|"]
            said += [_row(target, titles[target["experiment"]]) for target in each["targets"]]
        reasons = dict.fromkeys(each["absent"].values())
        for reason in reasons:
            names = ", ".join(name for name, why in each["absent"].items() if why == reason)
            said += ["", f"Without a figure, {reason}: {names}."]
    return said


def _row(target: dict[str, Any], title: str) -> str:
    measured = "-" if target["measured"] is None else measured_text(target)
    asked = f"{target['relation']} {number_text(target['asked'])}"
    name = target["name"].replace("|", "\\|")
    link = f"[{title.partition(':')[0]}](#{anchor(title)})"
    return f"| {link} | {name} | {measured} | {target.get('n', '-')} | {asked} | {verdict(target)} |"


def heading(result: Result) -> str:
    """Of the experiment's section."""
    return f"{result['name']}: {result['title']}"


def anchor(heading: str) -> str:
    """Where a heading is found in the page, as GitHub names it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
