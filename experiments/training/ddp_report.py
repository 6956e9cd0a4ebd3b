"""The tables of what the ranks measured, and what is simulated from it."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..harness.findings import Findings, size_text, text, times
from ..harness.targets import quantile, ratio
from . import ddp_simulated as simulated

GROUPS = ("rdmarpc", "gloo")
BYTES = 4


class Breakdown(NamedTuple):
    """Of a step, in milliseconds; differences of medians. ``hidden``: what overlap saves."""

    forward: float
    backward: float
    exposed: float
    hidden: float

    @property
    def speed_up(self) -> float:
        """Of overlap, in percent: the steps that are made in the same time, as the paper counts."""
        return 100 * self.hidden / (self.forward + self.backward + self.exposed)


def breakdown(findings: Findings, model: str, group: str) -> Breakdown | None:
    """`None`: not measured."""
    found = {
        (what, phase): findings.median(f"breakdown, {model}: {phase}", 0, what)
        for what in ("alone", group, f"{group} without overlap")
        for phase in ("forward", "backward")
    }
    if any(value is None for value in found.values()):
        return None
    alone, with_it, without = (
        sum(found[what, phase] or 0.0 for phase in ("forward", "backward"))
        for what in ("alone", group, f"{group} without overlap")
    )
    return Breakdown(found["alone", "forward"] or 0.0, found["alone", "backward"] or 0.0, with_it - alone, without - with_it)


def own_work(findings: Findings, model: str) -> float | None:
    """Milliseconds by which a step of DDP is longer in which nothing is sent."""
    found = [findings.median(f"breakdown, {model}: {phase}", 0, "unsummed") for phase in ("forward", "backward")]
    alone = [findings.median(f"breakdown, {model}: {phase}", 0, "alone") for phase in ("forward", "backward")]
    if None in found + alone:
        return None
    return sum(each or 0.0 for each in found) - sum(each or 0.0 for each in alone)


def losses(findings: Findings, training: tuple[int, float], every: int, group: str) -> list[float]:
    return findings.samples(f"training, batch {training[0]}, rate {training[1]:g}: losses", every, group)


class Link(NamedTuple):
    """What the simulation stands on."""

    latency_ms: float
    rate: float
    """Bytes a millisecond."""


def link(findings: Findings, job: dict[str, Any], group: str) -> Link | None:
    """From the fastest pieces that were measured. `None`: nothing was."""
    latency = findings.median("granularity, latency", 1, group)
    whole = [findings.median("granularity, all", count, group) for count in job["granularity"]]
    fastest = min((each for each in whole if each is not None), default=None)
    if latency is None or fastest is None:
        return None
    return Link(latency, simulated.bandwidth(BYTES * job["numbers"], fastest, latency))


def judge(findings: Findings, job: dict[str, Any]) -> None:
    """All tables and targets of the parts that were measured."""
    tables = {
        "granularity": _granularity,
        "buckets": _buckets,
        "breakdown": _breakdowns,
        "skipping": _skipping,
        "convergence": _convergence,
        "scaling": _scaling,
    }
    for part in job["parts"]:
        tables[part](findings, job)
    if {"granularity", "scaling"} <= set(job["parts"]):
        _simulated(findings, job)


def _spread(findings: Findings, case: str, size: int, what: str) -> str:
    samples = findings.samples(case, size, what)
    if not samples:
        return "-"
    low, middle, high = (quantile(samples, part) for part in (0.1, 0.5, 0.9))
    return f"{middle:,.2f} ({low:,.2f} to {high:,.2f})"


def _granularity(findings: Findings, job: dict[str, Any]) -> None:
    rows = []
    for count in job["granularity"]:
        ours, theirs = (findings.median("granularity, all", count, each) for each in GROUPS)
        cells = [_spread(findings, "granularity, all", count, each) for each in GROUPS]
        rows.append([f"{count:,}", *cells, times(ratio(theirs, ours))])
    single = [_spread(findings, "granularity, latency", 1, each) for each in GROUPS]
    findings.table(
        f"{job['numbers']:,} float32 by all_reduce in pieces, 2 ranks, ms",
        ["numbers in a piece", *GROUPS, "gloo / rdmarpc"],
        rows,
        "Median (tenth to ninetieth percentile). All pieces are started, then waited for. One number alone, ms: "
        + ", ".join(f"{group} {cell}" for group, cell in zip(GROUPS, single)),
        better="ms: lower is better; gloo / rdmarpc: higher is better.",
    )


def _buckets(findings: Findings, job: dict[str, Any]) -> None:
    ways = [f"{group}{end}" for group in GROUPS for end in ("", " without overlap")]
    for model in job["models"]:
        rows = []
        for cap in job["caps_mb"]:
            size = int(cap * (1 << 20))
            rows.append([f"{cap:g}", *(_spread(findings, f"buckets, {model}", size, way) for way in ways)])
        note = "Median (tenth to ninetieth percentile). 0: a bucket for each parameter."
        findings.table(
            f"A step of {model} by MiB of a bucket, 2 ranks, ms", ["MiB", *ways], rows, note, better="Lower is better."
        )


def _breakdowns(findings: Findings, job: dict[str, Any]) -> None:
    rows = []
    for model in job["models"]:
        found = {group: breakdown(findings, model, group) for group in GROUPS}
        for group, each in found.items():
            if each is not None:
                rows.append([f"{model}, {group}", *map(text, each), text(each.speed_up, "{:.0f} %")])
        rows.append([f"{model}, nothing summed", "-", "-", text(own_work(findings, model)), "-", "-"])
        ours, theirs = found["rdmarpc"], found["gloo"]
        if ours is not None and theirs is not None:
            less = theirs.exposed / ours.exposed if min(theirs.exposed, ours.exposed) > 0 else None  # else it is noise
            findings.target(f"{model}: communication that is not hidden, times less than gloo's", less, "≥", 3)
    note = (
        "Differences of medians. exposed: the step less one of the same model without DDP; nothing summed: DDP's own work, with"
        " the division of the sums, which every group has. hidden: what overlap"
        " saves, less than 0 where it costs. Two ranks keep both cores busy, so what moves the bytes takes its time from"
        " backward: hidden is only what waiting there was. The paper's speed-ups by overlap, on 32 GPUs: 38 and 35 %"
        " with NCCL, 27 and 22 % with gloo."
    )
    columns = ["model", "forward", "backward", "exposed", "hidden", "speed-up by overlap"]
    better = "forward, backward, exposed: lower is better; hidden, speed-up: higher is better."
    findings.table("A step in parts, 2 ranks, ms", columns, rows, note, better=better)


def _skipping(findings: Findings, job: dict[str, Any]) -> None:
    rows = []
    for model in job["models"]:
        for every in job["skip"]:
            cells = []
            for group in GROUPS:
                whole, this = (findings.median(f"skipping, {model}", each, group) for each in (job["skip"][0], every))
                less = None if not whole or this is None else 100 * (1 - this / whole)
                cells += [_spread(findings, f"skipping, {model}", every, group), text(less, "{:.0f} %")]
            rows.append([f"{model}, every {every}", *cells])
    columns = ["synchronised", *(cell for group in GROUPS for cell in (group, f"{group}: less time"))]
    note = "A mean step of a cycle: median (tenth to ninetieth percentile). less time: than the first row of the model."
    title = "A step where every n-th one alone is synchronised, 2 ranks, ms"
    findings.table(title, columns, rows, note, better="ms: lower is better; less time: higher is better.")


def _convergence(findings: Findings, job: dict[str, Any]) -> None:
    rows = []
    for training in job["trainings"]:
        for every in job["skip"]:
            ours, theirs = (losses(findings, training, every, group) for group in GROUPS)
            right = findings.median(f"training, batch {training[0]}, rate {training[1]:g}: right", every, "rdmarpc")
            tail = ours[-max(1, len(ours) // 20) :]
            same = "the same bits" if ours == theirs else "other bits"
            title = f"batch {training[0]}, rate {training[1]:g}, every {every}"
            rows.append([title, text(sum(tail) / len(tail), "{:.4f}"), text(right and 100 * right, "{:.1f} %"), same])
    findings.table(
        f"Training on digits, {job['batches']} batches, 2 ranks",
        ["synchronised", "loss", "held-out digits recognised", "losses beside gloo's"],
        rows,
        "loss: the mean of the last twentieth of the batches. The gradients of n batches add up before the optimizer steps.",
        better="loss: lower is better; digits recognised: higher is better.",
    )


def _scaling(findings: Findings, job: dict[str, Any]) -> None:
    rows = []
    for ranks in job["ranks"]:
        steps = [findings.median("scaling, step", ranks, group) for group in GROUPS]
        slower = [None if step is None else 100 * (step / job["compute_ms"] - 1) for step in steps]
        cells = [_spread(findings, "scaling, step", ranks, group) for group in GROUPS]
        rows.append([str(ranks), *cells, *(text(each, "{:.0f} %") for each in slower)])
    findings.table(
        f"A step by ranks, ms: {job['parameters']:,} parameters, emulated computation of {job['compute_ms']:g} ms",
        ["ranks", *GROUPS, *(f"{group}: longer than the computation" for group in GROUPS)],
        rows,
        "The computation is a sleep in every layer, because two cores cannot compute for eight ranks. The gradients and their"
        " sums are real. They share this machine's cores and memory, so a step of more ranks than cores takes as long as the"
        " cores need for all of them: it says how much work communication is, not how long it takes on hosts of their own.",
        better="ms, and by how much longer: lower is better.",
    )


def steps_beyond(findings: Findings, job: dict[str, Any], group: str) -> dict[int, float]:
    """Simulated steps, by hosts; empty: nothing to simulate from was measured."""
    found = link(findings, job, group)
    if found is None:
        return {}
    nbytes, cap = BYTES * job["parameters"], job["cap_mb"] * (1 << 20)
    return {hosts: simulated.step_ms(hosts, nbytes, cap, job["compute_ms"], *found) for hosts in job["hosts"]}


def _simulated(findings: Findings, job: dict[str, Any]) -> None:
    beyond = {group: steps_beyond(findings, job, group) for group in GROUPS}
    links = {group: link(findings, job, group) for group in GROUPS}
    rows = []
    for hosts in job["hosts"]:
        cells = [text(found.get(hosts)) for found in beyond.values()]
        for every in job["skip"][1:]:
            for found in beyond.values():
                step = found.get(hosts)
                cells.append(text(None if step is None else simulated.skipped_ms(every, step, job["compute_ms"])))
        rows.append([str(hosts), *cells])
    measured = [
        f"{group} {1e3 * each.latency_ms:.0f} us and {size_text(int(1e3 * each.rate))}/s"
        for group, each in links.items()
        if each is not None
    ]
    columns = ["hosts", *(f"{group}, n = {every}" for every in job["skip"] for group in GROUPS)]
    note = (
        "Arithmetic, not a measurement: rings over links that do not disturb each other, with the latency and bandwidth of an"
        f" all_reduce between two processes here ({'; '.join(measured)}): those of this machine's memory, not of a network."
        " n: every n-th step alone is synchronised."
    )
    findings.table("Simulated: a step of the same model on more hosts, ms", columns, rows, note, better="Lower is better.")
