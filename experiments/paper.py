"""Every experiment of the papers, one after the other, and one report of them.

    python -m experiments.paper                  # all of it; or: make paper
    python -m experiments.paper quick=true       # a look at everything, in minutes
    python -m experiments.paper only=mlsys       # those of one paper: mlsys, rdma, ddp, cuda
    python -m experiments.paper 'only=[grid,sizes]'

A finished experiment is kept, and is not run again for the same commit, code, packages, config and machine: after an
interruption the same command goes on. The run's folder receives report.md, its pictures, and results.json.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig
from rich.console import Console

from .harness import apps
from .harness.targets import verdicts
from .paper_runs import here, programs, report
from .paper_runs.catalogue import Experiment, chosen

CONF = apps.CONF
PACKAGE = __name__.rpartition(".")[0] if __name__ != "__main__" else (__spec__.parent or "experiments")
LATE = 15.0
"""A program is ended after so many times as long as it ought to take: other programs may use the machine, too."""


@hydra.main(version_base="1.3", config_path=CONF, config_name="paper")
def main(cfg: DictConfig) -> None:
    """All that were chosen; fails, after the report, if one of them failed."""
    with alone(apps.run_folder()) as folder:
        report_of(checked(cfg), folder)


def report_of(job: dict[str, Any], folder: Path) -> None:
    """Runs them, and writes the report after each."""
    console = Console(highlight=False, markup=False)
    console.print(f"the report will be {folder / 'report.md'}", soft_wrap=True)
    surroundings = here.surroundings()
    entries: list[report.Entry] = []
    interrupted = False
    try:
        with ended_by_signals():
            for entry in run_all(job, surroundings, console):
                entries.append(entry)
                report.write(folder, entries, surroundings, job["quick"], True)
    except KeyboardInterrupt:
        interrupted = True
        rest = chosen(job["only"])[len(entries) :]
        entries += [report.Entry(each, reason="interrupted before it had finished") for each in rest]
    whole = report.write(folder, entries, surroundings, job["quick"], interrupted)
    targets = [target for each in whole["experiments"] for target in each["targets"]]
    console.print(f"targets: {verdicts(targets)}")
    console.print(f"report.md and results.json are in {folder}", soft_wrap=True)
    if interrupted:
        console.print("interrupted: the same command goes on from here")
        raise SystemExit(130)
    if failed := [entry.experiment.name for entry in entries if entry.failed]:
        raise SystemExit(f"error: {', '.join(failed)} failed; the report says why")


def run_all(job: dict[str, Any], surroundings: dict[str, Any], console: Console) -> Iterator[report.Entry]:
    """Runs what can run here, and yields each experiment when it has ended or has been left out."""
    experiments = chosen(job["only"])
    deadline = time.monotonic() + 60 * job["minutes"]
    for number, experiment in enumerate(experiments, 1):
        head = f"[{number}/{len(experiments)}] {experiment.name}"
        entry = run_one(experiment, job, surroundings, deadline, console, head)
        if entry.place is None:
            console.print(f"{head}: {'failed' if entry.failed else 'left out'}: {entry.reason}", soft_wrap=True)
        else:
            console.print(f"{head}: {'finished earlier' if entry.again else 'finished'}, {entry.record['seconds']:.0f} s")
        yield entry


def run_one(
    experiment: Experiment, job: dict[str, Any], surroundings: dict[str, Any], deadline: float, console: Console, head: str
) -> report.Entry:
    """One experiment: found finished, left out, failed, or run."""
    arguments = experiment.arguments(job["quick"])
    place = Path(job["kept"]).absolute() / f"{experiment.name}-{programs.key(arguments, surroundings)}"
    if record := programs.kept(place):
        return report.Entry(experiment, place, record=record, again=True)
    if reason := here.why_not(experiment, PACKAGE, job["quick"]):
        return report.Entry(experiment, reason=reason)
    left_s, takes_s = deadline - time.monotonic(), 60 * experiment.takes(job["quick"])
    if left_s < takes_s:
        reason = f"no time: it takes about {takes_s:.0f} s, {max(0, left_s):.0f} s of minutes={job['minutes']:g} are left"
        return report.Entry(experiment, reason=reason)
    command = programs.python(f"{PACKAGE}.{experiment.name}", arguments)
    status = console.status(head) if console.is_terminal else None
    if status is None:
        console.print(f"{head}: {' '.join(['python', *command[1:]])}", soft_wrap=True)

    def progress(line: str) -> None:
        if status is not None:
            status.update(f"{head}: {line[:100]}")

    with status or contextlib.nullcontext():
        try:
            record = programs.run(command, place, min(LATE * takes_s, left_s), progress)
        except programs.TooLate as error:
            if left_s >= LATE * takes_s:
                return report.Entry(experiment, reason=str(error), failed=True, output=error.output)
            reason = f"no time: it had not ended when minutes={job['minutes']:g} were over"
            return report.Entry(experiment, reason=reason)
        except programs.Failed as error:
            return report.Entry(experiment, reason=str(error), failed=True, output=error.output)
    return report.Entry(experiment, place, record=record)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[Path]:
    """Ends the program while another one writes its report into this folder."""
    place = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"error: another run writes its report into hydra.run.dir={folder}") from None
        except OSError:
            pass  # a file system without locks
        yield folder
    finally:
        os.close(place)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """The signal that ends a batch job is an interruption like Ctrl-C, which works even where it was ignored at the start."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, interrupt) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before):
            signal.signal(number, handler)


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values; ends the program if it makes no sense."""
    job = apps.plain(cfg)
    chosen(job["only"])
    if job["minutes"] is None:
        job["minutes"] = 5 if job["quick"] else 60
    if not isinstance(job["minutes"], (int, float)) or job["minutes"] <= 0:
        raise SystemExit(f"error: minutes={job['minutes']} must be more than 0")
    try:
        Path(job["kept"]).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"error: kept={job['kept']}: {error.strerror}") from None
    return job


if __name__ == "__main__":
    apps.start(main)
