"""``python -m tests.programs``, from the root of the repository: random programs, and chosen ones, beside one process.

python -m tests.programs --seeds 0-2000 --minutes 30       a campaign, with a table at its end
python -m tests.programs 17 --print                        a program as a script; without --print it is judged
python -m tests.programs 17 --shrink                       the smallest program that fails like it
python -m tests.programs script.py                         judge a script of that form
python -m tests.programs --probes                          the chosen programs, each over several placements
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import collective_programs
import distributed_programs
import drawn_programs
import judge
import mixed_programs
import probes
import replayed_programs
import served_pairs
import served_programs
import tensor_programs
import wrapped_programs
from callers import Callers, Job

PROGRAMS: dict[str, Any] = {
    "collective": collective_programs,
    "distributed": distributed_programs,
    "mixed": mixed_programs,
    "paired": served_pairs,
    "replayed": replayed_programs,
    "served": served_programs,
    "tensors": tensor_programs,
    "wrapped": wrapped_programs,
}
"""Targets that have programs of their own."""
CALLING = ("distributed", "mixed", "tensors")
"""Those whose programs call ``rdmarpc`` by themselves."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help="seeds, scripts, names of probes")
    parser.add_argument("--seeds", default="", help="A-B, or only A: to go on until --minutes are over")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--probes", action="store_true")
    parser.add_argument(
        "--target", default="remote", help="identity, wrap, remote, graphed, module:function:workers, or one of PROGRAMS"
    )
    parser.add_argument("--no-draws", action="store_true", help="without random numbers that are drawn at workers")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a program may take")
    parser.add_argument("--transport", default="auto", help="of the group: auto, shm or tcp")
    parser.add_argument("--print", action="store_true", help="the program's text, and do not run it")
    parser.add_argument("--shrink", action="store_true", help="print the smallest program that fails in the same way")
    parser.add_argument("--quiet", action="store_true", help="only the table")
    options = parser.parse_args()
    if options.print:
        print(_text(_cases(options)))
        return 0
    return _shrink(options) if options.shrink else _campaign(options)


def _cases(options: argparse.Namespace) -> Iterator[tuple[str, Job]]:
    """Name and job of each."""
    for case in options.cases:
        if case.endswith(".py"):
            yield case, ("mixed" if options.target in CALLING else "text", Path(case).read_text(encoding="utf-8"))
        elif case.isdigit():
            yield _drawn(int(case), options)
        else:
            yield from _probed([case])
    if options.probes:
        yield from _probed(probes.NAMES)
    if options.seeds:
        first, _, last = options.seeds.partition("-")
        for seed in range(int(first), int(last or 10**9)):
            yield _drawn(seed, options)


def _drawn(seed: int, options: argparse.Namespace) -> tuple[str, Job]:
    return str(seed), _job(_recipe(seed, options), options)


def _recipe(seed: int, options: argparse.Namespace) -> Any:
    if options.target in PROGRAMS:
        return PROGRAMS[options.target].recipe(seed)
    return drawn_programs.recipe(seed, not options.no_draws)


def _job(made: Any, options: argparse.Namespace) -> Job:
    if options.target == "collective":
        return "collective", collective_programs.source(made), made.size, made.seed
    if options.target in PROGRAMS:
        return "mixed" if options.target in CALLING else "text", PROGRAMS[options.target].source(made)
    return "text", (drawn_programs.graphed_source if options.target == "graphed" else drawn_programs.source)(made)


def _probed(names: list[str]) -> Iterator[tuple[str, Job]]:
    for name in names:
        for variant in range(probes.VARIANTS):
            yield f"{name}/{variant}", ("probe", name, variant)


def _text(cases: Iterator[tuple[str, Job]]) -> str:
    return "\n".join(probes.text(job[1]) if job[0] == "probe" else job[1] for _, job in cases)


def _campaign(options: argparse.Namespace) -> int:
    counts: collections.Counter[str] = collections.Counter()
    examples: dict[str, list[str]] = collections.defaultdict(list)
    start = time.monotonic()
    with Callers(options.target, options.limit, options.transport) as callers:
        for name, job in _cases(options):
            if time.monotonic() - start > 60 * options.minutes:
                break
            verdict = callers.judge(job)
            counts[verdict.kind] += 1
            examples[verdict.kind].append(name)
            if verdict.kind not in judge.GOOD and not options.quiet:
                print(f"{name}: {verdict.kind}: {verdict.detail[:400]}", flush=True)
    print(f"\n{sum(counts.values())} programs, target {options.target}, {time.monotonic() - start:.0f} s")
    for kind in judge.KINDS:
        if counts[kind]:
            few = "" if kind in judge.GOOD else f"  {' '.join(examples[kind][:12])}"
            print(f"{kind:12} {counts[kind]:6}{few}")
    return int(any(counts[kind] for kind in judge.KINDS if kind not in (*judge.GOOD, "refused")))


def _shrink(options: argparse.Namespace) -> int:
    programs = PROGRAMS.get(options.target, drawn_programs)
    with Callers(options.target, options.limit, options.transport) as callers:

        def verdict(made: Any) -> judge.Verdict:
            return callers.judge(_job(made, options))

        for seed in map(int, options.cases):
            made = _recipe(seed, options)
            kind = verdict(made).kind
            if kind in judge.GOOD:
                print(f"{seed}: {kind}")
                continue
            made = judge.shrunk(made, programs.smaller, lambda less, kind=kind: verdict(less).kind == kind)
            last = verdict(made)
            print(_job(made, options)[1], f"\n# {seed}: {last.kind}: {last.detail}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
