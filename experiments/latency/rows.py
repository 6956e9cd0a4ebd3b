"""The benchmark's samples as rows, each judged against its targets."""

from typing import Any, NamedTuple

from ..harness.findings import Key
from ..harness.targets import Target, of_number, of_samples, of_times, spread

CASES = {
    "one_way": "one way",
    "identity": "identity",
    "stream": "stream",
    "arena": "arena",
    "result": "x + 1",
    "several": "8 tensors",
    "remote": "remote",
}


class Measure(NamedTuple):
    """The quantity of a target: its name, which direction is good, whose samples it is made of, by whose it divides them (none:
    they are the quantity), and the samples' units in one of its own."""

    name: str
    relation: str
    over: str
    under: str = ""
    units: float = 1.0


MEASURES = {
    "floor": Measure("times the floor", "≤", "rdmarpc", "floor"),
    "torch": Measure("times faster than torch RPC", "≥", "torch_rpc", "rdmarpc"),
    "us": Measure("µs", "≤", "rdmarpc"),
    "s": Measure("s", "≤", "rdmarpc", units=1e6),
    "per_s": Measure("a second", "≥", "rdmarpc"),
    "later": Measure("times a later call", "≤", "rdmarpc", "rdmarpc"),
    "staged": Measure("bytes staged", "≤", "staged"),
    "above": Measure("of torch RPC's time above", "≤", "rdmarpc_above", "torch_rpc_above"),
    "percent": Measure("% of a core", "≤", "rdmarpc"),
}
RATES = ("calls", "all_to_all")
"""Cases of calls a second: more is faster."""
SIZED = (*CASES, "first", "calls")
"""Cases with targets for each size, or number in flight."""


def summary(records: list[dict[str, Any]], job: dict[str, Any]) -> dict[str, Any]:
    """{"rows": one for each case and size, "first": one for each size, "calls": one for each number in flight, "start": one for
    each way to take the time, "autograd": one for each computation, "all_to_all", "idle": a row or None, "flag_us": the
    floor's flag there and back or None, "targets": all of them, "records": all samples}; everything but the records are
    medians over the rounds; "spread" of a row has the number of rounds and the percentiles of rdmarpc's, in the unit of the
    records."""
    records = [{**record, "unit": unit(record["case"], record["what"])} for record in records]
    median = {(record["case"], record["size"], record["what"]): record["median"] for record in records}
    samples = {(record["case"], record["size"], record["what"]): record["samples"] for record in records}

    def sizes(case: str) -> list[int]:
        return sorted(size for name, size, what in median if (name, what) == (case, "rdmarpc"))

    bench: dict[str, Any] = {
        "flag_us": median.get(("flag", 0, "floor")),
        "rows": [time_row(case, size, median) for case in CASES for size in sizes(case)],
        "first": [first_row(size, median) for size in sizes("first")],
        "calls": [rate_row("calls", number, median) for number in sizes("calls")],
        "start": [start_row(case, size, median) for case in STARTS for size in sizes(case)],
        "autograd": [autograd_row(case, median) for case in COMPUTATIONS for _ in sizes(case)],
        "idle": next((idle_row(median) for _ in sizes("idle")), None),
        "all_to_all": next((rate_row("all_to_all", number, median) for number in sizes("all_to_all")), None),
    }
    for row in every(bench):
        size = row.get("bytes", row.get("number", row.get("workers", 0)))
        found = spread(samples[row["case"], size, "rdmarpc"])
        row["spread"] = {name: found[name] for name in ("n", "p10", "p90")}
        row["targets"] = judged(row, size, samples, job["targets"])
    targets = [target for row in every(bench) for target in row["targets"].values()]
    return bench | {"targets": targets, "records": records}


def unit(case: str, what: str) -> str:
    """Of the samples."""
    if what == "staged":
        return "B"
    return {"calls": "calls/s", "all_to_all": "calls/s", "idle": "%"}.get(case, "us")


def every(bench: dict[str, Any]) -> list[dict[str, Any]]:
    """All rows."""
    single = [row for row in (bench["all_to_all"], bench["idle"]) if row]
    return [*bench["rows"], *bench["first"], *bench["calls"], *bench["start"], *bench["autograd"], *single]


def judged(row: dict[str, Any], size: int, samples: dict[Key, list[float]], asked: dict[str, Any]) -> dict[str, Target]:
    """What was asked of a row: {key of ``MEASURES``: target}."""
    case = row["case"]
    limits = asked.get(case, {})
    limits = limits.get(size, {}) if case in SIZED else limits
    return {key: _target(key, f"{row['name']}: {MEASURES[key].name}", case, size, samples, limits[key]) for key in limits}


