"""The experiment of data-parallel training as a user starts it; no figure is judged here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import programs
import pytest
from hydra import compose, initialize_config_dir

from rdmarpc.experiments import ddp
from rdmarpc.experiments.harness.findings import Findings
from rdmarpc.experiments.training import ddp_report as report
from rdmarpc.experiments.training import ddp_simulated as simulated

SMALL = ["models=[small]", "caps_mb=[1]", "numbers=100000", "granularity=[100000]", "skip=[1,4]", "trainings=[[8,0.02]]"]
SMALL += ["batches=8", "ranks=[2]", "layers=4", "parameters=64000", "compute_ms=4", "steps=1", "warm_up=1", "rounds=1"]


@pytest.mark.timeout(300)  # processes that each import torch, on a machine that may be busy
def test_every_part_by_both_groups(tmp_path: Path) -> None:
    done = programs.run("-m", "experiments.ddp", *SMALL, f"hydra.run.dir={tmp_path}", timeout=280.0)
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "ddp.json").read_text())
    samples = {(each["case"], each["size"], each["what"]): each["samples"] for each in found["samples"]}
    assert {case.partition(",")[0] for case, _, _ in samples} == {
        "granularity",
        "buckets",
        "breakdown",
        "skipping",
        "training",
        "scaling",
    }
    for group in report.GROUPS:
        assert len(samples["training, batch 8, rate 0.02: losses", 4, group]) == 8
        assert all(each > 0 for each in samples["breakdown, small: backward", 0, f"{group} without overlap"])
    for every in (1, 4):
        ours, gloo = (samples["training, batch 8, rate 0.02: losses", every, group] for group in report.GROUPS)
        assert ours == gloo, "two ranks have one order of sums"
    assert any("Simulated" in table["title"] for table in found["tables"])
    assert all((tmp_path / f"ddp_{part}.png").stat().st_size > 5000 for part in ddp.PARTS)
    assert [each["what"] for each in found["left_out"]] == ["MPI"]


def test_the_parts_of_a_step() -> None:
    findings = Findings("", "ms")
    taken = {"alone": (2.0, 6.0), "gloo": (2.0, 9.0), "gloo without overlap": (2.0, 13.0)}
    for what, (forward, backward) in taken.items():
        findings.add("breakdown, GRU: forward", 0, what, forward)
        findings.add("breakdown, GRU: backward", 0, what, backward)
    found = report.breakdown(findings, "GRU", "gloo")
    assert found == (2.0, 6.0, 3.0, 4.0)
    assert round(found.speed_up, 3) == 36.364, "15 ms a step without overlap, 11 with it"
    assert report.breakdown(findings, "GRU", "rdmarpc") is None
    assert report.own_work(findings, "GRU") is None
    findings.add("breakdown, GRU: forward", 0, "unsummed", 2.5)
    findings.add("breakdown, GRU: backward", 0, "unsummed", 7.0)
    assert report.own_work(findings, "GRU") == 1.5


def test_a_ratio_of_noise_is_no_target_that_is_met() -> None:
    for ours, met in ((2.0, False), (0.5, True), (-0.1, None)):
        findings = Findings("", "ms")
        for what, backward in (("alone", 6.0), ("gloo", 9.0), ("rdmarpc", 6 + ours)):
            for end in ("", " without overlap"):
                findings.add("breakdown, GRU: forward", 0, what + end, 2.0)
                findings.add("breakdown, GRU: backward", 0, what + end, backward)
        report.judge(findings, {"parts": ["breakdown"], "models": ["GRU"]})
        assert [target["met"] for target in findings.targets] == [met]


def test_the_simulation_of_more_hosts() -> None:
    latency, rate = 0.5, 1e6
    measured = latency + 4e6 / rate
    assert simulated.bandwidth(4_000_000, measured, latency) == rate
    assert simulated.sum_ms(2, 4e6, latency, rate) == measured, "between two hosts: what was measured"
    assert simulated.sum_ms(1, 4e6, latency, rate) == 0
    assert simulated.step_ms(1, 4_000_000, 1e6, 30, latency, rate) == 30
    # One bucket is full when backward ends. With four, three are summed while backward goes on, as far as they fit there.
    assert simulated.step_ms(2, 4_000_000, 4e6, 30, latency, rate) == 30 + measured
    assert simulated.step_ms(2, 4_000_000, 1e6, 30, latency, rate) == 30 + latency + 1
    assert simulated.step_ms(2, 4_000_000, 1e6, 0, latency, rate) == 4 * (latency + 1)
    assert simulated.skipped_ms(4, 60, 20) == 30
    steps = [simulated.step_ms(hosts, 100_000_000, 25 << 20, 90, latency, rate) for hosts in (2, 16, 256)]
    assert steps == sorted(steps)


@pytest.mark.parametrize(
    ("override", "says"),
    [("parts=[all]", "parts=['all']"), ("models=[BERT]", "models=['BERT']"), ("steps=0", "steps=0"), ("skip=[0]", "skip")],
)
def test_it_refuses_what_makes_no_sense(override: str, says: str) -> None:
    with initialize_config_dir(ddp.CONF, version_base="1.3"), pytest.raises(SystemExit, match=re.escape(says)):
        ddp.checked(compose("ddp", [override]))
