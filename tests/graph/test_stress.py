"""Edges for 100,000 steps, with delays, slow consumers, and workers that are stopped or killed: see ``stress``."""

from __future__ import annotations

import pytest
from stress import Line, messages, mixed, run


def assert_all_compared(lines, outcomes):
    assert all(kind == "done" for kind, _ in outcomes), "\n".join(str(text) for kind, text in outcomes if kind != "done")
    assert sum(compared for _, compared in outcomes) >= messages(lines)


@pytest.mark.parametrize("kind, steps", [("shm", 16_000), ("tcp", 1_500)])
def test_nothing_is_torn_stale_or_lost(kind, steps):
    """Worker 1 is stopped twice in the middle, for less than makes it lost."""
    lines = mixed(steps)
    assert kind != "shm" or messages(lines) > 100_000
    outcomes = run(lines, kind=kind, stops=[(0.5, 1, 0.7), (0.3, 2, 0.3)])
    assert_all_compared(lines, outcomes)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_who_is_killed_ends_everybody(kind):
    outcomes = run([*mixed(10**8), Line(2, 1, 1, 8, 10**8)], kind=kind, kill=(1.0, 1), timeout=20.0)
    assert [name for name, _ in outcomes] == ["PeerLost", "killed", "PeerLost"], outcomes
