"""Turns: one library over one device, in new processes that exist for this turn alone. So nothing else polls, sleeps or holds
memory while a library is measured, and no turn profits from another."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import textwrap
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from . import apps
from .findings import Findings, print_findings
from .hosts import Hosts, task_of
from .libraries import PACKAGES, PEERS, TITLES, serve_or_drive
from .processes import Group, Launcher, WorkerFailed, run_job

Figure = tuple[str, int, float]
"""Case, size (bytes, clients, ...), and a number."""
Entry = Callable[[int, dict[str, Any], Launcher], None]


def main(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A process of a turn in which clients call functions of servers; client 0 tells ("figures", list of them). The job says
    "drive" (module:function), "functions", "calls" under way from a client, and "threads" of a server."""
    found = _drive(rank, job)
    if rank == 0:
        launcher.tell(("figures", found))


def main_with_results(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """The same where "drive" returns figures and results ({name: bytes}); client 0 tells ("results", ...) too."""
    found = _drive(rank, job)
    if rank == 0:
        figures, results = found
        launcher.tell(("figures", figures))
        launcher.tell(("results", results))


def _drive(rank: int, job: dict[str, Any]) -> Any:
    module, _, name = job["drive"].partition(":")
    return serve_or_drive(getattr(importlib.import_module(module), name), rank, job)


def enter(entry: Entry, ranks: list[int], number: int, job: dict[str, Any], launcher: Launcher) -> None:
    """Any process of a turn, of which these ``ranks`` run here; why it fails is written where the launcher looks."""
    rank = ranks[number]
    logging.captureWarnings(True)  # torch warns of its own deprecated parts
    warnings.simplefilter("ignore")
    try:
        entry(rank, job, launcher)
    except Exception as error:
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 300)  # some carry tracebacks of other processes
        (Path(job["meeting_place"]) / f"failed{rank}").write_text(reason)
        raise


class Turns:
    """The turns of one run. What cannot run here, and what has failed, is left out by name and gets no further turn."""

    def __init__(self, findings: Findings, folder: Path, hosts: Hosts | None = None) -> None:
        """``hosts``: of a run over several of them."""
        self.findings, self._folder, self._hosts = findings, folder, hosts
        self.failed = ""
        """Why rdmarpc failed, or whose results differ; empty if all is well."""
        self._out: set[str] = set()
        self._first: dict[str, tuple[str, dict[str, bytes]]] = {}

    def take(self, job: dict[str, Any], what: str, title: str, entry: Entry = main, same: str = "") -> None:
        """One turn of ``job["library"]`` over ``job["device"]``: ``job["processes"]``, or else ``job["clients"]`` and
        ``job["servers"]``, begin at ``entry``. Rank 0 tells ("figures", list), which is kept as ``what``, and ("results",
        {name: bytes}), which must be the same in all turns with the same ``same``."""
        if what in self._out:
            return
        reason = self._agreed(title, missing(job["library"], job["device"]))
        if not reason:
            print(title, file=sys.stderr, flush=True)
            reason = self._agreed(f"the end of {title}", self._run(job, what, title, entry, same))
            if reason and job["library"] not in PEERS:
                self.fail(f"{title}: {reason}")
        if reason:
            self._out.add(what)
            self.findings.left_out(title, reason)

    def fail(self, reason: str) -> None:
        """The program ends with the first of these, after its report."""
        self.failed = self.failed or reason

    def _run(self, job: dict[str, Any], what: str, title: str, entry: Entry, same: str) -> str:
        """Returns nothing, or why it failed."""

        def on_event(group: str, event: tuple[Any, ...]) -> None:
            if event[0] == "figures":
                self.findings.keep(what, event[1])
            else:
                self.compare(same, title, event[1])

        with self._meeting() as place:
            ranks = list(range(job["processes"] if "processes" in job else job["clients"] + job["servers"]))
            if self._hosts is not None:
                ranks, place = self._hosts.mine(len(ranks)), place | self._hosts.address
            if not ranks:
                return ""
            group = Group(TITLES.get(job["library"], job["library"]), partial(enter, entry, ranks), len(ranks))
            try:
                run_job([group], job | place, on_event, job["timeout_s"])
            except WorkerFailed as error:
                reasons = [path.read_text() for path in sorted(Path(place["meeting_place"]).glob("failed*"))]
                return "; ".join(dict.fromkeys(reasons)) or str(error)
        return ""

    def _agreed(self, about: str, reason: str) -> str:
        return reason if self._hosts is None else self._hosts.agree(about, reason)

    def _meeting(self) -> AbstractContextManager[dict[str, Any]]:
        if self._hosts is None:
            return apps.meeting(self._folder)
        return nullcontext(self._hosts.turn())

    def compare(self, same: str, title: str, results: dict[str, bytes]) -> None:
        """With those of the first turn that has this ``same``."""
        first, reference = self._first.setdefault(same, (title, results))
        if wrong := sorted(name for name in {*results, *reference} if results.get(name) != reference.get(name)):
            self.fail(f"results differ: {same}: {', '.join(wrong)}, of {title} and {first}")


def run_app(
    name: str,
    findings: Findings,
    job: dict[str, Any],
    run: Callable[[dict[str, Any], Turns], None],
    judge: Callable[[Findings, dict[str, Any], Path], None],
) -> None:
    """A program by turns from its config to its end: ``run`` takes all turns, ``judge`` makes the tables, targets and pictures,
    and both are written and shown. Fails where rdmarpc does, or where results differ. Over several hosts, every task runs its
    processes of the turns, and the first has all figures. Ends with one line where nothing could be measured."""
    folder, task = apps.run_folder(), task_of(job)
    hosts = None if task is None else Hosts(*task, folder, job["timeout_s"])
    turns = Turns(findings, folder, hosts)
    with apps.ending():
        run(job, turns)
    if hosts is not None:
        hosts.leave()
        if not hosts.first:
            return
    if not findings.measured():
        why = turns.failed or "; ".join(f"{each['what']}: {each['why']}" for each in findings.left[:1])
        raise SystemExit(f"error: nothing was measured: {why}")
    judge(findings, job, folder)
    found = findings.as_dict(job)
    apps.write_and_show(name, found, job, lambda: print_findings(found))
    if turns.failed:
        raise SystemExit(f"error: {turns.failed}")


def missing(library: str, device: str) -> str:
    """Why this library cannot be measured over this device here; nothing if it can."""
    needed = PACKAGES.get(library)
    if needed is not None and importlib.util.find_spec(needed) is None:
        return f"the package {needed} is missing (pip install 'rdmarpc[bench]')"
    if device == "verbs" and not any(Path("/sys/class/infiniband").glob("*")):
        return "there is no RDMA device"
    return ""
