"""How time and memory grow; no figure is judged here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import programs
import pytest
from hydra import compose, initialize_config_dir

from rdmarpc.experiments import growth
from rdmarpc.experiments.harness.findings import Findings

SIZES = {"edges": [1, 3], "workers": [2, 3], "references": [5, 20], "tensors": [1, 10]}


def job(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(growth.CONF, version_base="1.3"):
        return growth.checked(compose("growth", list(overrides)))


def test_every_case_runs(tmp_path: Path) -> None:
    sizes = [f"{case}={json.dumps(each, separators=(',', ':'))}" for case, each in SIZES.items()]
    done = programs.run("-m", "experiments.growth", *sizes, "rounds=2", f"hydra.run.dir={tmp_path}")
    assert done.returncode == 0, done.stdout
    assert not list(tmp_path.glob(".meeting-*"))
    found = json.loads((tmp_path / "growth.json").read_text())
    counts = {(each["case"], each["size"], each["what"]): each["n"] for each in found["samples"]}
    rounds = {"first": 1, "first, processor": 1, "later": 2, "MiB first": 1, "MiB later": 1}
    assert counts == {(case, size, what): n for case, each in SIZES.items() for size in each for what, n in rounds.items()}
    assert [len(table["rows"]) for table in found["tables"]] == [2, 2, 2, 2]
    assert len(found["targets"]) == 12 and all(target["measured"] is not None for target in found["targets"])


def test_the_exponent_is_that_of_the_large_sizes() -> None:
    sizes = [1, 10, 100, 300, 1000]
    assert growth.exponent(sizes, [5.0 + 2 * size for size in sizes]) == pytest.approx(1.0, abs=0.02)
    assert growth.exponent(sizes, [100.0 + size**2 for size in sizes]) == pytest.approx(2.0, abs=0.02)
    assert growth.exponent([7], [1.0]) is None


def test_what_grows_faster_than_linearly_misses_its_target() -> None:
    config = job("cases=[tensors]", "tensors=[10,100]")
    findings = Findings("Growth", "ms")
    for size in (10, 100):
        for what, value in (("first", size), ("later", size**1.5), ("MiB first", 1), ("MiB later", size)):
            findings.add("tensors", size, what, value)
    growth.judge(findings, config)
    assert [target["met"] for target in findings.targets] == [True, False, False]


def test_a_quick_run_judges_no_growth() -> None:
    config = job("cases=[tensors]", "quick=true")
    findings = Findings("Growth", "ms")
    for size in config["tensors"]:
        for what in ("first", "later", "MiB first", "MiB later"):
            findings.add("tensors", size, what, 1.0)
    growth.judge(findings, config)
    assert [target["met"] for target in findings.targets] == [None, None, True]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("cases=[cats]", "cases=['cats']"),
        ("workers=[1]", "workers=[1]"),
        ("tensors=[0]", "tensors=[0]"),
        ("rounds=0", "rounds=0"),
    ],
)
def test_bad_config_is_a_clear_error(override: str, says: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(says)):
        job(override)
