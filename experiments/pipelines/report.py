"""What the experiment found: a row for each number of workers, model and schedule, and where the time of ours goes."""

import statistics
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..harness.targets import spread
from .critical import PARTS
from .layers import ROUNDS, Case, chunks
from .workers import OURS


def summary(records: list[dict[str, Any]], job: dict[str, Any]) -> list[dict[str, Any]]:
    """``records`` have a number of ``workers`` and a ``library`` too. Times are milliseconds of a batch: the median of all
    batches, the tenth and the ninetieth percentile; ``processor_ms`` of all workers, the median of the rounds. Where layers
    sleep, ``theory_ms``: how long the paper's schedule takes where nothing but layers takes time; ``order_ms``: the same by our
    agenda; ``bubble``: the part of the median in which a worker runs no layer."""
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
                "order_ms": case.order_ms(workers, count, *OURS[what]) if what in OURS else None,
                "bubble": 1 - busy / found["median"] if busy else None,
            }
        )
    rows.sort(key=lambda row: (row["workers"], list(job["cases"]).index(row["case"]), row["library"]))
    return rows


def where(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The batch of median length of those that were watched, by parts."""
    rows = []
    for each in parts:
        batches = sorted(each["batches"], key=lambda batch: batch["batch"])
        rows.append({key: each[key] for key in ("workers", "case", "schedule")} | batches[len(batches) // 2])
    return rows


def print_tables(rows: list[dict[str, Any]], ways: list[dict[str, Any]]) -> None:
    """On standard output."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    for table, note in tables_of(rows, ways):
        console.print(table)
        console.print(f" {note}", soft_wrap=True)


NOTE = (
    "n: batches; asleep: emulated, layers that sleep stand for computation on cores of their own; processor: time of all"
    " workers; theory: of the paper's schedule, where nothing but layers takes time; order: the same by our agenda, which takes"
    " tasks as they come; bubble: time in which a worker runs no layer; the caller, which computes the loss, has the last"
    " stage; (first): it has the first one"
)
NOTE_OF_PARTS = (
    "on the way from the first task to the last one, each of which waited for the one before; layers: what they sleep;"
    " computing: processor time of tasks; off core: tasks whose core another process had, and sleep that took longer; between:"
    " from a task to the next one of its worker; crossing: to one of another worker; ends: before the first and after the last"
)


def tables_of(rows: list[dict[str, Any]], ways: list[dict[str, Any]]) -> list[tuple[Table, str]]:
    """How long batches take, and where the time of ours goes; each with what its words mean."""
    numbers = {
        "micro-batches": lambda row: str(row["chunks"]),
        "n": lambda row: str(row["n"]),
        **{name: _number(key) for name, key in (("median", "ms"), ("p10", "p10_ms"), ("p90", "p90_ms"))},
        **{name: _number(f"{name}_ms") for name in ("processor", "theory", "order")},
        "bubble": lambda row: "-" if row["bubble"] is None else f"{row['bubble']:.1%}",
    }
    texts = {"workers": "workers", "layers": "case", "library": "library", "schedule": "schedule"}
    batches = _table("a batch in micro-batches, forward and backward: ms and bubble, lower is better", texts, numbers, rows)
    parts = {name.replace("_", " "): _number(name) for name in ("batch", *PARTS)}
    del texts["library"]
    return [
        (batches, NOTE),
        (_table("where the time of one batch of ours goes: ms, lower is better", texts, parts, ways), NOTE_OF_PARTS),
    ]


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
