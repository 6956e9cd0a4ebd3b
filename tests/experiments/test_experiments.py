"""The training job and the benchmark as a user starts them: processes of their own, judged by what they leave behind, never
by a time."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import programs
import psutil
import pytest
from hydra import compose, initialize_config_dir

from rdmarpc import transfers
from rdmarpc.experiments import bench
from rdmarpc.experiments.harness.targets import verdicts

TRAIN = ["-m", "experiments.train"]
QUICK = ["epochs=2"]


def train(*overrides: str, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """A job from start to end."""
    return programs.run(*TRAIN, *overrides, fresh=fresh)


def result_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def assert_steady(result: dict[str, Any]) -> None:
    """From the second step on nothing is registered or staged, and the losses are those of a single process."""
    assert result["counters"]["steps"] > 0
    assert result["counters"]["registrations"] == 0
    assert result["counters"]["bytes_staged"] == 0
    assert result["counters"]["bytes_direct"] > 0
    assert result["equal_to_single_process"]["rdmarpc"]


def test_default_job_learns_and_shows_it(tmp_path: Path) -> None:
    done = train("epochs=3", f"hydra.run.dir={tmp_path}", fresh=True)
    assert done.returncode == 0, done.stdout
    result = result_in(tmp_path)
    assert result["accuracy"] >= 0.9
    assert_steady(result)
    assert {"single_process", "rdmarpc", "torch_rpc"} == set(result["step_ms"])
    plans = transfers.load(tmp_path / "placement.json")
    assert all(str(plan) in (tmp_path / "placement.txt").read_text() for plan in plans)
    assert {each.kind for each in plans[0].histogram()} == {"activation", "input", "gradient"}
    assert (tmp_path / "placement.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "comm_comp.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".meeting-*"))


def test_other_device_workers_and_model(tmp_path: Path) -> None:
    done = train("device=tcp", "workers=3", "model=mlp", "torch_rpc=false", *QUICK, f"hydra.run.dir={tmp_path}")
    assert done.returncode == 0, done.stdout
    result = result_in(tmp_path)
    assert_steady(result)
    assert result["config"]["device"] == "tcp"
    assert set(result["config"]["placement"].values()) == {"worker0", "worker1", "worker2"}
    assert set(result["step_ms"]) == {"single_process", "rdmarpc"}


def test_workers_that_somebody_else_started(tmp_path: Path) -> None:
    """As tasks of a SLURM step: each program is one worker, rank 0 writes the results."""
    # The port follows from the job's number.
    step = {"JOB_ID": str(os.getpid()), "STEP_ID": "0", "STEP_NUM_TASKS": "2", "STEP_NODELIST": "localhost"}
    tasks = []
    try:
        for rank in range(2):
            environment = {f"SLURM_{name}": value for name, value in {**step, "PROCID": str(rank)}.items()}
            folder = tmp_path / str(rank)
            arguments = [*TRAIN, "device=tcp", "model=mlp", "epochs=1", f"hydra.run.dir={folder}"]
            tasks.append(programs.Program(arguments, tmp_path / f"out{rank}", environment))
        for rank, task in enumerate(tasks):
            assert task.wait(timeout=200) == 0, (tmp_path / f"out{rank}").read_text()
    finally:
        for task in tasks:
            task.kill()
    result = result_in(tmp_path / "0")
    assert_steady(result)
    assert result["config"]["workers"] == 2 and set(result["step_ms"]) == {"single_process", "rdmarpc"}
    assert not (tmp_path / "1" / "result.json").exists()


def test_multirun(tmp_path: Path) -> None:
    done = train("-m", "seed=0,1", "torch_rpc=false", "epochs=1", f"hydra.sweep.dir={tmp_path}")
    assert done.returncode == 0, done.stdout
    first, second = result_in(tmp_path / "0"), result_in(tmp_path / "1")
    assert first["losses"]["rdmarpc"] != second["losses"]["rdmarpc"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["workers=7"], "not for 7"),
        (["batch_size=100000"], "batch_size=100000"),
        (["epochs=0"], "epochs=0"),
        (["device=carrier-pigeon", "torch_rpc=false"], "carrier-pigeon"),
    ],
)
def test_bad_config_is_a_clear_error(overrides: list[str], says: str, tmp_path: Path) -> None:
    done = train(*overrides, f"hydra.run.dir={tmp_path}")
    assert done.returncode != 0
    assert says in done.stdout


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def start_endless_job(tmp_path: Path) -> tuple[programs.Program, list[psutil.Process]]:
    """A launcher and its two workers, first rank 0, in the middle of training."""
    log = tmp_path / "stdout"
    launcher = programs.Program([*TRAIN, "epochs=100000", "torch_rpc=false", f"hydra.run.dir={tmp_path}"], log)
    try:
        wait_for(lambda: launcher.poll() is not None or "epoch 1:" in log.read_text(), 100, "no epoch within 100 s")
        assert launcher.poll() is None, log.read_text()
        workers = sorted(psutil.Process(launcher.pid).children(recursive=True), key=lambda child: child.pid)
        assert len(workers) == 2
    except BaseException:
        launcher.kill()
        raise
    return launcher, workers


@pytest.mark.parametrize("everybody", [True, False], ids=["ctrl-c", "launcher-only"])
def test_interrupt_ends_everything(everybody: bool, tmp_path: Path) -> None:
    launcher, children = start_endless_job(tmp_path)
    launcher.signal(signal.SIGINT, everybody)
    assert launcher.wait(timeout=60) == 130
    assert not psutil.wait_procs(children, timeout=60)[1]
    assert not list(tmp_path.glob(".meeting-*"))


def test_killed_launcher_leaves_no_worker(tmp_path: Path) -> None:
    launcher, children = start_endless_job(tmp_path)
    launcher.signal(signal.SIGKILL, everybody=False)
    assert launcher.wait(timeout=60) == -signal.SIGKILL
    assert not psutil.wait_procs(children, timeout=60)[1]


def test_killed_launcher_leaves_no_worker_that_is_silent(tmp_path: Path) -> None:
    """Those that write to it notice by that. In an interpreter of its own, with a server of its own that forks."""
    job = Path(__file__).with_name("silent_job.py")
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen([sys.executable, str(job), str(tmp_path)], stdout=log, stderr=log)
    children = []
    try:
        wait_for(lambda: launcher.poll() is not None or len(list(tmp_path.glob("*.here"))) == 3, 100, "not all came")
        children = psutil.Process(launcher.pid).children(recursive=True)
        assert launcher.poll() is None and len(children) >= 4, (tmp_path / "log").read_text()
    finally:
        launcher.kill()
        launcher.wait(timeout=60)
    assert not psutil.wait_procs(children, timeout=60)[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_worker_ends_the_job(rank: int, tmp_path: Path) -> None:
    launcher, children = start_endless_job(tmp_path)
    children[rank].kill()
    assert launcher.wait(timeout=60) == 1
    assert not psutil.wait_procs(children, timeout=60)[1]
    assert "worker" in (tmp_path / "stdout").read_text().splitlines()[-1]


TINY = ["sizes=[4,1048576]", "rounds=1", "start=1", "idle_s=0.2", "all_to_all=2", "all_to_all_s=0.2", "autograd=false"]
TINY_CELLS = ["first=[4,65536]", "arena=[65536]", "result=[65536]", "several=[32,65536]", "remote=[4,65536]"]


def benchmark(folder: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    """What a benchmark wrote, and what it showed."""
    done = programs.run("-m", "experiments.bench", *overrides, f"hydra.run.dir={folder}")
    assert done.returncode == 0, done.stdout
    assert not list(folder.glob(".meeting-*"))
    return json.loads((folder / "bench.json").read_text()), done.stdout


def cases(found: dict[str, Any]) -> dict[str, set[tuple[str, int]]]:
    """Case and size of all that was measured, by what it is of."""
    measured: dict[str, set[tuple[str, int]]] = {}
    for record in found["records"]:
        measured.setdefault(record["what"], set()).add((record["case"], record["size"]))
    return measured


def test_benchmark_measures_every_cell_of_both_layers(tmp_path: Path) -> None:
    """Each case once at small sizes: the figures are not judged, only that they are there and what has no time in it."""
    found, shown = benchmark(tmp_path, *TINY, *(f"cells.{cell}" for cell in TINY_CELLS))
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")

    measured = cases(found)
    for record in found["records"]:
        assert record["median"] > 0 or record["what"] == "staged" or record["case"] == "idle"
    pairs = {("one_way", 4), ("one_way", 1 << 20), ("identity", 4), ("identity", 1 << 20), ("stream", 1 << 20)}
    cells = {(case, 65536) for case in ("first", "second", "later", "arena", "result", "several", "remote")}
    cells |= {("first", 4), ("second", 4), ("later", 4), ("several", 32), ("remote", 4)}
    others = {("calls", 1), ("calls", 64), ("idle", 0), ("init", 2), ("start", 2), ("all_to_all", 2)}
    assert measured["torch_rpc"] == pairs | cells | others
    assert measured["rdmarpc"] == pairs | cells | others | {("import", 0)}
    staged = {record["case"]: record["median"] for record in found["records"] if record["what"] == "staged"}
    assert staged["arena"] == 0

    for text in ("8 tensors", "x + 1", "remote", "first call of a signature", "all to all", "init_rpc of 2 workers"):
        assert text in shown
    assert f"targets: {verdicts(found['targets'])}" in shown
    asked = {(target["name"], target["relation"], target["asked"]) for target in found["targets"]}
    assert {
        ("identity, 4 B: µs", "≤", 18),
        ("first call, 4 B: times a later call", "≤", 2),
        ("2 workers, all to all: times faster than torch RPC", "≥", 5),
    } <= asked


def test_benchmark_measures_autograd_of_both_layers(tmp_path: Path) -> None:
    found, shown = benchmark(tmp_path, "pair=false", "start=0", "rounds=1", "linear=50")
    measured = cases(found)
    assert measured["rdmarpc"] == {(case + part, 0) for case in ("tiny", "engine", "linear") for part in ("", "_backward")}
    parts = {f"{layer}{part}" for layer in ("rdmarpc", "torch_rpc") for part in ("", "_local", "_above")}
    assert set(measured) == parts and all(measured[part] == measured["rdmarpc"] for part in parts)
    assert all(record["median"] > 0 for record in found["records"] if not record["what"].endswith("_above"))
    asked = {(target["name"], target["relation"], target["asked"]) for target in found["targets"]}
    tiny, linear = "a tiny call, forward and backward", "two linear layers, 10 iterations"
    above = "of torch RPC's time above"
    assert asked == {(f"{tiny}: times faster than torch RPC", "≥", 5), (f"{linear}: {above}", "≤", 0.2)}
    assert all(name in shown for name in (tiny, linear))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["sizes=[]"], "sizes=[]"),
        (["sizes=4"], "sizes=4 are numbers"),
        (["cells.remote=[0]"], "remote=[0]"),
        (["rounds=0"], "rounds=0"),
        (["all_to_all=1"], "all_to_all=1"),
        (["linear=0"], "linear=0"),
        (["pair=false", "start=0", "autograd=false"], "nothing to measure"),
    ],
)
def test_benchmark_refuses_what_makes_no_sense(overrides: list[str], says: str) -> None:
    with initialize_config_dir(bench.CONF, version_base="1.3"), pytest.raises(SystemExit, match=re.escape(says)):
        bench.checked(compose("bench", overrides))


def test_steps_beside_one_process() -> None:
    done = programs.run("-m", "experiments.steps", "--only", "layers", "--rounds", "1", timeout=200.0)
    assert done.returncode == 0, done.stdout
    rows = re.findall(r"^(.+?) +\d+ us((?: +(?:[\d.]+x \([\d.]+\)|-)){4}) +[\d.]+$", done.stdout, re.MULTILINE)
    assert len(rows) == 5 and all("layers" in name for name, _ in rows), done.stdout
    assert [times.count("x") for _, times in rows] == [4, 4, 2, 2, 4], done.stdout  # a number of AdamW's changes in every step


def test_what_tls_costs() -> None:
    done = programs.run("-m", "experiments.bench_tls", "1")
    assert done.returncode == 0, done.stdout
    assert re.search(r"64 MiB \(GB/s\) +tls +[\d.]+", done.stdout), done.stdout
