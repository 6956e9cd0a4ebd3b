"""What the collectives took: a row for each number of ranks, case and size, with its targets."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..latency.report import time_text
from ..latency.rows import size_text

Times = dict[tuple[int, str, int, str], list[float]]
"""Microseconds of each call, by ranks, case, bytes and who was measured."""


def rows(times: Times, targets: dict[str, Any]) -> list[dict[str, Any]]:
    """Medians, and their ratios. For ``ddp`` a time is what a step takes above one without communication."""
    found = []
    for ranks, case, nbytes in dict.fromkeys(key[:3] for key in times):
        row: dict[str, Any] = {"ranks": ranks, "case": case, "bytes": nbytes}
        for what in ("rdmarpc", "gloo", "floor", "alone"):
            if taken := times.get((ranks, case, nbytes, what)):
                low, median, high = (float(each) for each in np.percentile(taken, (10, 50, 90)))
                row[what] = {"median_us": median, "p10_us": low, "p90_us": high, "calls": len(taken)}
        alone = row["alone"]["median_us"] if "alone" in row else 0.0
        ours, gloo = (row[what]["median_us"] - alone for what in ("rdmarpc", "gloo"))
        row["rdmarpc_us"], row["gloo_us"] = ours, gloo
        row["times_faster_than_gloo"] = gloo / max(ours, 1.0)
        row["times_floor"] = ours / row["floor"]["median_us"] if "floor" in row else None
        row["target"] = _target(targets, row)
        measured = {"us": ours, "gloo": row["times_faster_than_gloo"], "floor": row["times_floor"]}
        row["met"] = {
            key: measured[key] >= asked if key == "gloo" else measured[key] <= asked for key, asked in row["target"].items()
        }
        found.append(row)
    return found


def _target(targets: dict[str, Any], row: dict[str, Any]) -> dict[str, float]:
    case = row["case"].partition(" ")[0]
    if case == "ddp":
        return dict(targets["ddp"])
    if case in targets:
        return dict(targets[case].get(row["bytes"], {})) if row["ranks"] == 2 else {}
    return dict(targets["others"])


def print_table(found: list[dict[str, Any]]) -> None:
    """Everything on standard output."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140
    table = Table(title="collectives: medians (p10 to p90)", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("ranks", "case", "size", "rdmarpc", "gloo", "floor", "× gloo", "× floor"):
        table.add_column(column, justify="left" if column == "case" else "right", no_wrap=True)
    for row in found:
        table.add_row(
            str(row["ranks"]),
            row["case"],
            size_text(row["bytes"]),
            _judged(row, "us", _spread(row, "rdmarpc", row["rdmarpc_us"])),
            _spread(row, "gloo", row["gloo_us"]),
            time_text(row["floor"]["median_us"]) if "floor" in row else "",
            _judged(row, "gloo", f"{row['times_faster_than_gloo']:.1f}"),
            _judged(row, "floor", f"{row['times_floor']:.2f}" if row["times_floor"] else ""),
        )
    console.print(table)
    asked = [met for row in found for met in row["met"].values()]
    console.print(f" targets met: {sum(asked)} of {len(asked)}")
    console.print(
        " floor: warm memcpys of what a rank receives, at all ranks at once; ddp: a step less one without communication"
    )


def _spread(row: dict[str, Any], what: str, us: float) -> str:
    shift = us - row[what]["median_us"]
    return f"{time_text(us)} ({time_text(row[what]['p10_us'] + shift)} to {time_text(row[what]['p90_us'] + shift)})"


def _judged(row: dict[str, Any], key: str, text: str) -> str:
    if key not in row["target"]:
        return text
    met, relation = row["met"][key], "≥" if key == "gloo" else "≤"
    return f"[{'green' if met else 'red'}]{text} {'✓' if met else '✗'} {relation}{row['target'][key]:,g}[/]"
