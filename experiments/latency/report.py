"""The benchmark in the terminal: what it is doing while it runs, tables at the end."""

from collections.abc import Callable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.status import Status
from rich.table import Table

from ..harness.targets import marked, summary_lines
from .rows import CASES, size_text


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


def tables(bench: dict[str, Any]) -> list[tuple[Table, str]]:
    """What was measured, each with what stands below it."""
    config = bench["config"]
    rounds = f"medians of n = {config['rounds']} rounds"
    found: list[tuple[Table, str]] = []
    if bench["rows"]:
        title = f"a call or a write over {config['device']}, lower is better: {rounds}"
        found.append((time_table(bench["rows"], title), LEGEND.format(flag_us=bench["flag_us"])))
    if bench["first"]:
        found.append((first_table(bench["first"]), ""))
    if bench["calls"]:
        title = f"calls a second without tensors, higher is better: {rounds}"
        found.append((rate_table(bench["calls"], title, "in flight"), ""))
    if bench["all_to_all"]:
        title = f"calls a second, all to all, higher is better: {rounds}"
        torch_rpc = f"torch RPC ({config['all_to_all_torch']})"
        found.append((rate_table([bench["all_to_all"]], title, "workers", torch_rpc), ""))
    if bench["start"]:
        found.append((start_table(bench["start"], f"starting, lower is better: medians of n = {config['start']}"), ""))
    if bench["autograd"]:
        above = "alone: the same in one process; above: what the calls add to it"
        found.append((autograd_table(bench["autograd"], f"distributed autograd, lower is better: {rounds}"), above))
    if bench["idle"]:
        found.append((idle_table(bench["idle"]), ""))
    return found


def print_tables(bench: dict[str, Any]) -> None:
    """Everything on standard output."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140
    for table, note in tables(bench):
        console.print(table)
        if note:
            console.print(note, soft_wrap=True)
    console.print("\n".join(summary_lines(bench["targets"])), soft_wrap=True, markup=False)


LEGEND = """\
 × torch: higher is better; p10 to p90: tenth to ninetieth percentile of rdmarpc's rounds;
 one way: a prepared write, seen by the waiting peer;
 identity: a tensor there and back by rpc_sync; arena: from registered memory; 8 tensors: in one call;
 stream: one of many writes in a row (torch RPC: two pushes in flight);
 x + 1: rpc_sync, the callee allocates the result; remote: remote() and to_here() of an identity;
 floor: a warm memcpy and a flag to the other process (there and back {flag_us:.2f} µs);
        from identity on both twice, for x + 1 that and the local computation; stream: the memcpy only;
 beside, echo: a prepared write there, and what landed written back: the bytes of an identity call, without the call;
 beside, local: the computation in the caller's process;
 beside, sockets (tcp): the same bytes by blocking calls on a plain connection, from a compiled loop and from Python;
 ✓ ✗ ?: the target after it is met, missed, or left open by the spread (p10 to p90) of the rounds
