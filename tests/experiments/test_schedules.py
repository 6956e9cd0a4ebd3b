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
from rdmarpc.experiments.training.pipeline_layers import Case


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


GRAPHED = "graphed gpipe", "graphed interleaved"


def test_it_measures_every_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["workers=[2]", "rounds=1", "cases.wide=null", "cases.tiny.steps=1", "cases.asleep.steps=1"]
    overrides += ["cases.asleep.forward_ms=1", "cases.asleep.backward_ms=4"]
    monkeypatch.setattr(sys, "argv", ["schedules", *overrides, f"hydra.run.dir={tmp_path}", "hydra/job_logging=none"])
    monkeypatch.setattr(schedules, "run_job", by_forks)
    schedules.main()
    assert not list(tmp_path.glob(".meeting-*"))
    found = json.loads((tmp_path / "schedules.json").read_text())
    rows, ours = found["rows"], ("gpipe", "1f1b", "zero_bubble", "interleaved", "interleaved zero_bubble", *GRAPHED)
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
            "graphed interleaved": 45.0,
            "zero_bubble": 42.0,
            "interleaved zero_bubble": 41.0,
            "InterleavedZeroBubble": 41.0,
        }
        asleep["ZBVZeroBubble"] = None
        assert row["theory_ms"] == (asleep.get(row["schedule"], 50.0) if row["case"] == "asleep" else None)
        assert row["ms"] > (row["theory_ms"] or 0.0), row  # nobody is faster than sleep
        assert row["p10_ms"] <= row["ms"] <= row["p90_ms"] and row["processor_ms"] > 0
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


@pytest.mark.parametrize(("override", "says"), [("workers=[1]", "workers=[1]"), ("rounds=0", "rounds=0")])
def test_it_refuses_what_makes_no_sense(override: str, says: str) -> None:
    with initialize_config_dir(schedules.CONF, version_base="1.3"), pytest.raises(SystemExit, match=re.escape(says)):
        schedules.checked(compose("schedules", [override]))
