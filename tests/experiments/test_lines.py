"""The programs whose lines are counted run over every library, with the results of one process; and the counting."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import programs
import pytest
from hydra import compose, initialize_config_dir

from rdmarpc.experiments import lines
from rdmarpc.experiments.harness import turns
from rdmarpc.experiments.harness.findings import Findings
from rdmarpc.experiments.programs import running
from rdmarpc.experiments.programs.counting import Size, size_of

GRPC = importlib.util.find_spec("grpc") is not None


def test_every_program_gives_the_results_of_one_process(tmp_path: Path) -> None:
    done = programs.run("-m", "experiments.lines", f"hydra.run.dir={tmp_path}")
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "lines.json").read_text())
    apart = {
        (each["case"].partition(":")[0], each["what"]): each["median"] for each in found["samples"] if "apart" in each["case"]
    }
    libraries = [*(["grpc"] if GRPC else []), "torch_rpc", "rdmarpc"]
    assert apart == {(name, library): 0 for name in lines.PROGRAMS for library in libraries}, "the same bits"
    counted = {(each["case"], each["what"]): each["median"] for each in found["samples"] if each["case"].endswith("lines")}
    for name in lines.PROGRAMS:
        ours, torch_rpc, grpc = (counted[f"{name}: lines", library] for library in ("rdmarpc", "torch_rpc", "grpc"))
        assert 10 < ours <= torch_rpc < grpc
    assert bool(found["left_out"]) != GRPC


def test_what_is_counted() -> None:
    source = '''"""A docstring
over two lines."""

import os  # a comment


# another
def f(x):
    """Not counted."""
    text = """one
two"""
    return (
        text
    )
'''
    assert size_of(source) == Size(lines=7, tokens=2 + 6 + 3 + 4)


def test_other_results_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run_job(groups, job, on_event, timeout_s):
        on_event("", ("figures", [("pipeline: apart from one process", 0, running.apart("pipeline", [0.0] * 4))]))

    monkeypatch.setattr(turns, "run_job", run_job)
    with initialize_config_dir(lines.CONF, version_base="1.3"):
        job = lines.checked(compose("lines", ["programs=[pipeline]", "libraries=[rdmarpc]"]))
    taken = turns.Turns(Findings("", ""), tmp_path)
    lines.run(job, taken)
    assert re.match(r"pipeline of rdmarpc is [\d.]+ apart from one process", taken.failed)


@pytest.mark.parametrize("override", ["programs=[chess]", "libraries=[smoke_signals]", "programs=[]"])
def test_bad_config_is_a_clear_error(override: str) -> None:
    with initialize_config_dir(lines.CONF, version_base="1.3"), pytest.raises(SystemExit, match="must be some of"):
        lines.checked(compose("lines", [override]))
