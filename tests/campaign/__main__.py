"""``python -m tests.campaign``, from the root of the repository. ``docs/trust.md`` says what it looks for."""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import supervisor, trial
from .report import Report
from .strangers import Siege


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long; shared by the kinds of attack")
    parser.add_argument("--trials", type=int, default=0, help="so many fault trials, however long that takes")
    parser.add_argument("--seed", type=int, default=None, help="of all that is drawn (default: drawn itself, and printed)")
    parser.add_argument("--replay", type=int, nargs="+", default=[], help="these trials only, by number")
    parser.add_argument("--devices", default=",".join(trial.DEVICES), help="of fault trials")
    parser.add_argument("--workloads", default=",".join(trial.WORKLOADS), help="of fault trials")
    parser.add_argument("--faults", default="", help="trials that have one of these only; others are not counted")
    parser.add_argument("--only", choices=("faults", "frames", "strangers"), default=None)
    parser.add_argument("--jobs", type=int, default=2, help="fault trials at once")
    parser.add_argument("--logs", type=Path, default=Path("outputs/campaign"), help="where those of failures go")
    parser.add_argument("--frames", type=int, default=0, help="so many mutated frames, however long that takes")
    parser.add_argument("--batch", type=int, nargs="+", default=[], help="these batches of mutated frames only")
    options = parser.parse_args()
    seed = random.randrange(10**9) if options.seed is None else options.seed
    print(f"seed {seed}")
    if why := trial.why_no_cut():
        print(f"no host is cut off: {why}")
    choices = (("--devices", options.devices, trial.DEVICES), ("--workloads", options.workloads, trial.WORKLOADS))
    report = Report("".join(f" {name} {given}" for name, given, usual in choices if given != ",".join(usual)))
    if options.only in (None, "faults") or options.replay:
        share = 60 * options.minutes * (1.0 if options.only else 0.7)
        _faults(report, options, seed, share)
    if options.only in (None, "frames") and not options.replay:
        _frames(report, options, seed, 60 * options.minutes * (1.0 if options.only else 0.15))
    if options.only in (None, "strangers") and not options.replay:
        _strangers(report, options, seed, 60 * options.minutes * (1.0 if options.only else 0.1))
    print(report.summary())
    return int(report.failed)


def _frames(report: Report, options: argparse.Namespace, seed: int, seconds: float) -> None:
    from .mutate import Batches

    limit = time.monotonic() + seconds
    if not options.batch:
        _tampered(report, options, seed, seconds / 2)
    batches = Batches()
    numbers = iter(options.batch) if options.batch else iter(range(seed, seed + 10**9))
    for number in numbers:
        if not options.batch and (report.frames >= options.frames if options.frames else time.monotonic() > limit):
            return
        frames, problems = batches.run(number)
        report.frames += frames
        for problem in problems:
            report.problem(problem)


def _tampered(report: Report, options: argparse.Namespace, seed: int, seconds: float) -> None:
    """Frames over live connections, while others work."""
    limit, devices = time.monotonic() + seconds, options.devices.split(",")
    for number in range(seed, seed + 10**9):
        if time.monotonic() > limit and number > seed + len(devices):
            return
        outcome = supervisor.run(trial.Trial(number, "tampered", devices[number % len(devices)], 3, ()), options.logs)
        report.frames += outcome.frames
        report.live += outcome.frames
        for problem in outcome.problems:
            report.problem(f"frames over live connections, {outcome.trial}: {problem}")


def _strangers(report: Report, options: argparse.Namespace, seed: int, seconds: float) -> None:
    """Groups that workers join and leave, besieged."""
    limit, devices = time.monotonic() + seconds, options.devices.split(",")
    for number in range(seed, seed + 10**9):
        if time.monotonic() > limit and number > seed + len(devices):
            return
        siege = Siege(number, min(10.0, max(3.0, seconds / len(devices))))
        outcome = supervisor.run(trial.Trial(number, "groups", devices[number % len(devices)], 3, ()), options.logs, siege)
        report.strangers += siege.connections
        for problem in outcome.problems:
            report.problem(f"strangers, {outcome.trial}: {problem}")


def _faults(report: Report, options: argparse.Namespace, seed: int, seconds: float) -> None:
    from forks import forks

    forks()  # one thread starts the server
    chance, limit, lock = random.Random(seed), time.monotonic() + seconds, threading.Lock()
    devices, workloads = tuple(options.devices.split(",")), tuple(options.workloads.split(","))
    wanted = set(options.faults.split(",")) if options.faults else set(trial.LETHAL + trial.GENTLE)
    numbers = iter(options.replay) if options.replay else iter(lambda: chance.randrange(10**9), -1)
    drawn = (trial.draw(number, devices, workloads) for number in numbers)
    if not options.replay:
        drawn = (one for one in drawn if wanted & {fault.kind for fault in one.faults})
    left = len(options.replay) or options.trials

    def next_one() -> trial.Trial | None:
        nonlocal left
        with lock:
            if (options.trials or options.replay) and left == 0:
                return None
            if not options.trials and not options.replay and time.monotonic() > limit:
                return None
            left -= 1
            return next(drawn)

    def work() -> None:
        while (one := next_one()) is not None:
            outcome = supervisor.run(one, options.logs)
            with lock:
                report.trial(outcome)

    with ThreadPoolExecutor(options.jobs) as pool:
        for future in [pool.submit(work) for _ in range(options.jobs)]:
            future.result()


if __name__ == "__main__":
    sys.exit(main())
