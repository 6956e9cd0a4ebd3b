"""The shapes of PyTorch's RPC benchmarks as a user starts them, in small; no figure is judged here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import programs
import pytest
from hydra import compose, initialize_config_dir

from rdmarpc.experiments import dlrm
from rdmarpc.experiments.harness.findings import Findings
from rdmarpc.experiments.harness.processes import Launcher
from rdmarpc.experiments.harness.turns import Turns
from rdmarpc.experiments.latency import observers
from rdmarpc.experiments.latency import shapes_worker as worker
from rdmarpc.experiments.latency.shapes_runs import checked

SMALL = {
    "parameter_server": ["rows=50", "width=8", "layers=2", "batch=4", "bag=3", "steps=2", "cases=['sparse buckets']"],
    "dlrm": ["rows=50", "width=8", "hidden=8", "tables=2", "batches=[4]", "servers=1", "steps=2"],
    "reinforcement": ["observers=[2]", "state=6", "hidden=8", "layers=1", "actions=3", "steps=4", "cases=['in batches']"],
}
FIGURES = {"parameter_server": {"step": 2}, "dlrm": {"step": 2, "lookup": 2}, "reinforcement": {"latency": 8, "actions": 1}}


@pytest.mark.parametrize("name", SMALL)
def test_both_libraries_leave_the_same(name: str, tmp_path: Path) -> None:
    more = ["episodes=1"] if name == "reinforcement" else []
    done = programs.run("-m", f"experiments.{name}", *SMALL[name], *more, "rounds=1", f"hydra.run.dir={tmp_path}")
    assert done.returncode == 0, done.stdout
    assert not list(tmp_path.glob(".meeting-*"))
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / f"{name}.json").read_text())
    [case] = found["config"]["cases"]
    counts = {(each["case"], each["size"], each["what"]): each["n"] for each in found["samples"]}
    libraries = ("rdmarpc", "torch_rpc")
    assert counts == {(f"{case}: {what}", 3, each): n for what, n in FIGURES[name].items() for each in libraries}
    assert not found["left_out"] and [row[0] for row in found["tables"][0]["rows"]] == [case]
    [target] = found["targets"]
    assert target["name"].startswith(f"{case}, 3 processes: ") and target["measured"] > 0


def test_other_results_are_an_error(tmp_path: Path) -> None:
    turns = Turns(Findings("", "ms"), tmp_path)
    turns.compare("a, 2 processes", "rdmarpc", {"losses": b"1", "model": b""})
    turns.compare("b, 2 processes", "rdmarpc", {"losses": b"2", "model": b""})
    assert not turns.failed
    turns.compare("a, 2 processes", "torch RPC", {"losses": b"2", "model": b""})
    assert turns.failed == "results differ: a, 2 processes: losses, of torch RPC and rdmarpc"


def test_bad_config_is_a_clear_error() -> None:
    job = {"cases": ["a"], "libraries": ["rdmarpc", "torch_rpc"], "device": "shm", "rounds": 1, "quick": False}
    for wrong, says in (({"cases": ["b"]}, "must be some of"), ({"rounds": 0}, "rounds=0")):
        with pytest.raises(SystemExit, match=says):
            checked(job | wrong, ("a",))


@pytest.mark.parametrize(("override", "says"), [("batches=[]", "batches=[]"), ("rows=1", "rows=1"), ("servers=0", "servers=0")])
def test_a_recommendation_model_that_makes_no_sense(override: str, says: str) -> None:
    with initialize_config_dir(dlrm.CONF, version_base="1.3"), pytest.raises(SystemExit, match=re.escape(says)):
        dlrm.job_of(compose("dlrm", [override]))


def test_a_program_knows_its_library_before_others_can_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(worker, "join", lambda rpc, *rest: seen.append((observers.rpc is rpc, rpc.__name__)))
    monkeypatch.setattr(observers, "run", lambda rank, job: None)
    monkeypatch.setattr(observers, "rpc", None)
    monkeypatch.setattr(worker, "library", lambda job: SimpleNamespace(__name__="library", shutdown=lambda: None))
    worker.main(1, {"program": "observers", "library": "rdmarpc"}, Launcher(None))  # type: ignore[arg-type]
    assert seen == [(True, "library")]
