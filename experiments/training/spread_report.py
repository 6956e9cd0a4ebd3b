"""What both programs found: a row a library, targets, and the parts of a step as bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..harness.findings import Findings, size_text, text, times
from ..harness.libraries import TITLES
from ..harness.targets import end_to_end, ratio

ALL_TITLES = TITLES | {"rdmarpc_group": "rdmarpc, all-to-all", "gloo": "gloo, all-to-all"}
PARTS = ("computation", "at servers", "communication")
OURS = {"torch_rpc": "rdmarpc", "grpc": "rdmarpc", "gloo": "rdmarpc_group"}
"""Whom each library is compared with."""


def judge(findings: Findings, job: dict[str, Any], path: Path, sent: str, note: str) -> None:
    """``sent``: what the column of bytes a step is about; ``note``: stands below the table."""
    from ..harness.pictures import draw_parts

    rows, bars = [], []
    for library in job["libraries"]:
        ms = {name: findings.median(name, 0, library) for name in ("step", *PARTS)}
        faster = ratio(ms["step"], findings.median("step", 0, OURS.get(library, library)))
        sizes = [findings.median(name, 0, library) for name in ("sent", "average tensor")]
        cells = [*map(text, ms.values()), text(ratio(ms["communication"], ms["step"]), "{:.0%}")]
        cells += ["-" if each is None else size_text(int(each)) for each in sizes]
        rows.append([ALL_TITLES[library], *cells, times(faster) if library in OURS else "-"])
        bars.append((ALL_TITLES[library], {name: ms[name] or 0.0 for name in PARTS}))
        if library in OURS and OURS[library] in job["libraries"]:
            other = ALL_TITLES[library]
            theirs, ours = (("step", 0, each) for each in (library, OURS[library]))
            findings.target_times(f"a step, times faster than {other}", theirs, ours, "≥", 1, end_to_end(library))
    columns = ["library", "a step, ms", *(f"{name}, ms" for name in PARTS), "share", sent, "average tensor", "times ours"]
    servers = f"workers: {job['workers']}, servers: {job['servers']}, {job['device']}"
    always = " communication is what is left of the calls; share: of a step. All turns must have the"
    always += " same losses and weights, bit for bit"
    better = "ms, share: lower is better; times ours (that library's time by ours): higher is better. Sizes: neither."
    findings.table(servers, columns, rows, f"Medians, of worker 0. {note}{always}.", better=better)
    draw_parts(bars, "milliseconds a step (medians)", path)
