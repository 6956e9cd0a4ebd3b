"""Mini-batches end to end with every number of workers and servers that was asked for: the turns, a table a model, targets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..harness.findings import Findings, available_gib, text, times
from ..harness.libraries import TITLES
from ..harness.targets import end_to_end, ratio
from ..harness.turns import Entry, Turns
from . import several, steps
from .models import MODELS

ALONE = "one_process"
ENTRIES: dict[str, Entry] = {
    ALONE: steps.alone, "rdmarpc": several.rdmarpc, "torch_rpc": several.torch_rpc, "grpc": several.grpc,
}  # fmt: skip
NAMES = TITLES | {ALONE: "one process"}
PROCESS_GIB = 0.3
"""Memory of a process that computes, beside the model."""


class Case(NamedTuple):
    model: str
    workers: int
    servers: int
    placement: str

    def __str__(self) -> str:
        return f"{self.model}, workers: {self.workers}, servers: {self.servers}, {self.placement}"

    @property
    def gib(self) -> float:
        """Memory that a turn needs, about. A worker has weights, gradients and activations, and gRPC's messages of both beside
        them; the servers together have the weights, and gradients and messages of all workers. (VGG16 by gRPC, with three
        workers and two servers: 12.1 GiB were seen.)"""
        return MODELS[self.model].mib / 1024 * (6.5 * self.workers + 3) + PROCESS_GIB * (self.workers + self.servers)


def libraries(job: dict[str, Any]) -> list[str]:
    return ["rdmarpc", *(name for name in ("torch_rpc", "grpc") if job[name])]


def cases(job: dict[str, Any]) -> Iterator[Case]:
    """With one server every tensor has the same place, so that has one placement."""
    for model in job["models"]:
        for workers in job["workers"]:
            for servers in job["servers"]:
                for placement in job["placements"] if servers > 1 else job["placements"][:1]:
                    yield Case(model, workers, servers, placement)


def run(job: dict[str, Any], turns: Turns) -> None:
    """All turns. Losses and weights must be those of one process, which has the first turn of its model and workers."""
    for number in range(job["end_to_end_rounds"]):
        known: set[tuple[str, int]] = set()
        for case in cases(job):
            samples = job["batch"].get(case.model)
            if not samples:
                turns.findings.left_out(f"{case.model} end to end", f"batch.{case.model}={samples}")
                continue
            if case.gib > (has := available_gib()):
                why = f"it may need {case.gib:.1f} GiB of memory, {has:.1f} GiB are available"
                turns.findings.left_out(str(case), why)
                continue
            first = (case.model, case.workers) not in known
            known.add((case.model, case.workers))
            for library in [ALONE, *libraries(job)] if first else libraries(job):
                _turn(case, library, number, samples, job, turns)


def _turn(case: Case, library: str, number: int, samples: int, job: dict[str, Any], turns: Turns) -> None:
    same = f"{case.model}, workers: {case.workers}"
    alone = library == ALONE
    given = job | {"library": library, "clients": case.workers, "servers": case.servers, "placement": case.placement}
    given |= {"model": case.model, "samples": samples, "case": same if alone else str(case)}
    given |= {"processes": 1 if alone else case.workers + case.servers}
    title = f"{NAMES[library]}, {same if alone else case}, round {number + 1} of {job['end_to_end_rounds']}"
    turns.take(given, library, title, ENTRIES[library], same)


def judge(findings: Findings, job: dict[str, Any], folder: Path) -> None:
    """A table a model, the targets, and the picture."""
    from .sweep_picture import draw_sweep

    for model in job["models"]:
        rows = [_row(findings, case, job) for case in cases(job) if case.model == model]
        if not all(cell == "-" for row in rows for cell in row[3:]):
            _table(findings, model, rows, job)
    for case in cases(job) if job["torch_rpc"] else ():
        ours, theirs = (key(case, "step", library) for library in ("rdmarpc", "torch_rpc"))
        if findings.samples(*ours) and findings.samples(*theirs):
            name = f"{case}: a mini-batch, times faster than torch RPC"
            findings.target_times(name, theirs, ours, "≥", 1, end_to_end("torch_rpc"))
    draw_sweep(findings, job, folder / "minibatch_workers.png")


def key(case: Case, part: str, library: str) -> tuple[str, int, str]:
    """Of the samples of this part of a step."""
    name = f"{case.model}, workers: {case.workers}" if library == ALONE else str(case)
    return f"{name}: {part}", 4 * MODELS[case.model].parameters, library


def _row(findings: Findings, case: Case, job: dict[str, Any]) -> list[str]:
    found = {library: findings.median(*key(case, "step", library)) for library in (ALONE, *libraries(job))}
    cells = [text(findings.median(*key(case, "computation", "rdmarpc"))), *map(text, found.values())]
    cells += [times(ratio(found[library], found["rdmarpc"])) for library in found if library not in (ALONE, "rdmarpc")]
    return [str(case.workers), str(case.servers), case.placement if case.servers > 1 else "-", *cells]


def _table(findings: Findings, model: str, rows: list[list[str]], job: dict[str, Any]) -> None:
    names = [NAMES[library] for library in libraries(job)]
    heads = ["computation, ms", "one process, ms", *(f"{name}, ms" for name in names)]
    heads += [f"times faster than {name}" for name in names[1:]]
    n = job["end_to_end_rounds"]
    findings.table(
        f"{model} end to end over {job['device']}: a mini-batch of {job['batch'][model]} samples of each worker, n = {n}"
        f" turn{'s' * (n > 1)}",
        ["workers", "servers", "placement", *heads],
        rows,
        "Forward, backward, all gradients to the servers, a step of SGD there, all weights back. Medians. computation: forward"
        " and backward of worker 0 with rdmarpc; what is beyond it is communication, the servers' work and the wait for slower"
        " workers. one process: the batches of all workers one after the other, and the step. All workers and servers share"
        " this machine's cores. Losses and weights of every worker are those of one process, bit for bit, or the run fails.",
        better="ms: lower is better; times: higher is better.",
    )
