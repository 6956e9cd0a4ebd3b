"""What the experiment found: a row for each number of workers, model and schedule."""

import statistics
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..harness.targets import spread
from .pipeline_layers import ROUNDS, Case, chunks


def summary(records: list[dict[str, Any]], job: dict[str, Any]) -> list[dict[str, Any]]:
    """``records`` have a number of ``workers`` and a ``library`` too. Times are milliseconds of a batch: the median of all
    batches, the tenth and the ninetieth percentile; ``processor_ms`` of all workers, the median of the rounds. Where layers
    sleep, ``theory_ms``: how long the paper's schedule takes where nothing but layers takes time; ``bubble``: the part of the
    median in which a worker runs no layer."""
    rows: list[dict[str, Any]] = []
    for record in records:
        case, workers, what = Case(**job["cases"][record["case"]]), record["workers"], record["schedule"]
        count = chunks(job | {"count": workers})
        theory = None
        if what != "ZBVZeroBubble":  # its stages do not go round
            split = what.lower().replace("_", "").endswith("zerobubble")
            theory = case.theory_ms(workers, count, ROUNDS if "nterleaved" in what else 1, split)
        busy, found = ROUNDS * count * (case.forward_ms + case.backward_ms), spread(record["batches"])
        rows.append(
            {
                "workers": workers,
                "case": record["case"],
                "library": record["library"],
                "schedule": what,
                "chunks": count,
                "n": len(record["batches"]),
                "ms": found["median"],
                "p10_ms": found["p10"],
                "p90_ms": found["p90"],
                "processor_ms": statistics.median(record["processor"]),
                "theory_ms": theory,
                "bubble": 1 - busy / found["median"] if busy else None,
            }
        )
    rows.sort(key=lambda row: (row["workers"], list(job["cases"]).index(row["case"]), row["library"]))
    return rows


def print_tables(rows: list[dict[str, Any]]) -> None:
    """On standard output."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    for table, note in tables_of(rows):
        console.print(table)
        console.print(f" {note}", soft_wrap=True)


NOTE = (
    "n: batches; asleep: emulated, layers that sleep stand for computation on cores of their own; processor: time of all"
    " workers; theory: of the paper's schedule, where nothing but layers takes time;"
    " bubble: time in which a worker runs no layer; ours has a process more, the caller, which only posts"
)


def tables_of(rows: list[dict[str, Any]]) -> list[tuple[Table, str]]:
    """How long batches take, with what the words mean."""
    numbers = {
        "micro-batches": lambda row: str(row["chunks"]),
        "n": lambda row: str(row["n"]),
        **{name: _number(key) for name, key in (("median", "ms"), ("p10", "p10_ms"), ("p90", "p90_ms"))},
        **{name: _number(f"{name}_ms") for name in ("processor", "theory")},
        "bubble": lambda row: "-" if row["bubble"] is None else f"{row['bubble']:.1%}",
    }
    texts = {"workers": "workers", "layers": "case", "library": "library", "schedule": "schedule"}
    batches = _table("a batch in micro-batches, forward and backward: ms and bubble, lower is better", texts, numbers, rows)
    return [(batches, NOTE)]


def _table(title: str, texts: dict[str, str], numbers: dict[str, Any], rows: list[dict[str, Any]]) -> Table:
    """One line for each row. ``texts``: keys of the first columns; ``numbers``: what gives the text of the others."""
    table = Table(title=title, box=SIMPLE_HEAD)
    for column in texts:
        table.add_column(column, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(str(row[key]) for key in texts.values()), *(make(row) for make in numbers.values()))
    return table


def _number(key: str) -> Any:
    return lambda row: "-" if row[key] is None else f"{row[key]:.2f}"
