"""What the mini-batch benchmark found: a row a model, its targets, and a table."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..harness.targets import Target, of_times, summary_lines
from .models import MODELS

WAYS = {"traced": "rdmarpc", "always": "rdmarpc, staging", "torch_rpc": "torch RPC", "grpc": "gRPC"}
BESIDE = {"staging": "always", "torch_rpc": "torch_rpc", "grpc": "grpc"}
"""Of which way what is asked of a model says how many times faster ours is."""


def summary(records: list[dict[str, Any]], job: dict[str, Any]) -> dict[str, Any]:
    """Rows and targets. Times are milliseconds, medians of the rounds; `None` is what was not measured."""
    medians = {(record["case"], record["what"]): record["median"] for record in records}
    samples = {(record["case"], record["what"]): record["samples"] for record in records}
    rows = [_row(name, medians) for name in job["models"]]
    targets = [target for name in job["models"] for target in _targets(name, samples, job["targets"].get(name, {}))]
    return {"rows": rows, "targets": targets, "records": records}


def _row(name: str, medians: dict[tuple[str, str], float]) -> dict[str, Any]:
    model = MODELS[name]

    def ms(case: str, what: str) -> float | None:
        return medians[case, what] / 1e3 if (case, what) in medians else None

    row: dict[str, Any] = {
        "model": name,
        "mib": model.mib,
        "tensors": model.tensors,
        "average_kib": model.parameters * 4 / model.tensors / 1024,
        "computation_ms": ms("computation", name),
        "floor_ms": ms(name, "floor"),
        "past_caches_ms": ms(name, "past_caches"),
        **{f"{way}_ms": ms(name, way) for way in WAYS},
        **{f"{way}_staged_bytes": medians[name, f"{way}_staged"] for way in ("traced", "always")},
    }
    row["times_floor"] = row["traced_ms"] / row["floor_ms"]
    for key, way in BESIDE.items():
        row[f"times_faster_than_{key}"] = None if row[f"{way}_ms"] is None else row[f"{way}_ms"] / row["traced_ms"]
    return row


def _targets(name: str, samples: dict[tuple[str, str], list[float]], asked: dict[str, float]) -> list[Target]:
    """Of the ways that were measured."""
    found = []
    ours = samples[name, "traced"]
    for key, limit in asked.items():
        if key == "floor":
            found.append(of_times(f"{name}: times the floor", ours, samples[name, "floor"], "≤", limit))
        elif beside := samples.get((name, BESIDE[key])):
            found.append(of_times(f"{name}: times faster than {WAYS[BESIDE[key]]}", beside, ours, "≥", limit))
    return found


def print_table(result: dict[str, Any]) -> None:
    """Everything on standard output."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 180
    config = result["config"]
    table = Table(title=f"a mini-batch over {config['device']}: medians of {config['rounds']} rounds, ms", box=SIMPLE_HEAD)
    table.add_column("model", no_wrap=True)
    columns = (
        "MiB",
        "tensors",
        "average KiB",
        "computation",
        "floor",
        "past",
        *WAYS.values(),
        "× floor",
        "× staging",
        "× torch",
        "× gRPC",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for row in result["rows"]:
        times = [row[f"{key}_ms"] for key in ("computation", "floor", "past_caches", *WAYS)]
        ratios = [row["times_floor"], *(row[f"times_faster_than_{key}"] for key in ("staging", "torch_rpc", "grpc"))]
        table.add_row(
            row["model"],
            f"{row['mib']:.2f}",
            str(row["tensors"]),
            f"{row['average_kib']:,.0f}",
            *("not measured" if time is None else f"{time:.2f}" for time in times),
            *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        )
    console.print(table)
    console.print(LEGEND)
    console.print("\n".join(summary_lines(result["targets"])), soft_wrap=True, markup=False)


LEGEND = """
 a mini-batch: all gradients to one parameter server, all weights back, no step
 computation: forward and backward, one thread
 floor: as many bytes by two warm memcpys; past: the same by stores past the caches; × floor: of rdmarpc
 staging: every payload is copied aside once
 torch RPC, gRPC: one call with all gradients, answered with all weights"""
