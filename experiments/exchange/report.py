"""What the mini-batch benchmark found: a row a model, its targets, and a table."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..harness.findings import print_findings
from ..harness.targets import Target, of_times, summary_lines
from .models import MODELS

WAYS = {"traced": "rdmarpc", "always": "rdmarpc, staging", "torch_rpc": "torch RPC", "grpc": "gRPC"}
BESIDE = {"staging": "always", "torch_rpc": "torch_rpc", "grpc": "grpc"}
"""Of which way what is asked of a model says how many times faster ours is."""


def summary(records: list[dict[str, Any]], job: dict[str, Any]) -> dict[str, Any]:
    """Rows and targets. Times are milliseconds, medians of the rounds; `None` is what was not measured."""
    medians = {(record["case"], record["what"]): record["median"] for record in records}
    samples = {(record["case"], record["what"]): record["samples"] for record in records}
    rows = [_row(name, medians, job["batch"].get(name)) for name in job["models"]]
    targets = [target for name in job["models"] for target in _targets(name, samples, job["targets"].get(name, {}))]
    return {"rows": rows, "targets": targets, "records": records}


def _row(name: str, medians: dict[tuple[str, str], float], batch: int | None) -> dict[str, Any]:
    model = MODELS[name]

    def ms(case: str, what: str) -> float | None:
        return medians[case, what] / 1e3 if (case, what) in medians else None

    row: dict[str, Any] = {
        "model": name,
        "mib": model.mib,
        "tensors": model.tensors,
        "average_kib": model.parameters * 4 / model.tensors / 1024,
        "batch": batch,
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


def print_tables(result: dict[str, Any], more: dict[str, Any]) -> None:
    """Everything on standard output. ``more``: what was found end to end (``Findings.as_dict``)."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    for table, note in tables(result) if result["rows"] else ():
        console.print(table)
        console.print(f" {note}\n", soft_wrap=True)
    print_findings(more | {"targets": []})
    console.print("\n".join(summary_lines(result["targets"])), soft_wrap=True, markup=False)


def tables(result: dict[str, Any]) -> list[tuple[Table, str]]:
    """What the models are, and what moves their tensors; each with what stands below it."""
    return [(models_table(result["rows"]), MODELS_NOTE), (ways_table(result), WAYS_NOTE)]


MODELS_NOTE = (
    "sizes: neither lower nor higher is better; ms: lower is better; computation: forward and backward of a mini-batch of so"
    " many samples, one thread"
)
WAYS_NOTE = (
    "ms, × floor: lower is better; other ×: higher is better; all gradients to one parameter server, all weights back, no step;"
    " floor: as many bytes by two warm memcpys; past: the same by stores past the caches; staging: rdmarpc copies every payload"
    " aside once; torch RPC, gRPC: one call with all gradients, answered with all weights; × floor: rdmarpc's time by the"
    " floor's; other ×: that way's time by rdmarpc's"
)


def models_table(rows: list[dict[str, Any]]) -> Table:
    """One line for each model."""
    table = Table(title="the models, by tensors of their weights", box=SIMPLE_HEAD)
    table.add_column("model", no_wrap=True)
    for column in ("MiB", "tensors", "average KiB", "batch", "computation, ms"):
        table.add_column(column, justify="right")
    for row in rows:
        sizes = f"{row['mib']:.2f}", str(row["tensors"]), f"{row['average_kib']:,.0f}"
        table.add_row(row["model"], *sizes, str(row["batch"] or "-"), _ms(row["computation_ms"]))
    return table


def ways_table(result: dict[str, Any]) -> Table:
    """One line for each model."""
    config = result["config"]
    spreads = {(record["case"], record["what"]): record for record in result["records"]}
    title = f"communication of a mini-batch over {config['device']}, ms, lower is better: median (p10 to p90) of n ="
    table = Table(title=f"{title} {config['rounds']} rounds", box=SIMPLE_HEAD)
    table.add_column("model", no_wrap=True)
    for column in ("floor", "past", *WAYS.values(), "× floor", "× staging", "× torch RPC", "× gRPC"):
        table.add_column(column, justify="right")
    for row in result["rows"]:
        cells = [_spread(spreads.get((row["model"], what))) for what in ("floor", "past_caches", *WAYS)]
        ratios = [row["times_floor"], *(row[f"times_faster_than_{key}"] for key in BESIDE)]
        table.add_row(row["model"], *cells, *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios))
    return table


def _ms(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}"


def _spread(record: dict[str, Any] | None) -> str:
    """Of a record in microseconds, milliseconds."""
    if record is None:
        return "not measured"
    return "{:.2f} ({:.2f} to {:.2f})".format(*(record[name] / 1e3 for name in ("median", "p10", "p90")))
