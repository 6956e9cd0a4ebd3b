"""The benchmark's samples as rows, each judged against its targets."""

from typing import Any, NamedTuple

from ..harness.findings import Key

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
    """The quantity of a target: the field of a row, which direction is good, and how to write it."""

    field: str
    relation: str
    text: str

    def met(self, value: float, target: float) -> bool:
        return value <= target if self.relation == "≤" else value >= target


MEASURES = {
    "floor": Measure("times_floor", "≤", "{:.2f} × floor"),
    "torch": Measure("times_faster_than_torch", "≥", "{:.1f} × torch RPC"),
    "us": Measure("rdmarpc_us", "≤", "{:.1f} µs"),
    "s": Measure("rdmarpc_s", "≤", "{:.2f} s"),
    "per_s": Measure("rdmarpc_per_s", "≥", "{:,.0f} a second"),
    "later": Measure("times_later", "≤", "{:.2f} × a later call"),
    "staged": Measure("bytes_staged", "≤", "{:.0f} bytes staged"),
    "above": Measure("of_torch_rpc_above", "≤", "{:.2f} of torch RPC's time above"),
    "percent": Measure("rdmarpc_percent", "≤", "{:.2f} % of a core"),
}


def summary(records: list[dict[str, Any]], job: dict[str, Any]) -> dict[str, Any]:
    """{"rows": one for each case and size, "first": one for each size, "calls": one for each number in flight, "start": one for
    each way to take the time, "autograd": one for each computation, "all_to_all", "idle": a row or None, "flag_us": the
    floor's flag there and back or None, "targets": all of them, "records": all samples}; everything but the records are
    medians over the rounds; "spread" of a row has the number of rounds and the percentiles of rdmarpc's, in the unit of the
    records."""
    records = [{**record, "unit": unit(record["case"], record["what"])} for record in records]
    median = {(record["case"], record["size"], record["what"]): record["median"] for record in records}
    ours = {(record["case"], record["size"]): record for record in records if record["what"] == "rdmarpc"}
    targets = job["targets"]

    def sizes(case: str) -> list[int]:
        return sorted(size for name, size, what in median if (name, what) == (case, "rdmarpc"))

    bench: dict[str, Any] = {
        "flag_us": median.get(("flag", 0, "floor")),
        "rows": [time_row(case, size, median, targets.get(case, {}).get(size, {})) for case in CASES for size in sizes(case)],
        "first": [first_row(size, median, targets["first"].get(size, {})) for size in sizes("first")],
        "calls": [rate_row("calls", number, median, targets["calls"][number]) for number in sizes("calls")],
        "start": [start_row(case, size, median, targets.get(case, {})) for case in STARTS for size in sizes(case)],
        "autograd": [autograd_row(case, median, targets.get(case, {})) for case in COMPUTATIONS for _ in sizes(case)],
        "idle": next((idle_row(median, targets["idle"]) for _ in sizes("idle")), None),
        "all_to_all": next(
            (rate_row("all_to_all", number, median, targets["all_to_all"]) for number in sizes("all_to_all")), None
        ),
    }
    for row in every(bench):
        record = ours[row["case"], row.get("bytes", row.get("number", row.get("workers", 0)))]
        row["spread"] = {name: record[name] for name in ("n", "p10", "p90")}
    return bench | {"targets": verdicts(bench), "records": records}


def unit(case: str, what: str) -> str:
    """Of the samples."""
    if what == "staged":
        return "B"
    return {"calls": "calls/s", "all_to_all": "calls/s", "idle": "%"}.get(case, "us")


def every(bench: dict[str, Any]) -> list[dict[str, Any]]:
    """All rows."""
    single = [row for row in (bench["all_to_all"], bench["idle"]) if row]
    return [*bench["rows"], *bench["first"], *bench["calls"], *bench["start"], *bench["autograd"], *single]


def judge(row: dict[str, Any], target: dict[str, float]) -> dict[str, Any]:
    """The row, its targets, and which of them are met."""
    met = {key: MEASURES[key].met(row[MEASURES[key].field], value) for key, value in target.items()}
    return row | {"target": target, "met": met}


