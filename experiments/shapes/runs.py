"""All turns of a program: each library in new processes, by turns, and their results compared bit for bit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ..harness.findings import Findings, ratio, text, times
from ..harness.processes import Group, WorkerFailed, run_job
from ..peers.libraries import TITLES
from ..peers.turns import missing
from .worker import main

QUICK_ROUNDS = 1


class Turns:
    """Runs them and remembers the results. ``sizes``: numbers of processes."""

    def __init__(self, job: dict[str, Any], folder: Path, findings: Findings) -> None:
        self._job, self._folder, self._findings = job, folder, findings
        self._results: dict[tuple[str, int], tuple[str, dict[str, bytes]]] = {}
        self.differ: list[str] = []
        """What was not the same, by case."""

    def run(self, sizes: list[int]) -> None:
        """Ends the program where rdmarpc fails; torch RPC is left out then."""
        job = self._job
        for number in range(job["rounds"]):
            for case in job["cases"]:
                for size in sizes:
                    for library in job["libraries"]:
                        print(f"{case}, {size} processes, round {number + 1} of {job['rounds']}: {TITLES[library]}", flush=True)
                        self._turn(library, case, size)

    def _turn(self, library: str, case: str, size: int) -> None:
        job = self._job | {"library": library, "case": case, "processes": size}
        if reason := missing(library, job["device"]):
            self._findings.left_out(TITLES[library], reason)
            return
        try:
            with tempfile.TemporaryDirectory(dir=self._folder, prefix=".meeting-") as place:
                group = Group(TITLES[library], main, size)
                run_job([group], job | {"meeting_place": place}, lambda _, event: self._take(job, event), job["timeout_s"])
        except WorkerFailed as error:
            if library == "rdmarpc":
                raise SystemExit(f"error: {error}") from None
            self._findings.left_out(f"{TITLES[library]}, {case}, {size} processes", str(error))

    def _take(self, job: dict[str, Any], event: tuple[Any, ...]) -> None:
        _, figures, results = event
        case, size, library = job["case"], job["processes"], job["library"]
        for name, values in figures.items():
            for value in values:
                self._findings.add(f"{case}: {name}", size, library, value)
        first, reference = self._results.setdefault((case, size), (library, results))
        if wrong := sorted(name for name in {*results, *reference} if results.get(name) != reference.get(name)):
            self.differ.append(f"{case}, {size} processes: {', '.join(wrong)}, of {TITLES[library]} and {TITLES[first]}")

    def table(self, title: str, name: str, size_title: str, larger_is_better: bool, note: str) -> None:
        """One figure of all cases, with the ratio of the two libraries."""
        rows, job = [], self._job
        for case, size in self._results:
            ours, theirs = (self._findings.median(f"{case}: {name}", size, library) for library in ("rdmarpc", "torch_rpc"))
            faster = ratio(ours, theirs) if larger_is_better else ratio(theirs, ours)
            cells = [text(ours), text(theirs), times(faster)]
            rows.append([case, str(size), *cells])
        columns = ["", size_title, "rdmarpc", "torch RPC", "times better"]
        self._findings.table(f"{title}, {job['device']}", columns, rows, note)

    def finish(self) -> None:
        """Ends the program if results differ."""
        if self.differ:
            raise SystemExit("error: results differ: " + "; ".join(self.differ))
        print("All turns of a case left the same bits.")


def checked(job: dict[str, Any], cases: tuple[str, ...]) -> dict[str, Any]:
    """The job; ends the program if it makes no sense."""
    if job["quick"]:
        job["rounds"] = min(job["rounds"], QUICK_ROUNDS)
    for name, known in (("cases", cases), ("libraries", ("rdmarpc", "torch_rpc"))):
        if not job[name] or not set(job[name]) <= set(known):
            raise SystemExit(f"error: {name}={job[name]} must be some of {', '.join(known)}")
    for name, value in job.items():
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise SystemExit(f"error: {name}={value} must be at least 1")
    return job
