"""The grid as tables: delays beside each other and beside what was published, totals beside a local process, and targets."""

from __future__ import annotations

from typing import Any

from ..harness.findings import Findings, size_text, text, times
from ..harness.libraries import TITLES
from ..harness.targets import ratio
from .grid_client import under_way

OTHERS = {"torch_rpc": 1, "grpc": 0}
"""The other libraries, and where their published figure is."""
PUBLISHED: dict[tuple[str, int], tuple[float, float]] = {
    ("identity", 4_000_000): (26.7, 8.72),
    ("heavy", 4_000_000): (203.6, 81.7),
    ("identity", 400_000_000): (22_203.0, 1_249.0),
    ("heavy", 400_000_000): (42_541.0, 16_570.0),
}
"""By function and bytes, what was published of gRPC and torch RPC: another machine, other versions. Mean milliseconds of a
call with 10 under way, Python functions, tensors in main memory, two processes of one machine: the logs ``single_aws_2`` of
the first author's harness (github.com/mrshenli/grpc_benchmark, commit 0bfbf1b)."""


def judge(findings: Findings, job: dict[str, Any]) -> None:
    """Adds the tables and targets of all that was measured."""
    for device in job["devices"]:
        cells = cells_of(findings, job, device)
        if cells:
            findings.table(*delays(findings, job, device, cells), better="ms: lower is better; times: higher is better.")
            targets(findings, job, device, cells)
    rows = [
        [title(size, name, job), *(text(findings.median(f"{name} total", size, what)) for what in ("local", *columns(job)))]
        for size, name in cells_of(findings, job, "")
    ]
    findings.table(
        "All calls of a batch together, ms",
        ["size and function", "local process", *(f"{TITLES[each.split()[0]]} {each.split()[1]}" for each in columns(job))],
        rows,
        "local process: the same functions as often, one after the other, in one thread and without a call.",
        better="Lower is better.",
    )


def columns(job: dict[str, Any]) -> list[str]:
    return [f"{library} {device}" for device in job["devices"] for library in job["libraries"]]


def cells_of(findings: Findings, job: dict[str, Any], device: str) -> list[tuple[int, str]]:
    """Size and function of all that rdmarpc or another has measured over a device, or (empty) of everything."""
    found = {(size, case.removesuffix(" total")) for case, size, what in findings.measured() if what.endswith(device)}
    order = [*job["functions"], *(f"{name}_script" for name in job["functions"])]
    return [(size, name) for size in job["sizes"] for name in order if (size, name) in found]


def title(size: int, name: str, job: dict[str, Any]) -> str:
    function, _, script = name.partition("_")
    kind = {"identity": "identity", "heavy": "200 operations"}.get(function, function)
    return f"{size_text(size)}, {kind}{', TorchScript' if script else ''}, {under_way(size, job)} at once"


def delays(findings: Findings, job: dict[str, Any], device: str, cells: list[tuple[int, str]]) -> tuple[Any, ...]:
    """The table of one device."""
    libraries = job["libraries"]
    others = [each for each in libraries if each != "rdmarpc"] if "rdmarpc" in libraries else []
    rows = []
    for size, name in cells:
        measured = {each: findings.median(f"{name} delay", size, f"{each} {device}") for each in libraries}
        published = PUBLISHED.get((name, size))
        rows.append(
            [title(size, name, job), *(text(measured[each]) for each in libraries)]
            + [times(ratio(measured[other], measured["rdmarpc"])) for other in others]
            + [text(published and published[OTHERS[each]]) for each in OTHERS]
        )
    head = ["size and function", *(TITLES[each] for each in libraries), *(f"times {TITLES[each]}" for each in others)]
    note = (
        "From a call's start until its result is there, the mean of those under way. times: of that library's time by ours."
        " published: PyTorch RPC's paper, two processes on another machine, 10 at once everywhere; logs of its first author."
    )
    return f"A call over {device}, ms", [*head, *(f"published: {TITLES[each]}" for each in OTHERS)], rows, note


def targets(findings: Findings, job: dict[str, Any], device: str, cells: list[tuple[int, str]]) -> None:
    asked = job["targets"]
    for size, name in cells:
        ours = (f"{name} delay", size, f"rdmarpc {device}")
        for other in OTHERS:
            if name == "identity" and size in asked.get(other, {}) and other in job["libraries"]:
                theirs = (f"{name} delay", size, f"{other} {device}")
                what = f"{title(size, name, job)} over {device}: times faster than {TITLES[other]}"
                findings.target_times(what, theirs, ours, "≥", asked[other][size], "identity")
        if name == "heavy":
            total, local = ("heavy total", size, f"rdmarpc {device}"), ("heavy total", size, "local")
            what = f"{title(size, name, job)} over {device}: times a local process"
            findings.target_times(what, total, local, "≤", asked["local"], "operations")
