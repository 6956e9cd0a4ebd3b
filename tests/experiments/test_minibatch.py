"""The mini-batch benchmark as a user starts it; no figure is judged here."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from rdmarpc.experiments import minibatch

ROOT = Path(__file__).parents[2]


def test_it_measures_every_way(tmp_path: Path) -> None:
    grpc = importlib.util.find_spec("grpc") is not None
    overrides = ["models=[GRU]", "rounds=1", "batch.GRU=1", f"grpc={str(grpc).lower()}", f"hydra.run.dir={tmp_path}"]
    command = [sys.executable, "-m", "experiments.minibatch", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
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
    ("override", "says"), [("models=[LeNet]", "LeNet"), ("models=[]", "must be some of"), ("rounds=0", "rounds=0")]
)
def test_it_refuses_what_makes_no_sense(override: str, says: str) -> None:
    with initialize_config_dir(minibatch.CONF, version_base="1.3"), pytest.raises(SystemExit, match=re.escape(says)):
        minibatch.checked(compose("minibatch", [override]))
