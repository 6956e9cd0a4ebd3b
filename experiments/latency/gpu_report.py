"""The samples of the benchmark of CUDA tensors as rows and targets, and as tables in the terminal."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..harness.findings import Key
from ..harness.targets import Target, of_times, summary_lines

TITLES = {"rdmarpc": "rdmarpc", "torch_rpc": "torch RPC", "copies": "copies", "machine": "machine"}
NONE = "-"


def summary(records: list[dict[str, Any]], failed: dict[tuple[str, str], str], job: dict[str, Any]) -> dict[str, Any]:
    """{"recipe", "grid", "small", "step": rows, each a median over the rounds, in milliseconds (small: microseconds);
    "gradients": how far off at most; "bytes": how tensors of `grid` went; "targets"; "failed": what could not be measured, and
    why; "records": all samples}. None stands for what was not measured."""
    median = {(record["case"], record["size"], record["what"]): record["median"] for record in records}
    worst = {(record["case"], record["size"], record["what"]): max(record["samples"]) for record in records}
    result: dict[str, Any] = {
        "recipe": [recipe_row(first, state, median) for state in ("cold", "warm") for first in ("cpu", "cuda")]
        if job["recipe"]
        else [],
        "grid": [grid_row(name, size, median) for name in ("identity", "heavy") for size in job["sizes"]]
        if job["grid"]
        else [],
        "small": [small_row(size, median) for size in job["small_sizes"]] if job["small"] else [],
        "step": [step_row(width, median, worst) for width in job["widths"]] if job["step"] else [],
        "gradients": [
            {"mode": case.removeprefix("gradients_"), "what": what, "apart": value}
            for (case, _, what), value in worst.items()
            if case.startswith("gradients_")
        ],
        "bytes": {case: median.get((case, 0, "rdmarpc")) for case in ("gpu_bytes_direct", "bytes_staged")},
        "failed": [{"part": part, "what": what, "reason": reason} for (part, what), reason in failed.items()],
    }
    samples = {(record["case"], record["size"], record["what"]): record["samples"] for record in records}
    result["targets"] = targets(job, samples)
    return result | {"records": records}


def over(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def recipe_row(first: str, state: str, median: dict[Any, float]) -> dict[str, Any]:
    """`state`: cold or warm; `first`: the way that was measured before the other one, in the same processes."""
    row: dict[str, Any] = {"state": state, "first": first}
    for mode in ("cpu", "cuda"):
        ours, theirs = (median.get((f"{first}_first_{state}_{mode}", 0, what)) for what in ("rdmarpc", "torch_rpc"))
        row |= {
            f"rdmarpc_{mode}_ms": ours,
            f"torch_rpc_{mode}_ms": theirs,
            f"times_faster_than_torch_{mode}": over(theirs, ours),
        }
    for what in ("rdmarpc", "torch_rpc"):
        row[f"{what}_cpu_over_cuda"] = over(row[f"{what}_cpu_ms"], row[f"{what}_cuda_ms"])
    return row


def grid_row(name: str, size: int, median: dict[Any, float]) -> dict[str, Any]:
    """All calls together, one call in the mean, and the copies that all of them need (of identity)."""
    row: dict[str, Any] = {"function": name, "bytes": size, "copies_ms": median.get((f"{name}_total", size, "copies"))}
    for what in ("rdmarpc", "torch_rpc"):
        for measured in ("total", "delay"):
            row[f"{what}_{measured}_ms"] = median.get((f"{name}_{measured}", size, what))
        row[f"{what}_times_copies"] = over(row[f"{what}_total_ms"], row["copies_ms"])
    row["times_faster_than_torch"] = over(row["torch_rpc_total_ms"], row["rdmarpc_total_ms"])
    return row


def small_row(size: int, median: dict[Any, float]) -> dict[str, Any]:
    ours, theirs = (median.get(("small", size, what)) for what in ("rdmarpc", "torch_rpc"))
    return {"bytes": size, "rdmarpc_us": ours, "torch_rpc_us": theirs, "of_torch_rpc": over(ours, theirs)}


def step_row(width: int, median: dict[Any, float], worst: dict[Any, float]) -> dict[str, Any]:
    ours, alone = (median.get((f"step_{what}", width, "rdmarpc")) for what in ("wrapped", "alone"))
    apart = worst.get(("step_apart", width, "rdmarpc"))
    return {"width": width, "wrapped_ms": ours, "alone_ms": alone, "times_alone": over(ours, alone), "apart": apart}


def targets(job: dict[str, Any], samples: dict[Key, list[float]]) -> list[Target]:
    """What was asked of the parts that were to run."""
    asked, found = job["targets"], []

    def times(name: str, over: Key, under: Key, relation: str, limit: float) -> None:
        found.append(of_times(name, samples.get(over, []), samples.get(under, []), relation, limit))

    for size in job["sizes"] if job["grid"] else ():
        if (limit := asked["copies"].get(size)) is not None:
            ours, copies = (("identity_total", size, what) for what in ("rdmarpc", "copies"))
            times(f"identity of {size_text(size)}: times the copies that it needs", ours, copies, "≤", limit)
    for size in job["small_sizes"] if job["small"] else ():
        ours, theirs = (("small", size, what) for what in ("rdmarpc", "torch_rpc"))
        times(f"one call with {size_text(size)}: of torch RPC's time", ours, theirs, "≤", asked["small"])
    for first in ("cpu", "cuda") if job["recipe"] else ():
        ours, theirs = ((f"{first}_first_warm_cuda", 0, what) for what in ("rdmarpc", "torch_rpc"))
        times(f"recipe, cuda, warm, {first} first: times faster than torch RPC", theirs, ours, "≥", asked["recipe"])
    return found


def print_tables(result: dict[str, Any]) -> None:
    """Everything on standard output."""
    console = Console(highlight=False)
    machine = result["machine"]
    console.print(f"{', '.join(machine['gpus'])}; {machine['cpu']}; MPS {'runs' if machine['mps'] else 'does not run'}")
    for table in tables(result):
        console.print(table)
    for row in result["gradients"]:
        console.print(f" gradients of {TITLES[row['what']]}, {row['mode']}: {row['apart']:.1e} of the largest element apart")
    for each in result["failed"]:
        said = f" [red]not measured[/]: {each['part']} of {TITLES[each['what']]}: {escape(each['reason'])}"
        console.print(said, soft_wrap=True)
    console.print("\n".join(summary_lines(result["targets"])), soft_wrap=True, markup=False)


def tables(result: dict[str, Any]) -> list[Table]:
    """Of the parts that were measured."""
    rows = ((recipe_table, "recipe"), (grid_table, "grid"), (small_table, "small"), (step_table, "step"))
    found = [table(result[part]) for table, part in rows]
    return [table for table in found if table.row_count]


def table_of(title: str, *columns: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def recipe_table(rows: list[dict[str, Any]]) -> Table:
    """One line for each order and state."""
    columns = ("rdmarpc\ncpu", "\ncuda", "cpu /\ncuda", "torch\ncpu", "\ncuda", "cpu /\ncuda", "× torch\ncpu", "\ncuda")
    table = table_of("recipe, ms, lower is better: medians of the rounds", "", "\nfirst", *columns)
    for row in rows:
        values = [
            row[f"{what}_{value}"] for what in ("rdmarpc", "torch_rpc") for value in ("cpu_ms", "cuda_ms", "cpu_over_cuda")
        ]
        values += [row[f"times_faster_than_torch_{mode}"] for mode in ("cpu", "cuda")]
        table.add_row(row["state"], row["first"], *map(number, values))
    return table


def grid_table(rows: list[dict[str, Any]]) -> Table:
    """One line for each function and size."""
    columns = ("\ncopies", "rdmarpc\nall", "\na call", "×\ncopies", "torch\nall", "\na call", "×\ncopies", "×\ntorch")
    table = table_of("calls all at once, ms, lower is better: medians of the rounds", "", "\nbytes", *columns)
    for row in rows:
        values = [row["copies_ms"]]
        for what in ("rdmarpc", "torch_rpc"):
            values += [row[f"{what}_{value}"] for value in ("total_ms", "delay_ms", "times_copies")]
        table.add_row(row["function"], size_text(row["bytes"]), *map(number, [*values, row["times_faster_than_torch"]]))
    return table


def small_table(rows: list[dict[str, Any]]) -> Table:
    """One line for each size."""
    table = table_of(
        "one identity call at a time, µs, lower is better: medians of the rounds", "bytes", "rdmarpc", "torch RPC", "of torch"
    )
    for row in rows:
        table.add_row(size_text(row["bytes"]), *(number(row[name]) for name in ("rdmarpc_us", "torch_rpc_us", "of_torch_rpc")))
    return table


def step_table(rows: list[dict[str, Any]]) -> Table:
    """One line for each width."""
    title = "a training step, half of the layers at each worker, ms, lower is better: medians of the rounds"
    table = table_of(title, "width", "wrapped", "one process", "×", "losses apart")
    for row in rows:
        values = (number(row[name]) for name in ("wrapped_ms", "alone_ms", "times_alone", "apart"))
        table.add_row(str(row["width"]), *values)
    return table


def number(value: float | None) -> str:
    return NONE if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def size_text(size: int) -> str:
    """Bytes in thousands."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} B"