"""


def time_table(rows: list[dict[str, Any]], title: str) -> Table:
    """One line for each case and size."""
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("", no_wrap=True)
    for column in ("size", "floor", "rdmarpc", "p10 to p90", "torch RPC", "× floor", "× torch", "beside"):
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
            judged(row, "us", time_text(row["rdmarpc_us"])),
            spread_text(row, time_text),
            time_text(row["torch_rpc_us"]),
            judged(row, "floor", f"{row['times_floor']:.2f}"),
            judged(row, "torch", f"{row['times_faster_than_torch']:.1f}"),
            beside_text(row),
        )
    return table


def beside_text(row: dict[str, Any]) -> str:
    """The last column of a row: its staged bytes, or the time of `echo` or `local`, or of the plain sockets."""
    if "staged" in row["targets"]:
        return judged(row, "staged", f"{row['bytes_staged']:.0f} B staged")
    if row["compiled_socket_us"]:
        return f"sockets {time_text(row['compiled_socket_us'])}, {time_text(row['python_socket_us'])}"
    return next((f"{name} {time_text(row[f'{name}_us'])}" for name in ("echo", "local") if row[f"{name}_us"]), "")


def first_table(rows: list[dict[str, Any]]) -> Table:
    """One line for each size."""
    title = "the first call of a signature, the second, and later ones, lower is better: medians"
    table = Table(title=title, box=SIMPLE_HEAD)
    others = ("second", "later", "× later")
    for column in ("size", "rdmarpc", "p10 to p90", *others, "torch RPC", *others, "× torch"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        ours, theirs = (
            [time_text(row[f"{what}_{part}us"]) for part in ("", "second_", "later_")] for what in ("rdmarpc", "torch_rpc")
        )
        table.add_row(
            size_text(row["bytes"]),
            ours[0],
            spread_text(row, time_text),
            *ours[1:],
            judged(row, "later", f"{row['times_later']:.2f}"),
            *theirs,
            f"{row['torch_rpc_times_later']:.2f}",
            f"{row['times_faster_than_torch']:.1f}",
        )
    return table


def rate_table(rows: list[dict[str, Any]], title: str, numbered: str, torch_rpc: str = "torch RPC") -> Table:
    """One line for each number of calls in flight, or of workers."""
    table = Table(title=title, box=SIMPLE_HEAD)
    for column in (numbered, "rdmarpc", "p10 to p90", torch_rpc, "× torch"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row["number"]),
            judged(row, "per_s", f"{row['rdmarpc_per_s']:,.0f}"),
            spread_text(row, "{:,.0f}".format),
            f"{row['torch_rpc_per_s']:,.0f}",
            judged(row, "torch", f"{row['times_faster_than_torch']:.1f}"),
        )
    return table


def start_table(rows: list[dict[str, Any]], title: str) -> Table:
    """One line for each way to take the time."""
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for column in ("rdmarpc", "p10 to p90", "torch RPC", "× torch"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        compared = row["torch_rpc_s"] is not None
        table.add_row(
            row["name"],
            judged(row, "s", time_text(1e6 * row["rdmarpc_s"])),
            spread_text(row, time_text),
            time_text(1e6 * row["torch_rpc_s"]) if compared else "",
            judged(row, "torch", f"{row['times_faster_than_torch']:.2f}") if compared else "",
        )
    return table


def autograd_table(rows: list[dict[str, Any]], title: str) -> Table:
    """One line for each computation; `above` is what a layer takes more than the same alone (``latency/autograd``)."""
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("", no_wrap=True)
    for column in ("alone", "rdmarpc", "p10 to p90", "above", "torch RPC", "above", "× torch", "of its above"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["name"],
            *(time_text(row[f"{what}_us"]) for what in ("local", "rdmarpc")),
            spread_text(row, time_text),
            *(time_text(row[f"{what}_us"]) for what in ("rdmarpc_above", "torch_rpc", "torch_rpc_above")),
            judged(row, "torch", f"{row['times_faster_than_torch']:.1f}"),
            judged(row, "above", f"{row['of_torch_rpc_above']:.2f}") if "above" in row["targets"] else "",
        )
    return table


def idle_table(row: dict[str, Any]) -> Table:
    """One line."""
    table = Table(title="processor time of an idle worker, % of a core, lower is better: medians", box=SIMPLE_HEAD)
    for column in ("", "rdmarpc", "p10 to p90", "torch RPC"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    ours = judged(row, "percent", f"{row['rdmarpc_percent']:.2f}")
    table.add_row(row["name"], ours, spread_text(row, "{:.2f}".format), f"{row['torch_rpc_percent']:.1f}")
    return table


def judged(row: dict[str, Any], key: str, text: str) -> str:
    """A value of a row beside its target, with a mark and a colour for whether it is met."""
    return marked(text, row["targets"][key]) if key in row["targets"] else text


def spread_text(row: dict[str, Any], form: Callable[[float], str]) -> str:
    """Of rdmarpc's rounds: the tenth and the ninetieth percentile."""
    return f"{form(row['spread']['p10'])} to {form(row['spread']['p90'])}"


def time_text(us: float) -> str:
    """Microseconds with three digits, in the unit that suits."""
    if abs(us) < 1:
        return f"{us * 1e3:.3g} ns"
    if abs(us) < 1e3:
        return f"{us:.3g} µs"
    if abs(us) < 1e6:
        return f"{us / 1e3:.3g} ms"
    return f"{us / 1e6:.3g} s"
