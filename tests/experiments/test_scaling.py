"""Emulated workers and the simulation beyond them; no figure is judged here."""

from __future__ import annotations

import importlib.util
import json
import random
import re
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from hydra import compose, initialize_config_dir

from rdmarpc.experiments import scaling
from rdmarpc.experiments.training import scaling_simulated as simulated
from rdmarpc.experiments.training import scaling_worker as worker
from rdmarpc.servers.model import place

LIBRARIES = ["rdmarpc", "torch_rpc", *(["grpc"] if importlib.util.find_spec("grpc") else [])]


def job(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(scaling.CONF, version_base="1.3"):
        return scaling.checked(compose("scaling", list(overrides)))


def test_it_measures_and_simulates(tmp_path: Path) -> None:
    overrides = ["net=GRU", "workers=[1,2]", "steps=2", "rounds=1", "compute_ms=1", f"libraries=[{','.join(LIBRARIES)}]"]
    done = programs.run("-m", "experiments.scaling", *overrides, f"hydra.run.dir={tmp_path}")
    assert done.returncode == 0, done.stdout
    assert not list(tmp_path.glob(".meeting-*"))
    found = json.loads((tmp_path / "scaling.json").read_text())
    cases = {(each["case"], each["size"], each["what"]) for each in found["samples"]}
    of_each = [("step", 1), ("step", 2), ("exchange", 1), ("latency", 1)]
    assert cases == {(case, size, library) for case, size in of_each for library in LIBRARIES}
    measured, beyond = found["tables"]
    assert "computation of 1 ms emulated" in measured["title"] and beyond["title"].startswith("Simulated")
    assert [row[:2] for row in measured["rows"]] == [["1", "1"], ["2", "2"]]
    assert [row[0] for row in beyond["rows"]] == ["16", "64", "256"]
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_shares_are_dealt_out_round_robin() -> None:
    tensors = job("net=VGG16")["tensors"]
    assert len(tensors) == 32 and sum(tensors) == 134_301_514
    assert worker.shares(tensors, 1) == [134_301_514]
    assert max(worker.shares(tensors, 8)) > 0.76 * sum(tensors), "one layer has most of VGG-16"
    assert worker.shares([5, 4, 3], 2) == [8, 4]


def test_balanced_shares_are_those_of_serve() -> None:
    assert worker.shares([1, 2, 3, 4, 5], 2, "balanced") == [8, 7]
    draw = random.Random(19)
    for servers in ([f"server{number}" for number in range(count)] for count in (1, 2, 3, 4)):
        tensors = [draw.randrange(1, 50) for _ in range(30)]
        net = torch.nn.ParameterList([torch.zeros(count) for count in tensors])
        kept = dict.fromkeys(servers, 0)
        for name, server in place(net, servers, "balanced").items():
            kept[server] += tensors[int(name)]
        assert worker.shares(tensors, len(servers), "balanced") == list(kept.values())


def test_the_transformer_takes_a_given_time() -> None:
    """The paper has no time of its computation."""
    given = job("net=Transformer", "compute_ms=20", "servers=4", "placement=balanced")
    assert (given["compute_ms"], len(given["tensors"]), sum(given["tensors"])) == (20, 148, 11_640_320)


def test_each_placement_runs(tmp_path: Path) -> None:
    """Servers with other shares: the same numbers cross."""
    given = ["net=GRU", "workers=[2]", "steps=1", "rounds=1", "compute_ms=1", "libraries=[rdmarpc]", "placement=balanced"]
    done = programs.run("-m", "experiments.scaling", *given, f"hydra.run.dir={tmp_path}")
    assert done.returncode == 0, done.stdout
    [measured] = json.loads((tmp_path / "scaling.json").read_text())["tables"]
    assert measured["title"].endswith("balanced") and measured["rows"][0][:2] == ["2", "2"]


def test_the_simulation_is_its_formula() -> None:
    tensors = [1000] * 8  # 32,000 bytes, even over 8 servers
    rate = simulated.bandwidth(tensors, exchange_ms=65.0, latency_ms=1.0)
    assert rate == 1000.0  # 64,000 bytes there and back in 64 ms
    assert simulated.step_ms(1, tensors, 10.0, 1.0, rate) == 75.0
    assert simulated.step_ms(8, tensors, 10.0, 1.0, rate) == 75.0, "even shares scale"
    assert simulated.step_ms(16, tensors, 10.0, 1.0, rate) == 10 + 1 + 2 * 4 * 16, "servers without a tensor do not help"
    assert simulated.speed_up(8, tensors, 75.0, 0.0, float("inf")) == 8.0


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("net=LeNet", "net=LeNet"),
        ("net=Transformer", "net=Transformer needs compute_ms="),
        ("placement=x", "placement=x"),
        ("workers=[0]", "workers=[0]"),
        ("steps=0", "steps=0"),
    ],
)
def test_bad_config_is_a_clear_error(override: str, says: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(says)):
        job(override)
