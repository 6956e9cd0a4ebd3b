"""The benchmark of CUDA tensors and the example that goes with it. Without CUDA, on the GPU in software, which torch RPC does
not know; no figure is judged."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import gpu
import programs
import pytest
import torch
from group import results, run_group
from hydra import compose, initialize_config_dir

from rdmarpc.experiments import cuda
from rdmarpc.experiments.harness.processes import WorkerFailed
from rdmarpc.experiments.harness.targets import verdict
from rdmarpc.experiments.latency.gpu_report import print_tables, summary

SMALL = ["rounds=1", "linear=20", "iterations=2", "batches=1", "sizes=[4000,40000]", "small_sizes=[4]", "small_times=5"]
SMALL += ["layers=2", "widths=[20]", "steps=2"]
ONLY_SOFTWARE = pytest.mark.skipif(gpu.TYPE == "cuda", reason="this host has CUDA")


@pytest.mark.gpu
@pytest.mark.timeout(600 if gpu.TYPE == "cuda" else 300)  # CUDA takes seconds to begin, in each of the processes
def test_it_measures_every_part(tmp_path: Path) -> None:
    gpu.build()
    given = [f"device={gpu.TYPE}", "+targets.copies={40000:1000000000}", f"hydra.run.dir={tmp_path}"]
    on_cuda = gpu.TYPE == "cuda"  # which no process can use that was forked from one that has looked for it
    if not on_cuda:
        given.append("prepare=gpu:load")
    done = programs.run("-m", "experiments.cuda", *SMALL, *given, fresh=on_cuda, timeout=500.0 if on_cuda else 250.0)
    assert done.returncode == 0, done.stdout
    assert not list(tmp_path.glob(".meeting-*"))
    found = json.loads((tmp_path / "cuda.json").read_text())
    assert found["machine"]["gpus"] and found["machine"]["mps"] in (False, True)
    assert found["machine"]["cpu"] and found["machine"]["nvidia_smi"]["answer"] and found["versions"]["torch"]
    for row in found["recipe"]:
        assert row["rdmarpc_cpu_ms"] > 0 and row["rdmarpc_cuda_ms"] > 0
    assert [(row["state"], row["first"]) for row in found["recipe"]] == [
        (state, first) for state in ("cold", "warm") for first in ("cpu", "cuda")
    ]
    assert [(row["function"], row["bytes"]) for row in found["grid"]] == [
        (name, size) for name in ("identity", "heavy") for size in (4000, 40000)
    ]
    for row in found["grid"]:
        assert row["rdmarpc_total_ms"] >= row["rdmarpc_delay_ms"] > 0
        assert (row["copies_ms"] is not None) == (row["function"] == "identity") == (row["rdmarpc_times_copies"] is not None)
    assert found["small"][0]["rdmarpc_us"] > 0
    for row in found["step"]:
        assert row["wrapped_ms"] > 0 and row["alone_ms"] > 0 and row["apart"] == 0
    assert found["bytes"]["gpu_bytes_direct"] > 0 and found["bytes"]["bytes_staged"] == 0
    ours = {row["mode"]: row["apart"] for row in found["gradients"] if row["what"] == "rdmarpc"}
    assert set(ours) == {"cpu", "cuda"} and max(ours.values()) <= cuda.GRADIENTS_WITHIN
    if gpu.TYPE == "softgpu":
        assert [(each["part"], each["what"]) for each in found["failed"]] == [
            (part, "torch_rpc") for part in ("grid", "small", "recipe")
        ]
        for each in found["failed"]:
            # TensorPipe knows no such device; from torch 2.15 on it aborts there.
            aborts = torch.__version__ >= (2, 15)
            assert ("was killed by SIGABRT" if aborts else "device count = 0") in each["reason"]
            assert f"not measured: {each['part']} of torch RPC: {each['reason']}" in done.stdout
        assert [verdict(target) for target in found["targets"]] == ["open", *["not measured"] * 3], "one round has no spread"


def sample(case: str, size: int, what: str, *values: float) -> dict[str, Any]:
    return {"case": case, "size": size, "what": what, "samples": list(values), "median": sorted(values)[len(values) // 2]}


def job(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(cuda.CONF, version_base="1.3"):
        return cuda.checked(compose("cuda", list(overrides)))


def test_targets_are_met_or_missed_or_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    large = 400_000_000
    records = [
        sample("identity_total", large, "copies", 5.0, 10.0, 11.0),
        sample("identity_total", large, "rdmarpc", 6.0, 6.0, 6.0),
        sample("identity_total", large, "torch_rpc", 24.0),
        sample("small", 4, "rdmarpc", 60.0, 61.0),
        sample("small", 4, "torch_rpc", 100.0, 90.0),
        sample("small", 40_000, "rdmarpc", 60.0),
        sample("cpu_first_warm_cuda", 0, "rdmarpc", 10.0),
        sample("cpu_first_warm_cuda", 0, "torch_rpc", 40.0),
        sample("gradients_cuda", 0, "rdmarpc", 0.0, 1.0, 0.0),
    ]
    result = summary(records, {("grid", "torch_rpc"): "it [has] none"}, job())
    assert [verdict(target) for target in result["targets"]] == ["met", "missed", "not measured", "open", "not measured"]
    assert result["targets"][0]["measured"] == 0.6
    assert result["gradients"] == [{"mode": "cuda", "what": "rdmarpc", "apart": 1.0}], "the worst round counts"
    print_tables(result | {"machine": {"gpus": ["one"], "cpu": "this", "mps": False}})
    said = capsys.readouterr().out
    assert "targets: 1 met, 1 missed, 1 open, 2 not measured" in said
    assert "open: recipe, cuda, warm, cpu first: times faster than torch RPC: 4 (one sample), asked ≥ 3" in said
    assert "missed: one call with 4 B" in said and "not measured: one call with 40 KB" in said
    assert "not measured: grid of torch RPC: it [has] none" in said


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["recipe=false", "grid=false", "small=false", "step=false"], "nothing to measure"),
        (["layers=1"], "layers=1"),
        (["rounds=0"], "rounds=0"),
        (["sizes=[6]"], r"sizes=\[6\]"),
        (["calls=200"], "calls=200"),
    ],
)
def test_bad_config_is_a_clear_error(overrides: list[str], says: str) -> None:
    with pytest.raises(SystemExit, match=says):
        job(*overrides)


def test_who_fails_has_no_further_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    turns = []

    def run_job(groups: list[Any], given: dict[str, Any], on_event: Any, timeout_s: float) -> None:
        turns.append((given["program"], groups[0].name))
        if given["program"] == "machine":
            on_event("machine", ("machine", {"gpus": []}))
        elif turns[-1] == ("grid", "torch_rpc"):
            raise WorkerFailed("worker1 of torch_rpc was killed by SIGABRT")
        elif turns[-1] == ("small", "rdmarpc"):
            for rank in range(2):
                (Path(given["meeting_place"]) / f"failed{rank}").write_text("RuntimeError: no")
            raise WorkerFailed("worker0 of rdmarpc ended with exit code 1")

    monkeypatch.setattr(cuda, "run_job", run_job)
    found = cuda.run(job("rounds=3"), tmp_path)
    assert found.failed == {
        ("grid", "torch_rpc"): "worker1 of torch_rpc was killed by SIGABRT",
        ("small", "rdmarpc"): "RuntimeError: no",
    }
    assert Counter(turns) == {
        ("machine", "machine"): 1,
        ("copies", "copies"): 3,
        ("grid", "rdmarpc"): 3,
        ("grid", "torch_rpc"): 1,
        ("small", "rdmarpc"): 1,
        ("small", "torch_rpc"): 3,
        ("step", "rdmarpc"): 3,
        ("recipe", "rdmarpc"): 6,
        ("recipe", "torch_rpc"): 6,
    }
    assert not list(tmp_path.iterdir())


@ONLY_SOFTWARE
def test_without_a_gpu_both_say_what_is_missing(tmp_path: Path) -> None:
    done = programs.run("-m", "experiments.cuda", f"hydra.run.dir={tmp_path}")
    missing = "is built without CUDA" if torch.version.cuda is None else "finds no cuda device"
    assert done.returncode and missing in done.stdout.splitlines()[-1], done.stdout
    done = programs.run("examples/cuda_rpc.py")
    missing = "a torch that is built with CUDA" if torch.version.cuda is None else "a GPU of NVIDIA's"
    assert done.returncode and f"needs {missing}" in done.stdout, done.stdout


def example(rank: int) -> list[float]:
    sys.path.insert(0, str(programs.ROOT))
    import rdmarpc as rpc
    from examples import cuda_rpc

    cuda_rpc.SIZE, cuda_rpc.ITERATIONS = 20, 3
    found: list[float] = []
    if rank == 0:
        here, there = str(gpu.device()), str(gpu.device(gpu.other()))
        found = [cuda_rpc.measure(mode, here, there)[1] for mode in ("cpu", "cuda")]
    rpc.shutdown()
    return found


@pytest.mark.gpu
def test_the_example_gives_the_gradients_of_one_process() -> None:
    maps = {"worker1": {0: 1}} if gpu.TYPE == "softgpu" else {}
    found = results(run_group(example, gpu=True, each={0: {"device_maps": maps}}))[0]
    assert len(found) == 2 and max(found) < 1e-5
