"""Actors and their global network; no figure is judged here."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from hydra import compose, initialize_config_dir

pytest.importorskip("gymnasium")

from rdmarpc.experiments import a3c
from rdmarpc.experiments.training.learner import Learner, gradients

LIBRARIES = ["rdmarpc", "torch_rpc", *(["grpc"] if importlib.util.find_spec("grpc") else [])]


def job(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(a3c.CONF, version_base="1.3"):
        return a3c.checked(compose("a3c", list(overrides)))


def test_actors_learn_together(tmp_path: Path) -> None:
    overrides = ["quick=true", "actors=2", "goal=1", "most_games=40", f"libraries=[{','.join(LIBRARIES)}]"]
    done = programs.run("-m", "experiments.a3c", *overrides, f"hydra.run.dir={tmp_path}")
    assert done.returncode == 0, done.stdout
    assert not list(tmp_path.glob(".meeting-*"))
    found = json.loads((tmp_path / "a3c.json").read_text())
    measured = {(each["case"], each["what"]): each["median"] for each in found["samples"]}
    assert set(measured) == {(c, lib) for c in ("fetch", "update", "games", "moves", "reached") for lib in LIBRARIES}
    assert all(20 <= measured["games", lib] <= 22 for lib in LIBRARIES), "the goal needs twenty games"
    assert [row[0] for row in found["tables"][0]["rows"]][-1] == "published: gRPC, 7 actors"


def test_a_gradient_is_applied_as_it_is() -> None:
    learner = Learner(job("quick=true") | {"seed": 0})
    before = learner.fetch()
    states = torch.randn(5, 4)
    given = gradients(learner.policy, states, torch.tensor([0, 1, 0, 1, 1]))
    assert given.shape == before.shape and 0 < given.norm() <= 1.0001
    games, mean, stop = learner.push(torch.cat([given, torch.tensor([5.0])])).tolist()
    assert (games, mean, stop) == (1, 5, 0) and not torch.equal(learner.fetch(), before)
    stops = [learner.push(torch.cat([given, torch.tensor([150.0])])).tolist()[2] for _ in range(20)]
    assert stops == [0] * 18 + [1] * 2, "the mean of twenty games"


@pytest.mark.parametrize(
    ("override", "says"), [("seeds=[]", "seeds=[]"), ("actors=0", "actors=0"), ("libraries=[]", "libraries")]
)
def test_bad_config_is_a_clear_error(override: str, says: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(says)):
        job(override)
