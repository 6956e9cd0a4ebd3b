"""The benchmark's results as rows judged against their targets, and as a table."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.status import Status
from rich.table import Table

from .measure import Key

CASES = {"one_way": "one way", "identity": "identity", "stream": "stream"}


class BenchDisplay:
    """Receives the events of worker0; draws on standard error, so that standard output is only the result."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.console = Console(stderr=True)
        self.status = Status("starting the workers", console=self.console, refresh_per_second=2)

    def __enter__(self) -> "BenchDisplay":
        if self.console.is_terminal:
            self.status.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.status.stop()

    def on_event(self, group: str, event: tuple[Any, ...]) -> None:
        """("progress", text) or ("measured", records of Samples)."""
        if event[0] == "measured":
            self.records += event[1]
        else:
            self.status.update(event[1])


def summary(records: list[dict[str, Any]], job: dict[str, Any]) -> dict[str, Any]:
    """{"rows": one for each case and size, "calls": one for each number in flight, "idle": ..., "flag_us": ...,
    "records": all samples}; everything but the records are medians over the rounds."""
    median = {(record["case"], record["size"], record["what"]): record["median"] for record in records}
    targets = job["targets"]
    rows = [
        time_row(case, size, median, targets.get(case, {}).get(size, {}))
        for case in CASES
        for size in job["sizes"]
        if (case, size, "rdmarpc") in median
    ]
    ours, theirs = median["idle", 0, "rdmarpc"], median["idle", 0, "torch_rpc"]
    return {
        "flag_us": median["flag", 0, "floor"],
        "rows": rows,
        "calls": [rate_row(number, median, target) for number, target in targets["calls"].items()],
        "idle": {"rdmarpc_percent": ours, "torch_rpc_percent": theirs, "met": ours < targets["idle_percent"]},
        "records": records,
    }


def time_row(case: str, size: int, median: dict[Key, float], target: dict[str, float]) -> dict[str, Any]:
    """Microseconds, the two multiples, and whether each target there is has been met."""
    floor, ours, theirs = (median[case, size, what] for what in ("floor", "rdmarpc", "torch_rpc"))
    return {
        "case": case,
        "bytes": size,
        "floor_us": floor,
        "rdmarpc_us": ours,
        "torch_rpc_us": theirs,
        "times_floor": ours / floor,
        "echo_us": median.get((case, size, "echo")),
        "times_faster_than_torch": theirs / ours,
        "target": target,
        "met": {
            **({"floor": ours / floor <= target["floor"]} if "floor" in target else {}),
            **({"torch": theirs / ours >= target["torch"]} if "torch" in target else {}),
        },
    }


def rate_row(in_flight: int, median: dict[Key, float], target: dict[str, float]) -> dict[str, Any]:
    """Calls a second."""
    ours, theirs = median["calls", in_flight, "rdmarpc"], median["calls", in_flight, "torch_rpc"]
    return {
        "in_flight": in_flight,
        "rdmarpc_per_s": ours,
        "torch_rpc_per_s": theirs,
        "times_faster_than_torch": ours / theirs,
        "target": target,
        "met": {"per_s": ours >= target["per_s"], "torch": ours / theirs >= target["torch"]},
    }


def print_tables(bench: dict[str, Any]) -> None:
    """Everything on standard output."""
    config = bench["config"]
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 110
    console.print(time_table(bench["rows"], f"rdmarpc over {config['device']}: medians of {config['rounds']} rounds"))
    console.print(rate_table(bench["calls"]))
    idle = bench["idle"]
    percent = judged(f"{idle['rdmarpc_percent']:.2f} %", "<", config["targets"]["idle_percent"], idle["met"])
    takes = f"{percent} of a core; with torch RPC {idle['torch_rpc_percent']:.1f} %"
    console.print(f" an idle worker takes {takes}\n")
    console.print(
        " one way: a prepared write, seen by the waiting peer\n"
        " identity: a tensor there and back by rpc_sync\n"
        " stream: one of many writes in a row (torch RPC: two pushes in flight)\n"
        f" floor: a warm memcpy and a flag to the other process (there and back {bench['flag_us']:.2f} µs);\n"
        "        identity: both twice; stream: the memcpy only\n"
        " echo: a prepared write there, and what landed written back: the bytes of an identity call, without the call\n"
        " ✓ ✗: the target after it is met, or not"
    )


def time_table(rows: list[dict[str, Any]], title: str) -> Table:
    """One line for each case and size."""
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("", no_wrap=True)
    for column in ("size", "floor", "rdmarpc", "torch RPC", "× floor", "× torch", "echo"):
        table.add_column(column, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        first, previous = row["case"] != previous, row["case"]
        if first:
            table.add_section()
        table.add_row(
            CASES[row["case"]] if first else "",
            size_text(row["bytes"]),
            time_text(row["floor_us"]),
            time_text(row["rdmarpc_us"]),
            time_text(row["torch_rpc_us"]),
            judged(f"{row['times_floor']:.2f}", "≤", row["target"].get("floor"), row["met"].get("floor")),
            judged(f"{row['times_faster_than_torch']:.1f}", "≥", row["target"].get("torch"), row["met"].get("torch")),
            time_text(row["echo_us"]) if row["echo_us"] else "",
        )
    return table


def rate_table(rows: list[dict[str, Any]]) -> Table:
    """One line for each number of calls in flight."""
    table = Table(title="calls a second, without tensors", box=SIMPLE_HEAD)
    for column in ("in flight", "rdmarpc", "torch RPC", "× torch"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row["in_flight"]),
            judged(f"{row['rdmarpc_per_s']:,.0f}", "≥", row["target"]["per_s"], row["met"]["per_s"]),
            f"{row['torch_rpc_per_s']:,.0f}",
            judged(f"{row['times_faster_than_torch']:.1f}", "≥", row["target"]["torch"], row["met"]["torch"]),
        )
    return table


def judged(value: str, relation: str, target: float | None, met: bool | None) -> str:
    """A value beside its target, with a mark and a colour for whether it is met."""
    if target is None:
        return value
    return f"[{'green' if met else 'red'}]{value} {'✓' if met else '✗'} {relation}{target:,g}[/]"


def size_text(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def time_text(us: float) -> str:
    """Microseconds with three digits, in the unit that suits."""
    if us < 1:
        return f"{us * 1e3:.3g} ns"
    if us < 1e3:
        return f"{us:.3g} µs"
    if us < 1e6:
        return f"{us / 1e3:.3g} ms"
    return f"{us / 1e6:.3g} s"
