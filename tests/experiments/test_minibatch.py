"""The mini-batch benchmark as a user starts it, and what its servers compute; no figure is judged here."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from hydra import compose, initialize_config_dir

from rdmarpc.experiments import minibatch
from rdmarpc.experiments.exchange import steps, sweep
from rdmarpc.experiments.exchange.shard import Shard, parts
from rdmarpc.experiments.harness import processes
from rdmarpc.experiments.harness.findings import Findings
from rdmarpc.experiments.harness.turns import Turns


def test_it_measures_every_way(tmp_path: Path) -> None:
    grpc = importlib.util.find_spec("grpc") is not None
    overrides = [
        "parts=[communication]",
        "models=[GRU]",
        "rounds=1",
        "batch.GRU=1",
        f"grpc={str(grpc).lower()}",
        f"hydra.run.dir={tmp_path}",
    ]
    done = programs.run("-m", "experiments.minibatch", *overrides)
    assert done.returncode == 0, done.stdout
    assert not list(tmp_path.glob(".meeting-*"))
    assert (tmp_path / "minibatch.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "minibatch.json").read_text())
    [row] = found["rows"]
    assert (row["model"], row["tensors"], round(row["mib"], 2)) == ("GRU", 11, 27.92)
    ways = ["computation", "floor", "traced", "always", "torch_rpc", *(["grpc"] if grpc else [])]
    assert all(row[f"{way}_ms"] > 0 for way in ways)
    # What is copied aside: nothing, or every gradient and every weight.
    assert (row["traced_staged_bytes"], row["always_staged_bytes"]) == (0, 2 * 4 * 7_319_528)
    assert len(found["targets"]) == 2 and "targets: 0 met, 0 missed, 2 open" in done.stdout, "one round has no spread"
    assert {"GRU", "27.92", "11"} <= set(done.stdout.split())


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("models=[LeNet]", "LeNet"),
        ("models=[]", "must be some of"),
        ("rounds=0", "rounds=0"),
        ("workers=[0]", "workers=[0] must be a list of whole numbers from 1 on"),
        ("workers=[1.5]", "workers=[1.5]"),
        ("servers=2", "servers=2 must be a list"),
        ("servers=[2,2]", "each once"),
        ("servers=[11]", "FCN5 has 10 tensors only"),
        ("placements=[best]", "placements=['best']"),
        ("parts=[]", "parts=[]"),
        ("batch.GRU=-1", "batch.GRU=-1"),
        ("torch_rpc=maybe", "torch_rpc=maybe must be true or false"),
    ],
)
def test_it_refuses_what_makes_no_sense(override: str, says: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(says)):
        job(override)


def job(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(minibatch.CONF, version_base="1.3"):
        return minibatch.checked(compose("minibatch", list(overrides)))


def test_two_workers_and_two_servers_come_to_what_one_process_computes(tmp_path: Path) -> None:
    """The program fails where losses or weights differ from one process in a bit, over any of the libraries."""
    grpc = importlib.util.find_spec("grpc") is not None
    overrides = ["parts=[end_to_end]", "quick=true", "batch.GRU=1", f"grpc={str(grpc).lower()}", f"hydra.run.dir={tmp_path}"]
    done = programs.run("-m", "experiments.minibatch", *overrides)
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "minibatch.json").read_text())
    libraries = {"rdmarpc", "torch_rpc", *(["grpc"] if grpc else [])}
    case = "GRU, workers: 2, servers: 2, balanced"
    assert {each["what"] for each in found["records"] if each["case"] == f"{case}: step"} == libraries
    assert all(each["median"] > 0 and each["unit"] == "ms" for each in found["records"])
    assert {each["what"] for each in found["records"] if each["case"] == "GRU, workers: 2: step"} == {"one_process"}
    [table] = found["tables"]
    assert table["note"].startswith("ms: lower is better; times: higher is better.")
    assert [row[:3] for row in table["rows"]] == [["2", "2", "balanced"]] and not found["left_out"]
    assert [target["goal"] for target in found["targets"]] == ["end_to_end"]
    assert (tmp_path / "minibatch_workers.png").read_bytes().startswith(b"\x89PNG")


def test_a_shard_adds_up_in_the_order_of_the_workers() -> None:
    """Whichever comes first: floats whose sum depends on the order."""
    given = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    expected = 0 - steps.LR * ((given[0] + given[1]) + given[2])
    assert not torch.equal(expected, 0 - steps.LR * ((given[2] + given[0]) + given[1])), "the order shows"
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        one = Shard([torch.zeros(1)], len(given), timeout_s=60.0)
        with ThreadPoolExecutor(len(given)) as threads:
            calls = []
            for number, worker in enumerate(order):
                calls.append(threads.submit(one.exchange, worker, [given[worker]]))
                assert number + 1 == len(given) or _until_given(one, number + 1)
            assert all(torch.equal(call.result(timeout=60)[0], expected) for call in calls)


def _until_given(one: Shard, count: int) -> bool:
    """Waits until so many workers' gradients are there."""
    deadline = time.monotonic() + 60
    while len(one.given) < count and time.monotonic() < deadline:
        time.sleep(0.001)
    return len(one.given) == count


def test_a_shard_whose_workers_stay_away_says_how_many_came() -> None:
    with pytest.raises(RuntimeError, match="1 of 2 workers sent gradients"):
        Shard([torch.zeros(1)], 2, timeout_s=0.01).exchange(0, [torch.ones(1)])


@pytest.mark.parametrize("placement", minibatch.PLACEMENTS)
def test_every_tensor_has_one_server(placement: str) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 40), torch.nn.Linear(40, 2))
    placed = parts(net, 2, placement)
    assert sorted(id(each) for mine in placed for each in mine) == sorted(map(id, net.parameters()))
    numbers = [sum(each.numel() for each in mine) for mine in placed]
    assert numbers == ([15 + 200 + 80, 5 + 40 + 2] if placement == "round_robin" else [200, 142])


def test_cases_and_what_has_no_room_is_left_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = job("models=[FCN5,GRU]", "batch.GRU=0", "workers=[1]", "servers=[1,2]")
    shapes = [(case.servers, case.placement) for case in sweep.cases(given) if case.model == "GRU"]
    assert shapes == [(1, "round_robin"), (2, "round_robin"), (2, "balanced")], "one server: one placement"
    monkeypatch.setattr(sweep, "available_gib", lambda: 0.5)
    findings = Findings("", "ms")
    sweep.run(given, Turns(findings, tmp_path))
    left = {each["what"]: each["why"] for each in findings.left}
    assert left["GRU end to end"] == "batch.GRU=0"
    assert left["FCN5, workers: 1, servers: 2, balanced"] == "it may need 2.8 GiB of memory, 0.5 GiB are available"
    assert not findings.measured()


def test_more_processes_than_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "available_gib", lambda: 1.0)
    group = processes.Group("rdmarpc", steps.alone, 60)
    with pytest.raises(
        SystemExit, match=re.escape("60 worker processes need at least 4.8 GiB of memory, 1.0 GiB are available")
    ):
        processes.run_job([group], {}, lambda name, event: None, 1.0)
