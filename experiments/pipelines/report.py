"""What the experiment found: a row for each number of workers, model and schedule."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .layers import ROUNDS, Case, chunks


def summary(records: list[dict[str, Any]], job: dict[str, Any]) -> list[dict[str, Any]]:
    """``records`` have a number of ``workers`` and a ``library`` too. Times are milliseconds of a batch: the median of
    ``n`` rounds, their tenth and ninetieth percentile. ``theory``: how long the schedule takes where nothing but layers
    takes time; ``bubble``: the part of the time in which a worker runs no layer. Both only where layers sleep."""
    rows: list[dict[str, Any]] = []
    for record in records:
        case, workers = Case(**job["cases"][record["case"]]), record["workers"]
        count = chunks(job | {"count": workers})
        what = record["what"]
        theory = None
        if what != "ZBVZeroBubble":  # its stages do not go round
            theory = case.theory_ms(
                workers, count, ROUNDS if "nterleaved" in what else 1, what.lower().replace("_", "").endswith("zerobubble")
            )
        busy = ROUNDS * count * (case.forward_ms + case.backward_ms)
        rows.append(
            {
                "workers": workers,
                "case": record["case"],
                "library": record["library"],
                "schedule": record["what"],
                "chunks": count,
                "ms": record["median"],
                "n": record["n"],
                "p10_ms": record["p10"],
                "p90_ms": record["p90"],
                "theory_ms": theory,
                "bubble": 1 - busy / record["median"] if busy else None,
                "theory_bubble": 1 - busy / theory if theory else None,
            }
        )
    rows.sort(key=lambda row: (row["workers"], list(job["cases"]).index(row["case"]), row["library"]))
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """On standard output."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    console.print(table_of(rows))
    console.print(f" {NOTE}", soft_wrap=True)


NOTE = (
    "n: rounds; layers that sleep (asleep) stand for computation on cores of its own; theory: of the schedule, where nothing"
    " else takes time; bubble: time in which a worker runs no layer"
)


def table_of(rows: list[dict[str, Any]]) -> Table:
    """One line for each row."""
    table = Table(title="a batch in micro-batches, forward and backward: ms, less is better", box=SIMPLE_HEAD)
    for column in ("workers", "layers", "library", "schedule"):
        table.add_column(column, no_wrap=True)
    for column in ("micro-batches", "n", "median", "p10", "p90", "theory", "bubble", "bubble in theory"):
        table.add_column(column, justify="right")
    for row in rows:
        emulated = row["theory_ms"] is not None
        table.add_row(
            str(row["workers"]),
            row["case"],
            row["library"],
            row["schedule"],
            str(row["chunks"]),
            str(row["n"]),
            *(f"{row[key]:.2f}" for key in ("ms", "p10_ms", "p90_ms")),
            f"{row['theory_ms']:.1f}" if emulated else "-",
            f"{row['bubble']:.1%}" if row["bubble"] is not None else "-",
            f"{row['theory_bubble']:.1%}" if emulated else "-",
        )
    return table
