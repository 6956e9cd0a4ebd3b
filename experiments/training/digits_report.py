"""What the training job shows in the terminal: progress while it runs, a table at the end."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rdmarpc.graph import Transfers

from ..harness.findings import size_text
from ..harness.targets import spread

TITLES = {"single_process": "single process", "rdmarpc": "rdmarpc", "torch_rpc": "torch RPC"}


class TrainingDisplay:
    """Receives the events of worker0; a progress bar in a terminal, one line an epoch elsewhere.

    It draws only when an event arrives: the workers need the cores.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.console = Console(stderr=True)
        self.records: dict[str, dict[str, Any]] = {}
        self.counters: dict[str, int] = {}
        self.transfers: list[Transfers] = []
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
        )
        self.progress = Progress(*columns, console=self.console, auto_refresh=False, disable=not self.console.is_terminal)
        title = f"{job['model']['name']}, {job['workers']} workers, {job['device']}"
        self.task = self.progress.add_task(title, total=job["epochs"], state="starting the workers")
        if not self.console.is_terminal:
            self.console.print(f"{title}: starting the workers")

    def __enter__(self) -> "TrainingDisplay":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def on_event(self, group: str, event: tuple[Any, ...]) -> None:
        """("progress", epochs done, loss, accuracy) or ("trained", records by name, and of ours counters and what crosses)."""
        if event[0] == "trained":
            self.records |= event[1]
            if group == "rdmarpc":
                _, _, self.counters, self.transfers = event
            return
        _, epochs, loss, accuracy = event
        state = f"loss {loss:.4f}, held-out accuracy {accuracy:.2%}"
        self.progress.update(self.task, completed=epochs, state=state)
        self.progress.refresh()
        if epochs and not self.console.is_terminal:
            self.console.print(f"epoch {epochs}: {state}")


def training_table(result: dict[str, Any]) -> Table:
    """One row for each way to train, and underneath what the steady state of ours did."""
    caption = f"rdmarpc, a step from the second on: {counted(result['counters'])}"
    table = Table(
        title="one training step, ms, lower is better: median (p10 to p90);\nless by, accuracy: higher is better",
        caption=caption,
    )
    table.add_column("trained by")
    spreads = {each["what"]: spread(each["samples"]) for each in result["samples"] if each["samples"]}
    for column in ("n", "step, ms", "above one process, ms", "less by", "accuracy", "losses"):
        table.add_column(column, justify="right")
    for name, step_ms in result["step_ms"].items():
        communication = result["communication_ms"].get(name)
        table.add_row(
            TITLES[name],
            str(spreads[name]["n"]),
            f"{step_ms:.2f} ({spreads[name]['p10']:.2f} to {spreads[name]['p90']:.2f})",
            "-" if communication is None else f"{communication:.2f}",
            times_less(result, name),
            f"{result['accuracy_of'][name]:.2%}",
            {None: "reference", True: "equal bits", False: "differ"}[result["equal_to_single_process"].get(name)],
        )
    return table


def counted(counters: dict[str, int]) -> str:
    """What a step did on average, from the counters of all ``counters["steps"]``."""
    given, taken, staged, operations, registrations, messages = (
        counters.get(name, 0) / max(counters["steps"], 1)
        for name in ("bytes_in", "bytes_out", "bytes_staged", "operations", "registrations", "rpc_messages")
    )
    return (
        f"{operations:.3g} operations posted, {size_text(round(given))} written to workers and {size_text(round(taken))}"
        f" fetched from them, {size_text(round(staged))} through staging buffers; {registrations:.3g} registrations of memory,"
        f" {messages:.3g} RPC messages"
    )


def times_less(result: dict[str, Any], name: str) -> str:
    """How many times less `name` communicates than torch RPC; "-" where there is no such number."""
    ours, theirs = result["communication_ms"].get(name), result["communication_ms"].get("torch_rpc")
    if name == "torch_rpc" or not ours or not theirs:
        return "-"
    return f"{theirs / ours:.1f}x"
