"""What the collectives took: a row for each number of ranks, case and size, with its targets."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..harness.targets import Target, marked, of_samples, of_times, summary_lines
from ..latency.report import time_text
from ..latency.rows import size_text

LEAST_US = 1.0
"""Where a step takes no longer than one without communication."""

Times = dict[tuple[int, str, int, str], list[list[float]]]
"""Microseconds of each call of each round, by ranks, case, bytes and who was measured."""
WAYS = ("rdmarpc", "gloo", "floor", "alone")


def summary(times: Times, asked: dict[str, Any]) -> dict[str, Any]:
    """Rows of medians and their ratios, with what all calls of all rounds took; for ``ddp`` a time is what a step takes above
    one without communication. "samples" are the medians of the rounds; targets go by their spread."""
    rows, targets, samples = [], [], []
    for ranks, case, nbytes in dict.fromkeys(key[:3] for key in times):
        taken = {what: times[ranks, case, nbytes, what] for what in WAYS if (ranks, case, nbytes, what) in times}
        row = _row(taken) | {"ranks": ranks, "case": case, "bytes": nbytes}
        rounds = {what: [float(np.median(each)) for each in found] for what, found in taken.items()}
        row["targets"] = _targets(row, rounds, _asked(asked, row))
        targets += row["targets"].values()
        samples += [
            {"case": f"{case}, {ranks} ranks", "size": nbytes, "what": what, "unit": "us", "samples": values}
            for what, values in rounds.items()
        ]
        rows.append(row)
    return {"rows": rows, "targets": targets, "samples": samples}


def _row(taken: dict[str, list[list[float]]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for what, rounds in taken.items():
        calls = [us for each in rounds for us in each]
        low, median, high = (float(each) for each in np.percentile(calls, (10, 50, 90)))
        row[what] = {"median_us": median, "p10_us": low, "p90_us": high, "calls": len(calls)}
    alone = row["alone"]["median_us"] if "alone" in row else 0.0
    ours, gloo = (row[what]["median_us"] - alone for what in ("rdmarpc", "gloo"))
    return row | {
        "rdmarpc_us": ours,
        "gloo_us": gloo,
        "times_faster_than_gloo": gloo / max(ours, LEAST_US),
        "times_floor": ours / row["floor"]["median_us"] if "floor" in row else None,
    }


def _targets(row: dict[str, Any], rounds: dict[str, list[float]], asked: dict[str, float]) -> dict[str, Target]:
    """{"us", "gloo", "floor": target} of those that are asked for."""
    title = f"{row['case']}, {row['ranks']} ranks"
    title += f", {size_text(row['bytes'])}" if row["bytes"] else ""
    beside = rounds.get("alone", [0.0] * len(rounds["rdmarpc"]))
    ours, gloo = ([max(us - alone, LEAST_US) for us, alone in zip(rounds[what], beside)] for what in ("rdmarpc", "gloo"))
    found = {}
    for key, limit in asked.items():
        if key == "us":
            found[key] = of_samples(f"{title}: µs", ours, "≤", limit)
        elif key == "gloo":
            found[key] = of_times(f"{title}: times faster than gloo", gloo, ours, "≥", limit)
        else:
            found[key] = of_times(f"{title}: times the floor", ours, rounds["floor"], "≤", limit)
    return found


def _asked(targets: dict[str, Any], row: dict[str, Any]) -> dict[str, float]:
    case = row["case"].partition(" ")[0]
    if case == "ddp":
        return dict(targets["ddp"])
    if case in targets:
        return dict(targets[case].get(row["bytes"], {})) if row["ranks"] == 2 else {}
    return dict(targets["others"])


NOTE = (
    "n: calls of rdmarpc; p10 to p90: of all calls; targets go by the spread of the rounds' medians: ✓ met, ✗ missed, ? open;"
    " × gloo: gloo's time by ours; × floor: ours by the floor's;"
    " floor: warm memcpys of what a rank receives, at all ranks at once; ddp: a step less one without communication"
)


def print_table(found: dict[str, Any]) -> None:
    """Everything on standard output."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 150
    console.print(table_of(found["rows"]))
    console.print("\n".join(summary_lines(found["targets"])), soft_wrap=True, markup=False)
    console.print(f" {NOTE}", soft_wrap=True)


def table_of(rows: list[dict[str, Any]]) -> Table:
    """One line for each number of ranks, case and size."""
    title = "a collective, times, lower is better: medians (p10 to p90); × gloo: higher is better"
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("ranks", "case", "size", "n", "rdmarpc", "gloo", "floor", "× gloo", "× floor"):
        table.add_column(column, justify="left" if column == "case" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row["ranks"]),
            row["case"],
            size_text(row["bytes"]),
            f"{row['rdmarpc']['calls']:,}",
            _judged(row, "us", _spread(row, "rdmarpc", row["rdmarpc_us"])),
            _spread(row, "gloo", row["gloo_us"]),
            time_text(row["floor"]["median_us"]) if "floor" in row else "",
            _judged(row, "gloo", f"{row['times_faster_than_gloo']:.1f}"),
            _judged(row, "floor", f"{row['times_floor']:.2f}" if row["times_floor"] else ""),
        )
    return table


def _spread(row: dict[str, Any], what: str, us: float) -> str:
    shift = us - row[what]["median_us"]
    return f"{time_text(us)} ({time_text(row[what]['p10_us'] + shift)} to {time_text(row[what]['p90_us'] + shift)})"


def _judged(row: dict[str, Any], key: str, text: str) -> str:
    return marked(text, row["targets"][key]) if key in row["targets"] else text
