"""The benchmark of collectives as a user starts it; no figure is judged here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from rdmarpc.experiments import collectives

ROOT = Path(__file__).parents[2]


def test_it_measures_beside_gloo(tmp_path: Path) -> None:
    overrides = ["quick=true", "cases=[barrier,all_reduce]", "sizes.all_reduce=[4]", f"hydra.run.dir={tmp_path}"]
    command = [sys.executable, "-m", "experiments.collectives", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "collectives.json").read_text())
    assert [(row["ranks"], row["case"], row["bytes"]) for row in found["rows"]] == [(2, "barrier", 0), (2, "all_reduce", 4)]
    for row in found["rows"]:
        assert all(row[what]["median_us"] > 0 and row[what]["calls"] >= 6 for what in ("rdmarpc", "gloo"))
    assert found["rows"][1]["floor"]["median_us"] > 0
    met = sum(sum(row["met"].values()) for row in found["rows"])
    assert f"targets met: {met} of 4" in done.stdout


@pytest.mark.parametrize(
    ("override", "says"),
    [("cases=[sum]", "sum"), ("ranks=[1]", "ranks=[1]"), ("ranks=2", "a list of numbers"), ("rounds=0", "rounds=0")],
)
def test_it_refuses_what_makes_no_sense(override: str, says: str) -> None:
    with initialize_config_dir(collectives.CONF, version_base="1.3"), pytest.raises(SystemExit, match=re.escape(says)):
        collectives.checked(compose("collectives", [override]))
