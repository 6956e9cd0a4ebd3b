"""The experiment of schedules as a user starts it; no figure is judged here."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from group import Meeting, results, run_group
from hydra import compose, initialize_config_dir

from rdmarpc.experiments import schedules
from rdmarpc.experiments.harness.processes import Group, OnEvent
from rdmarpc.experiments.pipelines.critical import PARTS, Span, critical_way, parts
from rdmarpc.experiments.pipelines.layers import Case


class Told:
    """The launcher, which gives a worker every turn at once."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def tell(self, event: tuple[Any, ...]) -> None:
        self.events.append(event)

    def wait_for_turn(self) -> None:
        pass


def worked(main: Callable[..., None], job: dict[str, Any], meeting: Meeting) -> list[tuple[Any, ...]]:
    told = Told()
    main(meeting.rank, job, told)
    return told.events


def by_forks(groups: list[Group], job: dict[str, Any], on_event: OnEvent, timeout_s: float) -> None:
    """As ``run_job``, one group after the other."""
    for group in groups:
        for events in results(run_group(partial(worked, group.main, job), group.count, dynamic=True)):
            for event in events:
                on_event(group.name, event)


def test_it_measures_every_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["workers=[2]", "rounds=1", "watched=1", "cases.wide=null", "cases.tiny.steps=1", "cases.asleep.steps=1"]
    overrides += ["cases.asleep.forward_ms=1", "cases.asleep.backward_ms=4"]
    monkeypatch.setattr(sys, "argv", ["schedules", *overrides, f"hydra.run.dir={tmp_path}", "hydra/job_logging=none"])
    monkeypatch.setattr(schedules, "run_job", by_forks)
    schedules.main()
    assert not list(tmp_path.glob(".meeting-*"))
    found = json.loads((tmp_path / "schedules.json").read_text())
    rows, ours = found["rows"], ("1f1b", "interleaved", "zero_bubble", "1f1b (first)")
    both = [("rdmarpc", name) for name in ours]
    both += [("torch", name) for name in ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")]
    assert [(r["case"], r["library"], r["schedule"]) for r in rows] == [
        (case, *one) for case in ("tiny", "asleep") for one in both
    ]
    for row in rows:
        assert row["chunks"] == 4
        asleep: dict[str, float | None] = {
            "Interleaved1F1B": 45.0,
            "interleaved": 45.0,
            "zero_bubble": 42.0,
            "InterleavedZeroBubble": 41.0,
        }
        asleep["ZBVZeroBubble"] = None
        assert row["theory_ms"] == (asleep.get(row["schedule"], 50.0) if row["case"] == "asleep" else None)
        assert row["ms"] > (row["theory_ms"] or 0.0), row  # nobody is faster than sleep
        assert row["p10_ms"] <= row["ms"] <= row["p90_ms"] and row["processor_ms"] > 0
        assert (row["order_ms"] is None) == (row["library"] == "torch" or row["case"] == "tiny")
    assert [(w["case"], w["schedule"]) for w in found["where"]] == [(case, one) for case in ("tiny", "asleep") for one in ours]
    for way in found["where"]:
        assert sum(way[part] for part in PARTS) == pytest.approx(way["batch"])
        assert way["layers"] == 0 if way["case"] == "tiny" else way["layers"] > 0, way
    assert {"tiny", "asleep", "GPipe", "45.00"} <= set(capsys.readouterr().out.split())


def test_the_theory_is_that_of_the_papers() -> None:
    """Bubbles of (p - 1) / m of the computation, and of that divided by the stages of a worker where they are interleaved."""
    case = Case(16, 4, 1, forward_ms=1, backward_ms=2)
    for workers, chunks in ((2, 4), (4, 8)):
        busy = 2 * chunks * 3
        assert case.theory_ms(workers, chunks, 1) == busy * (1 + (workers - 1) / chunks)
        assert case.theory_ms(workers, chunks, 2) == busy * (1 + (workers - 1) / chunks / 2)
        assert case.theory_ms(workers, chunks, 1, True) == busy + (workers - 1) * 2 * (1 + 1 - 1)
    assert Case(16, 4, 1).theory_ms(2, 4, 1) is None


def test_the_agenda_takes_the_time_of_the_papers_where_the_caller_has_the_last_stage() -> None:
    case = Case(16, 4, 1, forward_ms=1, backward_ms=2)
    for workers in (2, 3, 4):
        count = 2 * workers
        for schedule, rounds in (("1f1b", 1), ("interleaved", 2)):
            assert case.order_ms(workers, count, schedule, "last") == case.theory_ms(workers, count, rounds)
        # The loss waits for the first stage's tasks. Backwards in halves are taken as they come, not by a table.
        assert case.order_ms(2, 4, "1f1b", "first") == 32
        assert case.order_ms(2, 4, "interleaved", "first") == 34
        split = case.theory_ms(workers, count, 1, True)
        assert split is not None and split <= (case.order_ms(workers, count, "zero_bubble", "last") or 0.0) <= split + 2


def test_the_critical_way_adds_up_to_the_batch() -> None:
    """A micro-batch through a stage at worker 1 and one with the loss at worker 0, and another that does not count."""
    spans = [
        Span(1, "forward", 1, 7, 1.0, 2.0, 0.5),
        Span(1, "forward", 1, 8, 2.0, 3.0, 0.5),
        Span(0, "forward", 2, 7, 2.5, 4.0, 1.0),
        Span(0, "backward", 2, 7, 4.25, 6.0, 1.0),  # its gradient was sent before its end
        Span(1, "backward", 1, 7, 5.0, 7.0, 0.25),
        Span(1, "weight gradients", 1, 7, 7.5, 8.0, 0.5),
    ]
    assert [span.way for span in critical_way(spans)] == ["forward", "forward", "backward", "backward", "weight gradients"]
    found = parts(spans, 0.0, 9.0, lambda span: 0.25)
    assert found == {
        "layers": 5 * 0.25,
        "computing": 0.5 + 1.0 + 0.75 + 0.25 + 0.5,
        "off_core": 0.25 + 0.25 - 0.25 + 1.5 - 0.25,
        "between": 0.25 + 0.5,
        "crossing": 0.5,
        "ends": 2.0,
    }
    assert sum(found.values()) == 9.0


@pytest.mark.parametrize(("override", "says"), [("workers=[1]", "workers=[1]"), ("rounds=0", "rounds=0")])
def test_it_refuses_what_makes_no_sense(override: str, says: str) -> None:
    with initialize_config_dir(schedules.CONF, version_base="1.3"), pytest.raises(SystemExit, match=re.escape(says)):
        schedules.checked(compose("schedules", [override]))
