"""What one run of an experiment says beside an earlier one."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rdmarpc.experiments import bench
from rdmarpc.experiments.harness import against, compare
from rdmarpc.experiments.harness.findings import Findings


def run(commit: str, **rounds: list[float]) -> dict[str, Any]:
    records = [{"case": case, "size": 4, "what": "rdmarpc", "unit": "us", "samples": values} for case, values in rounds.items()]
    floor = [{"case": "slower", "size": 4, "what": "floor", "unit": "us", "samples": [2.0, 2.0, 2.0]}]
    config = {"rounds": 3, "cells": {4: 1}, "compare": commit}
    return {"records": records + floor, "commit": commit, "machine": {"cores": 2}, "versions": {}, "config": config}


def test_only_what_lies_outside_of_both_spreads_has_changed(capsys: pytest.CaptureFixture[str]) -> None:
    before = run("a", same=[10.0, 11.0, 12.0], slower=[10.0, 11.0, 12.0], faster=[10.0, 11.0, 12.0], gone=[1.0, 1.0, 1.0])
    after = run("b", same=[11.0, 11.5, 14.0], slower=[15.0, 16.5, 17.0], faster=[4.0, 5.5, 6.0], once=[1.0, 1.0, 1.0])
    after["records"][-1]["samples"] = [3.0, 3.0, 3.0]
    found = compare.compare(before, after)
    changed = {(row["case"], row["what"]): (row["times"], row["floor"]) for row in found["changed"]}
    assert changed == {("slower", "rdmarpc"): (1.5, 1.5), ("faster", "rdmarpc"): (0.5, None), ("slower", "floor"): (1.5, None)}
    assert found["missing"] == [["gone", 4, "rdmarpc"]] and found["new"] == [["once", 4, "rdmarpc"]]
    assert found["compared"] == 4 and found["surroundings"] == {"commit": ["a", "b"]}
    json.dumps(found)
    compare.print_changes(found, "OLD.json")
    shown = capsys.readouterr().out
    assert "another commit: a -> b" in shown and "3 of 4 figures changed beyond the spread" in shown
    assert "16.5 (15.3 to" in shown


def test_too_few_rounds_say_nothing() -> None:
    before, after = run("a", one=[1.0, 1.0]), run("a", one=[9.0, 9.0])
    found = compare.compare(before, after)
    assert found["changed"] == [] and found["few"] == 1


def test_findings_compare_too(tmp_path: Path) -> None:
    runs = []
    for number in (1.0, 4.0):
        findings = Findings("An experiment", "ms")
        for extra in (0.0, 0.1, 0.2):
            findings.add("case", 8, "ours", number + extra)
        path = tmp_path / f"run{number:g}.json"
        path.write_text(json.dumps(findings.as_dict({"rounds": 3})))
        runs.append(compare.load(path))
    [row] = compare.compare(*runs)["changed"]
    assert row["unit"] == "ms" and row["before"]["median"] == 1.1 and row["after"]["n"] == 3


def test_an_earlier_run_that_cannot_be_read_ends_the_program_before_it_measures(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"rows": []}')
    for name in ("none.json", "other.json"):
        with pytest.raises(SystemExit, match=name):
            bench.compared(str(tmp_path / name))
    assert bench.compared("") is None


def test_compare_may_name_a_file_with_spaces() -> None:
    given = ["--json", "rounds=3", "--compare", "a dir/OLD.json"]
    assert bench.flags(given) == ["--json", "rounds=3", "compare='a dir/OLD.json'"]


def test_another_commit_runs_by_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two trees with a module that says which one it is."""
    for name, number in (("theirs", 2.0), ("ours", 1.0)):
        folder = tmp_path / name
        (folder / ".venv" / "bin").mkdir(parents=True)
        (folder / ".venv" / "bin" / "python").symlink_to(sys.executable)
        records = [{"case": "call", "size": 4, "what": "rdmarpc", "unit": "us", "samples": [number]}]
        checked = "import json, sys\nassert sys.argv[1:] == ['x=1', 'rounds=1', '--json']\n"
        told = f"{checked}print(json.dumps({{'records': {records}}}))"
        (folder / "measures.py").write_text(told)
    monkeypatch.setattr(against, "ROOT", tmp_path / "ours")
    monkeypatch.setattr(against, "_named", lambda revision: revision)
    monkeypatch.setattr(against, "_installed", lambda commit: tmp_path / commit)
    found = against.by_turns("measures", ["x=1"], "theirs", 3)
    assert found["pairs"] == [{"key": ["call", 4, "rdmarpc"], "unit": "us", "before": [2.0] * 3, "after": [1.0] * 3}]
    turns = [line.rpartition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert turns == ["theirs", "this one", "this one", "theirs", "theirs", "this one"]
    against.print_pairs(found)
    assert "3 of 3" in capsys.readouterr().out


def test_a_commit_that_git_does_not_know_ends_the_program() -> None:
    with pytest.raises(SystemExit, match="against"):
        against.by_turns("measures", [], "no-such-commit", 1)


def test_a_comparison_without_a_name_ends_the_program_before_it_measures() -> None:
    for flag in ("--compare", "--against"):
        with pytest.raises(SystemExit, match=f"{flag} needs"):
            bench.flags([flag])
