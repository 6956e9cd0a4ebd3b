"""Edges for very many steps, with delays, slow consumers, and workers that are stopped or killed: see ``stress``."""

from __future__ import annotations

import pytest
from stress import mixed, run, straight


def assert_all_came(outcomes, at_least):
    assert all(kind == "done" for kind, _ in outcomes), "\n".join(str(text) for kind, text in outcomes if kind != "done")
    sent, received, compared = (sum(counts) for counts in zip(*(counts for _, counts in outcomes)))
    print(f"{sent} messages, {compared} comparisons")
    assert sent == received and received >= at_least and compared > received


@pytest.mark.timeout(200)
def test_nothing_is_torn_stale_or_lost_in_a_hundred_thousand_steps():
    """Or in as many as there is time for, on a machine that has other things to do."""
    assert_all_came(run(straight(100_000), seconds=20.0, timeout=150.0), 1_000)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind, steps", [("shm", 2_000), ("tcp", 500)])
def test_three_workers_that_are_stopped_now_and_then(kind, steps):
    """Two are stopped in the middle, for less than makes them lost. How many steps there is time for is up to the machine."""
    outcomes = run(mixed(steps), kind=kind, stops=[(0.3, 1, 0.7), (0.2, 2, 0.3)], seconds=8.0, timeout=150.0)
    assert_all_came(outcomes, 100)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_who_is_killed_ends_everybody(kind):
    outcomes = run(mixed(10**8), kind=kind, kill=(0.7, 1), timeout=30.0)
    assert [name for name, _ in outcomes] == ["PeerLost", "killed", "PeerLost"], outcomes