def time_row(case: str, size: int, median: dict[Key, float], target: dict[str, float]) -> dict[str, Any]:
    """Microseconds, the multiples, and what stands beside."""
    floor, ours, theirs = (median[case, size, what] for what in ("floor", "rdmarpc", "torch_rpc"))
    row = {
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
        "bytes_staged": median.get((case, size, "staged")),
    }
    return judge(row, target)


def first_row(size: int, median: dict[Key, float], target: dict[str, float]) -> dict[str, Any]:
    """Microseconds of a first call, a second and later ones, and the first by a later one, for both layers."""
    row: dict[str, Any] = {"case": "first", "bytes": size, "name": f"first call, {size_text(size)}"}
    for what, ratio in (("rdmarpc", "times_later"), ("torch_rpc", "torch_rpc_times_later")):
        first, second, later = (median[case, size, what] for case in ("first", "second", "later"))
        row |= {f"{what}_us": first, f"{what}_second_us": second, f"{what}_later_us": later, ratio: first / later}
    row["times_faster_than_torch"] = row["torch_rpc_us"] / row["rdmarpc_us"]
    return judge(row | {"bytes_staged": median["first", size, "staged"]}, target)


def rate_row(case: str, number: int, median: dict[Key, float], target: dict[str, float]) -> dict[str, Any]:
    """Calls a second: of one worker with `number` in flight, or of `number` workers together."""
    ours, theirs = median[case, number, "rdmarpc"], median[case, number, "torch_rpc"]
    row = {
        "case": case,
        "number": number,
        "name": f"{number} in flight" if case == "calls" else f"{number} workers, all to all",
        "rdmarpc_per_s": ours,
        "torch_rpc_per_s": theirs,
        "times_faster_than_torch": ours / theirs,
    }
    return judge(row, target)


STARTS = {
    "import": "import, after that of torch",
    "init": "init_rpc of 2 workers, both being ready",
    "start": "2 workers, from nothing until both have joined",
}


def start_row(case: str, size: int, median: dict[Key, float], target: dict[str, float]) -> dict[str, Any]:
    """Seconds; torch RPC has no import of its own."""
    ours, theirs = median[case, size, "rdmarpc"] / 1e6, median.get((case, size, "torch_rpc"))
    row = {
        "case": case,
        "workers": size,
        "name": STARTS[case],
        "rdmarpc_s": ours,
        "torch_rpc_s": theirs and theirs / 1e6,
        "times_faster_than_torch": theirs and theirs / 1e6 / ours,
    }
    return judge(row, target)


COMPUTATIONS = {
    "tiny": "a tiny call, forward and backward",
    "tiny_backward": "its backward alone",
    "engine": "100 operations, no call",
    "engine_backward": "their backward alone",
    "linear": "two linear layers, 10 iterations",
    "linear_backward": "their backward alone",
}


def autograd_row(case: str, median: dict[Key, float], target: dict[str, float]) -> dict[str, Any]:
    """Microseconds over two workers, alone (``latency/autograd``), and above that. What torch RPC's threads, which never rest,
    cost the computation alone is in its own time alone."""
    ours, theirs = median[case, 0, "rdmarpc"], median[case, 0, "torch_rpc"]
    above, theirs_above = median[case, 0, "rdmarpc_above"], median[case, 0, "torch_rpc_above"]
    row = {
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
    return judge(row, target)


def idle_row(median: dict[Key, float], target: dict[str, float]) -> dict[str, Any]:
    """Percent of one core."""
    ours, theirs = median["idle", 0, "rdmarpc"], median["idle", 0, "torch_rpc"]
    return judge({"case": "idle", "name": "an idle worker", "rdmarpc_percent": ours, "torch_rpc_percent": theirs}, target)


def verdicts(bench: dict[str, Any]) -> list[dict[str, Any]]:
    """Every target with what was measured: {"name", "measured", "asked" (texts), "value", "target", "met"}."""
    return [
        {
            "name": row["name"],
            "unit": MEASURES[key].text.partition("} ")[2],
            "measured": MEASURES[key].text.format(row[MEASURES[key].field]),
            "asked": f"{MEASURES[key].relation} {target:,g}",
            "value": row[MEASURES[key].field],
            "target": target,
            "met": row["met"][key],
        }
        for row in every(bench)
        for key, target in row["target"].items()
    ]


def size_text(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"