def _target(key: str, name: str, case: str, size: int, samples: dict[Key, list[float]], asked: float) -> Target:
    measure = MEASURES[key]
    over, under = (measure.under, measure.over) if key == "torch" and case in RATES else (measure.over, measure.under)
    values = samples.get((case, size, over), [])
    if key == "staged":  # a count, the same in every round
        return of_number(name, max(values, default=None), measure.relation, asked)
    if not under:
        return of_samples(name, [value / measure.units for value in values], measure.relation, asked)
    beside = samples.get(("later" if key == "later" else case, size, under), [])
    return of_times(name, values, beside, measure.relation, asked)


def time_row(case: str, size: int, median: dict[Key, float]) -> dict[str, Any]:
    """Microseconds, the multiples, and what stands beside."""
    floor, ours, theirs = (median[case, size, what] for what in ("floor", "rdmarpc", "torch_rpc"))
    return {
        "case": case,
        "bytes": size,
        "name": f"{CASES[case]}, {size_text(size)}",
        "floor_us": floor,
        "rdmarpc_us": ours,
        "torch_rpc_us": theirs,
        "times_floor": ours / floor,
        "times_faster_than_torch": theirs / ours,
        "echo_us": median.get((case, size, "echo")),
        "local_us": median.get((case, size, "local")),
        "compiled_socket_us": median.get((case, size, "compiled_socket")),
        "python_socket_us": median.get((case, size, "python_socket")),
        "bytes_staged": median.get((case, size, "staged")),
    }


def first_row(size: int, median: dict[Key, float]) -> dict[str, Any]:
    """Microseconds of a first call, a second and later ones, and the first by a later one, for both layers."""
    row: dict[str, Any] = {"case": "first", "bytes": size, "name": f"first call, {size_text(size)}"}
    for what, ratio in (("rdmarpc", "times_later"), ("torch_rpc", "torch_rpc_times_later")):
        first, second, later = (median[case, size, what] for case in ("first", "second", "later"))
        row |= {f"{what}_us": first, f"{what}_second_us": second, f"{what}_later_us": later, ratio: first / later}
    row["times_faster_than_torch"] = row["torch_rpc_us"] / row["rdmarpc_us"]
    return row | {"bytes_staged": median["first", size, "staged"]}


def rate_row(case: str, number: int, median: dict[Key, float]) -> dict[str, Any]:
    """Calls a second: of one worker with `number` in flight, or of `number` workers together."""
    ours, theirs = median[case, number, "rdmarpc"], median[case, number, "torch_rpc"]
    return {
        "case": case,
        "number": number,
        "name": f"{number} in flight" if case == "calls" else f"{number} workers, all to all",
        "rdmarpc_per_s": ours,
        "torch_rpc_per_s": theirs,
        "times_faster_than_torch": ours / theirs,
    }


STARTS = {
    "import": "import, after that of torch",
    "init": "init_rpc of 2 workers, both being ready",
    "start": "2 workers, from nothing until both have joined",
}


def start_row(case: str, size: int, median: dict[Key, float]) -> dict[str, Any]:
    """Seconds; torch RPC has no import of its own."""
    ours, theirs = median[case, size, "rdmarpc"] / 1e6, median.get((case, size, "torch_rpc"))
    return {
        "case": case,
        "workers": size,
        "name": STARTS[case],
        "rdmarpc_s": ours,
        "torch_rpc_s": theirs and theirs / 1e6,
        "times_faster_than_torch": theirs and theirs / 1e6 / ours,
    }


COMPUTATIONS = {
    "tiny": "a tiny call, forward and backward",
    "tiny_backward": "its backward alone",
    "engine": "100 operations, no call",
    "engine_backward": "their backward alone",
    "linear": "two linear layers, 10 iterations",
    "linear_backward": "their backward alone",
}


def autograd_row(case: str, median: dict[Key, float]) -> dict[str, Any]:
    """Microseconds over two workers, alone (``latency/autograd``), and above that. What torch RPC's threads, which never rest,
    cost the computation alone is in its own time alone."""
    ours, theirs = median[case, 0, "rdmarpc"], median[case, 0, "torch_rpc"]
    above, theirs_above = median[case, 0, "rdmarpc_above"], median[case, 0, "torch_rpc_above"]
    return {
        "case": case,
        "name": COMPUTATIONS[case],
        "local_us": median[case, 0, "rdmarpc_local"],
        "rdmarpc_us": ours,
        "rdmarpc_above_us": above,
        "torch_rpc_us": theirs,
        "torch_rpc_local_us": median[case, 0, "torch_rpc_local"],
        "torch_rpc_above_us": theirs_above,
        "times_faster_than_torch": theirs / ours,
        "of_torch_rpc_above": above / theirs_above if theirs_above > 0 else float("inf"),  # or nothing was measured
    }


def idle_row(median: dict[Key, float]) -> dict[str, Any]:
    """Percent of one core."""
    ours, theirs = median["idle", 0, "rdmarpc"], median["idle", 0, "torch_rpc"]
    return {"case": "idle", "name": "an idle worker", "rdmarpc_percent": ours, "torch_rpc_percent": theirs}


def size_text(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"
