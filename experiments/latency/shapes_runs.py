"""All turns of a program, whose results are the same bits over each library, and its tables."""

from __future__ import annotations

from typing import Any

from ..harness import apps
from ..harness.findings import Findings, text, times
from ..harness.libraries import TITLES
from ..harness.targets import ratio
from ..harness.turns import Turns
from .shapes_worker import main

LIBRARIES = ("rdmarpc", "torch_rpc")
QUICK_ROUNDS = 1


def take_all(job: dict[str, Any], turns: Turns, sizes: list[int]) -> None:
    """``sizes``: numbers of processes."""
    for number in range(job["rounds"]):
        for case in job["cases"]:
            for size in sizes:
                for library in job["libraries"]:
                    same = f"{case}, {size} processes"
                    given = job | {"library": library, "case": case, "processes": size}
                    title = f"{TITLES[library]}, {same}, round {number + 1} of {job['rounds']}"
                    turns.take(given, library, title, main, same)


def table(findings: Findings, job: dict[str, Any], title: str, name: str, larger_is_better: bool, note: str) -> None:
    """One figure of all cases, with the ratio of the two libraries."""
    rows = []
    keys = dict.fromkeys((case, size) for case, size, _ in findings.measured() if case.endswith(f": {name}"))
    for case, size in keys:
        ours, theirs = (findings.median(case, size, library) for library in LIBRARIES)
        faster = ratio(ours, theirs) if larger_is_better else ratio(theirs, ours)
        rows.append([case.partition(":")[0], str(size), text(ours), text(theirs), times(faster)])
    columns = ["case", "processes", *(TITLES[each] for each in LIBRARIES), "times better"]
    better = f"{'Higher' if larger_is_better else 'Lower'} is better; times better: rdmarpc beside torch RPC, higher is better."
    note += ". All turns of a case must leave the same bits, over both libraries"
    findings.table(f"{title}, {job['device']}", columns, rows, f"{note[0].upper()}{note[1:]}", better=better)


def ahead(findings: Findings, job: dict[str, Any], title: str, name: str) -> None:
    """Targets: this figure, of which less is better, is ahead of torch RPC in every case."""
    keys = dict.fromkeys((case, size) for case, size, _ in findings.measured() if case.endswith(f": {name}"))
    for case, size in keys if set(LIBRARIES) <= set(job["libraries"]) else ():
        what = f"{case.partition(':')[0]}, {size} processes: {title}, times faster than {TITLES['torch_rpc']}"
        findings.target_times(what, (case, size, "torch_rpc"), (case, size, "rdmarpc"), "≥", 1, "end_to_end")


def checked(job: dict[str, Any], cases: tuple[str, ...]) -> dict[str, Any]:
    """The job; ends the program if it makes no sense."""
    if job["quick"]:
        job["rounds"] = min(job["rounds"], QUICK_ROUNDS)
    apps.device(job)
    apps.some_of(job, cases=cases, libraries=LIBRARIES)
    apps.at_least_one(job, *(name for name, value in job.items() if isinstance(value, int) and not isinstance(value, bool)))
    return job
