"""Message sizes as a user measures them; no figure is judged here."""

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

from rdmarpc.experiments import sizes
from rdmarpc.experiments.harness import turns
from rdmarpc.experiments.harness.findings import Findings
from rdmarpc.experiments.latency.sizes_picture import draw_sizes
from rdmarpc.experiments.latency.sizes_producer import Steps

GRPC = importlib.util.find_spec("grpc") is not None
WAYS = [way for way in sizes.WAYS if GRPC or way != "grpc"]


def test_five_ways(tmp_path: Path) -> None:
    overrides = ["sizes=[4,4096]", "rounds=1", "devices=[shm]", f"ways=[{','.join(WAYS)}]", f"hydra.run.dir={tmp_path}"]
    done = programs.run("-m", "experiments.sizes", *overrides)
    assert done.returncode == 0, done.stdout
    assert not list(tmp_path.glob(".meeting-*"))
    assert (tmp_path / "sizes.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "sizes.json").read_text())
    assert {(each["what"], each["size"]) for each in found["samples"]} == {
        (f"{w} shm", size) for w in WAYS for size in (4, 4096)
    }
    assert all(each["n"] == 1 and each["median"] > 0 for each in found["samples"])
    assert len(found["targets"]) == 2 * (1 + GRPC) and not found["left_out"]
    assert [row[0] for row in found["tables"][0]["rows"]] == ["4", "4,096"]


def job(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(sizes.CONF, version_base="1.3"):
        return sizes.checked(compose("sizes", list(overrides)))


def test_what_needs_too_much_memory_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "available_gib", lambda: 4.0)
    findings = Findings("", "us")
    given = job("sizes=[4,1073741824]", "devices=[shm]", "rounds=1", "rounds_large=2")
    parts = [(part["sizes"], way) for part, way, _ in sizes.parts(given, findings)]
    small, large = [way for each, way in parts if each == [4]], [way for each, way in parts if each != [4]]
    assert small == list(sizes.WAYS) and large == ["sender_copy", "zero_copy"] * 2
    assert [each["what"].partition(" over")[0] for each in findings.left] == [
        f"1,073,741,824 bytes by {title}" for title in ("gRPC", "torch RPC", "a call of rdmarpc")
    ]


def test_rdma_is_left_out_where_there_is_none(tmp_path: Path) -> None:
    if any(Path("/sys/class/infiniband").glob("*")):
        pytest.skip("there is RDMA hardware")
    findings = Findings("", "us")
    taken = turns.Turns(findings, tmp_path)
    sizes.run(job("devices=[verbs]", "ways=[torch_rpc,zero_copy]", "sizes=[4]"), taken)
    assert not taken.failed and not findings.measured()
    assert [each["why"] for each in findings.left] == ["there is no RDMA device"] * 2


def test_a_run_that_measures_nothing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``devices=[verbs]`` where there is no RDMA hardware; no picture of nothing is drawn."""
    monkeypatch.setattr(turns, "missing", lambda library, device: "there is no RDMA device")
    monkeypatch.setattr(turns.apps, "run_folder", lambda: tmp_path)
    says = r"^error: nothing was measured: write, zero-copy over shm, .*: there is no RDMA device$"
    with pytest.raises(SystemExit, match=says):
        turns.run_app("sizes", Findings("", "us"), job("devices=[shm]", "ways=[zero_copy]"), sizes.run, sizes.judge)
    assert not list(tmp_path.iterdir())


def test_the_picture_has_what_was_measured(tmp_path: Path) -> None:
    findings, given = Findings("", "us"), job("devices=[verbs,shm]", "ways=[zero_copy]", "sizes=[4]")
    findings.add("step", 4, "zero_copy shm", 2.0)
    draw_sizes(findings, given, sizes.WAYS, tmp_path / "sizes.png")
    assert (tmp_path / "sizes.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_answer_is_an_error() -> None:
    x = torch.zeros(4)
    step = Steps(x, lambda: 2.0)
    step()
    assert x[-1] == 2.0
    with pytest.raises(RuntimeError, match=r"step 2 with 16 bytes: 2\.0 arrived, not 3\.0"):
        step()


@pytest.mark.parametrize(
    ("override", "says"), [("devices=[]", "devices=[]"), ("ways=[post]", "ways"), ("sizes=[3]", "sizes=[3]")]
)
def test_bad_config_is_a_clear_error(override: str, says: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(says)):
        job(override)
