"""What was asked of a measurement, and whether it was met, missed or left open by the spread. Nothing here imports torch.

A target is {"name", "measured", "relation", "asked", "met"}, "low", "high" and "n" (samples) where it has a spread, and "goal"
where it belongs to one of ``GOALS``. ``met`` is `None` where nothing was measured, and where it is open.
"""

from __future__ import annotations

import math
import statistics
from typing import Any, NamedTuple

RELATIONS = {"≥": lambda measured, asked: measured >= asked, "≤": lambda measured, asked: measured <= asked}

Target = dict[str, Any]


class Goal(NamedTuple):
    """What the project set out to reach. ``title``: a clause; ``experiments``: those with targets of it; ``silent``: what the
    report says of one of them that has none."""

    title: str
    experiments: tuple[str, ...]
    silent: str


END_TO_END = (
    "a3c", "reinforcement", "parameter_server", "dlrm", "gpt", "federated", "minibatch", "mixture", "graph_network", "train",
    "convergence", "scaling",
)  # fmt: skip
GOALS = {
    "identity": Goal(
        "identity calls with 400 MB are at least 20 times faster than with torch RPC, and 100 times faster than with gRPC",
        ("grid",),
        "this run has not measured 400 MB",
    ),
    "operations": Goal(
        "200 operations in calls are not slower than as many in a local process",
        ("grid",),
        "this run has not measured 200 operations",
    ),
    "end_to_end": Goal(
        "every program as a whole is ahead of torch RPC", END_TO_END, "this run has not compared it with torch RPC"
    ),
    "sooner": Goal(
        "training reaches its goal at least 1.3 times sooner than with torch RPC where communication is more than a third of"
        " torch RPC's step",
        ("convergence",),
        "no model was found whose communication is so much of a step",
    ),
}


def of_goal(target: Target, goal: str) -> Target:
    """The target as one of ``GOALS[goal]``; as it is for an empty ``goal``."""
    return target | {"goal": goal} if goal and GOALS[goal] else target


def end_to_end(other: str) -> str:
    """The goal of a target that compares a whole program with this library."""
    return "end_to_end" if other == "torch_rpc" else ""


def quantile(values: list[float], part: float) -> float:
    """Linear between the two nearest samples; ``part`` from 0 to 1."""
    ordered = sorted(values)
    at = part * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def spread(values: list[float]) -> dict[str, float]:
    """The number of samples, their median, and the tenth and ninetieth percentile."""
    return {
        "n": len(values),
        "median": statistics.median(values),
        "p10": quantile(values, 0.1),
        "p90": quantile(values, 0.9),
    }


def ratio(over: float | None, under: float | None) -> float | None:
    """`None` where one of both was not measured."""
    return over / under if over is not None and under else None


def of_number(name: str, measured: float | None, relation: str, asked: float) -> Target:
    """Of a number without a spread: a count, or what a whole run has once."""
    met = None if measured is None else RELATIONS[relation](measured, asked)
    return {"name": name, "measured": measured, "relation": relation, "asked": asked, "met": met}


def of_samples(name: str, values: list[float], relation: str, asked: float) -> Target:
    """Of the median of ``values``. Met or missed is what the tenth and the ninetieth percentile both say; else, and where there
    is one sample alone, it is open."""
    if not values:
        return of_number(name, None, relation, asked)
    found = spread(values)
    return _between(of_number(name, found["median"], relation, asked), found["p10"], found["p90"], len(values))


def of_times(name: str, over: list[float], under: list[float], relation: str, asked: float) -> Target:
    """Of the median of ``over`` by that of ``under``. Met or missed is what the tenth percentile of one by the ninetieth of the
    other says as well as the reverse; else, and where one of them is one sample alone, it is open."""
    if not over or not under:
        return of_number(name, None, relation, asked)
    above, below = spread(over), spread(under)
    found = of_number(name, _by(above["median"], below["median"]), relation, asked)
    return _between(found, _by(above["p10"], below["p90"]), _by(above["p90"], below["p10"]), min(len(over), len(under)))


def _by(over: float, under: float) -> float:
    """Differences of times may be 0 or less: then nothing was measured below the line."""
    return over / under if under > 0 else math.inf


def _between(target: Target, low: float, high: float, samples: int) -> Target:
    holds = {RELATIONS[target["relation"]](value, target["asked"]) for value in (low, high)}
    known = len(holds) == 1 and samples > 1  # one sample has no spread
    return target | {"low": low, "high": high, "n": samples, "met": target["met"] if known else None}


def target_text(target: Target) -> str:
    """One line: met, missed, open or not measured."""
    asked = f"asked {target['relation']} {number_text(target['asked'])}"
    if target["measured"] is None:
        return f"not measured: {target['name']} ({asked})"
    return f"{verdict(target)}: {target['name']}: {measured_text(target)}, {asked}"


def measured_text(target: Target) -> str:
    """Of a target that was measured: the number and its spread."""
    measured = number_text(target["measured"])
    if target.get("n", 0) == 1:
        return f"{measured} (one sample)"
    return f"{measured} ({number_text(target['low'])} to {number_text(target['high'])})" if "low" in target else measured


def verdict(target: Target) -> str:
    """``open``: the spread has values on both sides of what is asked, or there is one sample alone."""
    if target["measured"] is None:
        return "not measured"
    return {True: "met", False: "missed", None: "open"}[target["met"]]


def verdicts(targets: list[Target]) -> str:
    """How many of each: "3 met, 1 missed, 2 open"."""
    found = [verdict(target) for target in targets]
    counts = {name: found.count(name) for name in ("met", "missed", "open", "not measured")}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count or name in ("met", "missed"))


def mark(target: Target) -> str:
    """A character for a cell of a table."""
    return {"met": "✓", "missed": "✗", "open": "?", "not measured": "-"}[verdict(target)]


def marked(text: str, target: Target) -> str:
    """A cell of rich's: the value, a mark and a colour for the verdict, and what was asked."""
    colour = {"met": "green", "missed": "red"}.get(verdict(target), "yellow")
    return f"[{colour}]{text} {mark(target)} {target['relation']}{target['asked']:,g}[/]"


def summary_lines(targets: list[Target]) -> list[str]:
    """For the terminal: how many of each, then those that were not met."""
    others = [target for target in targets if not target["met"]]
    return [f" targets: {verdicts(targets)}", *(f"   {target_text(target)}" for target in others)]


def number_text(value: float) -> str:
    """Three digits at least, and never an exponent where a reader would not want one."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
