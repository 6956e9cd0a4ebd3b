"""The examples as a user starts them: each must reach what it promises, and says so by its exit status."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import programs
import pytest


def run(*command: str, fresh: bool = False) -> str:
    done = programs.run(*command, fresh=fresh)
    assert done.returncode == 0, done.stdout
    return done.stdout


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found[1])


def test_parameter_server():
    said = run("-m", "examples.parameter_server", "--epochs", "40")
    assert number(r"accuracy on images never seen: ([\d.]+)%", said) >= 95
    # The order in which gradients come is left to chance, and with it the accuracy: 20 epochs may end near 95 %.
    # Two of three trainers make a step: fewer steps than gradients (3 trainers, 15 batches, 40 epochs), more than a third.
    assert 600 <= number(r"(\d+) steps", said) < 1800


def test_served():
    said = run("-m", "examples.served")
    assert number(r"accuracy on images never seen: ([\d.]+)%", said) >= 90
    assert "8 edges, 76,880 bytes cross in a training step" in said


@pytest.mark.skipif(importlib.util.find_spec("gymnasium") is None, reason="gymnasium is not installed (extra: examples)")
def test_reinforcement_learning():
    said = run("examples/reinforcement_learning.py", "--goal", "120", "--observers", "2")
    before, after = number(r"from (\d+) moves", said), number(r"moves to (\d+) of 200", said)
    assert after >= 120 and after > 2 * before


def test_pipeline():
    said = run("examples/pipeline.py")
    assert number(r"accuracy on images never seen: ([\d.]+)%", said) >= 95
    assert "6 micro-batches: 6 by the first stage, 6 by the second" in said
    assert "the pipeline computes what the network does: True" in said


def test_an_example_that_fails_says_so():
    done = programs.run("examples/parameter_server.py", "--trainers", "1", "--epochs", "1")
    assert done.returncode and number(r"accuracy on images never seen: ([\d.]+)%", done.stdout) < 95


@pytest.mark.parametrize("name", ["accelerate", "lightning", "transformers"])
def test_trainers(name):
    if importlib.util.find_spec(name) is None or importlib.util.find_spec("accelerate") is None:
        pytest.skip(f"{name} is not installed (extra: trainers)")
    said = run("-m", "examples.trainers", name)
    assert re.search(rf"{name}: loss .*, as in one process: True", said), said


def test_checkpoint():
    said = run("-m", "examples.checkpoint")
    assert "step 20: worker1 is lost, worker3 goes on from step 16" in said
    assert "all 30 losses are the same bits: True" in said


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (extra: ray)")
def test_ray_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # ray writes there
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    said = run("examples/ray_workers.py", fresh=True)
    assert "every actor called another: True; lost: worker1" in said
    assert "all 20 losses are those of one process: True" in said


def same_as_one_process(said: str) -> None:
    assert number(r"no step's losses are further apart than ([\d.e+-]+)", said) < 1e-5


def test_language_model():
    said = run("examples/language_model.py", "--steps", "40", "--blocks", "1")
    same_as_one_process(said)
    reached, alone = number(r"([\d.]+) by two workers", said), number(r"([\d.]+) by one", said)
    assert abs(reached - alone) < 1e-4 and reached < 0.9 * number(r"([\d.]+) by frequency", said)


def test_recommendation():
    said = run("examples/recommendation.py", "--steps", "160")
    same_as_one_process(said)
    reached, alone = number(r"([\d.]+) by 2 trainers", said), number(r"([\d.]+) by one process", said)
    before, best = number(r"([\d.]+) before", said), number(r"([\d.]+) by who knows everything", said)
    assert abs(reached - alone) < 1e-4 and reached - best < 0.6 * (before - best)
