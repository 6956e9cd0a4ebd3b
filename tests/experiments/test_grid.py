"""The grid as a user starts it, and its peers; no figure is judged here."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import programs
import pytest
import torch
from hydra import compose, initialize_config_dir

from rdmarpc.experiments import grid
from rdmarpc.experiments.harness.findings import Findings
from rdmarpc.experiments.harness.libraries import message, tensor
from rdmarpc.experiments.latency import grid_client as client
from rdmarpc.experiments.latency import grid_tables as tables

GRPC = importlib.util.find_spec("grpc") is not None
LIBRARIES = ["rdmarpc", "torch_rpc", *(["grpc"] if GRPC else [])]


def test_every_library_in_every_cell(tmp_path: Path) -> None:
    names = ",".join(LIBRARIES)
    overrides = ["sizes=[400]", "rounds=1", "batches=2", "calls=3", "threads=16", "devices=[shm]", f"libraries=[{names}]"]
    done = programs.run("-m", "experiments.grid", *overrides, f"hydra.run.dir={tmp_path}")
    assert done.returncode == 0, done.stdout
    assert not list(tmp_path.glob(".meeting-*"))
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "grid.json").read_text())
    cells = {(each["case"], each["what"]): each["n"] for each in found["samples"]}
    functions = ["identity", "heavy", "identity_script", "heavy_script"]
    assert cells == {
        **{
            (f"{name} {what}", f"{library} shm"): 2
            for name in functions
            for what in ("total", "delay")
            for library in LIBRARIES
        },
        **{(f"{name} total", "local"): 1 for name in functions},
    }
    assert {"n", "median", "p10", "p90"} <= set(found["samples"][0])
    assert [row[0] for row in found["tables"][0]["rows"]][3] == "400 B, 200 operations, TorchScript, 3 at once"
    assert not found["left_out"] and len(found["targets"]) == 1


def job(*overrides: str) -> dict:
    with initialize_config_dir(grid.CONF, version_base="1.3"):
        return grid.checked(compose("grid", list(overrides)))


def test_targets_and_published_figures_stand_beside_ours() -> None:
    findings, large = Findings("", "ms"), 400_000_000
    for what, ms in (("rdmarpc shm", 10.0), ("torch_rpc shm", 250.0), ("grpc shm", 900.0)):
        for _ in range(2):  # one sample alone has no spread
            findings.add("identity delay", large, what, ms)
            findings.add("identity total", large, what, ms)
    tables.judge(findings, job("devices=[shm]"))
    [row] = findings.tables[0]["rows"]
    assert row == ["400 MB, identity, 2 at once", "10.00", "250.00", "900.00", "25×", "90×", "1,249.00", "22,203.00"]
    assert [(each["measured"], each["met"]) for each in findings.targets] == [(25.0, True), (90.0, False)]


def test_sizes_without_memory_are_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "available_gib", lambda: 3.0)
    findings = Findings("", "ms")
    parts = [part["sizes"] for part, _, _ in grid.parts(job("rounds=2"), findings)]
    assert parts == [[40_000, 4_000_000]] * 2
    [left] = findings.left
    assert left["what"] == "400 MB" and "3.0 GiB are available" in left["why"]


def test_other_bytes_are_seen() -> None:
    class Wrong:
        def start(self, name, x, done=None, server=0):
            return x + 1

        def finish(self, call):
            return call

    with pytest.raises(RuntimeError, match="other contents"):
        client.check(Wrong(), "identity", client.contents(400), 1)
    x = client.contents(40_000)
    assert x.nbytes == 40_000 and len(x.unique()) == 10_000
    assert torch.equal(tensor(bytearray(message(x))), x.view(-1))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("devices=[pigeon]", "devices=['pigeon'] must be some of shm, tcp, verbs"),
        ("libraries=[]", "libraries=[]"),
        ("sizes=[2]", "sizes=[2]"),
        ("rounds=0", "rounds=0"),
        ("threads=3", "need as many threads"),
    ],
)
def test_bad_config_is_a_clear_error(override: str, says: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(says)):
        job(override)
