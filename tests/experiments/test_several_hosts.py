"""Apps over several hosts. Here the hosts are tasks on one machine, which see one folder; no figure is judged."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing as mp
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import on_network
import programs
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from rdmarpc.experiments.harness import apps, hosts
from rdmarpc.experiments.harness.hosts import Hosts

APPS = ("a3c", "convergence", "dlrm", "gpt", "graph_network", "grid", "mixture", "parameter_server", "reinforcement", "scaling")
LIBRARIES = ["rdmarpc", "torch_rpc", *(["grpc"] if importlib.util.find_spec("grpc") else [])]
LAUNCHED = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
"""As torchrun leaves it to its tasks."""


def run_mixture(tmp_path: Path, libraries: list[str], before: Callable[[int], list[str]]) -> list[str]:
    """What each of two tasks of torchrun's prints, of which both end well. ``before(task)``: what its command begins with."""
    folder, environment = tmp_path / "run", LAUNCHED | {"WORLD_SIZE": "2", "RDMARPC_SECRET": 64 * "a"}
    given = ["cluster=torchrun", "device=tcp", "steps=2", "rounds=1", "tokens=12", "width=8", f"hydra.run.dir={folder}"]
    command = ["-m", "experiments.mixture", *given, f"libraries=[{','.join(libraries)}]"]
    tasks = [
        programs.Program([*before(rank), *command], tmp_path / f"out{rank}", environment | {"RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        codes = [task.wait(240.0) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    said = [(tmp_path / f"out{rank}").read_text() for rank in range(2)]
    assert codes == [0, 0], "\n".join(said)
    found = json.loads((folder / "mixture.json").read_text())
    assert not found["left_out"] and {each["what"] for each in found["samples"]} == {*libraries}
    return said


def test_two_tasks_run_one_app(tmp_path: Path) -> None:
    """As torchrun starts it. Workers 0 and 1 and the servers of each turn are dealt out, so no task could end alone."""
    said = run_mixture(tmp_path, [*LIBRARIES, "gloo"], lambda task: [])
    assert "a step, ms" in said[0] and "a step, ms" not in said[1], "the first task alone has the figures"
    folder = tmp_path / "run"
    assert not (folder / hosts.FOLDER).exists() and not list(folder.glob(".meeting-*"))


def test_two_hosts_run_one_app(tmp_path: Path) -> None:
    """Two emulated hosts: names, networks and a cable between them. No address of one is loopback for the other."""
    with mp.get_context("spawn").Pool(1) as pool:  # whether it can leave; the test itself stays
        if reason := pool.apply(on_network.leave):
            pytest.skip(f"no network namespaces: {reason} (they need the rights of root)")
    if not shutil.which("ip"):
        pytest.skip("the program ip (iproute2) is missing")
    script = str(Path(on_network.__file__).relative_to(programs.ROOT))
    run_mixture(tmp_path, [*LIBRARIES, "rdmarpc_group", "gloo"], lambda task: [script, str(task), str(tmp_path)])


def both(tmp_path: Path, *, limit_s: float = 20.0) -> list[Hosts]:
    return [Hosts(number, 2, tmp_path, limit_s) for number in range(2)]


def test_processes_are_dealt_out_in_turn(tmp_path: Path) -> None:
    one, other = both(tmp_path)
    assert (one.mine(5), other.mine(5), other.mine(1)) == ([0, 2, 4], [1, 3], [])


def test_a_reason_of_one_host_holds_for_all(tmp_path: Path) -> None:
    tasks = both(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        for reasons, said in ((("", ""), ""), (("", "no grpc"), "no grpc"), (("x", "y"), "x; y"), (("x", "x"), "x")):
            calls = [threads.submit(task.agree, "a turn", reason) for task, reason in zip(tasks, reasons)]
            assert [call.result(20) for call in calls] == [said, said]
        assert tasks[0].turn() == tasks[1].turn()
        for call in [threads.submit(task.leave) for task in tasks]:
            call.result(20)
    assert not list(tmp_path.iterdir())


def test_hosts_that_are_at_different_turns_end_with_one_line(tmp_path: Path) -> None:
    tasks = both(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(task.agree, about, "") for task, about in zip(tasks, ("a", "b"))]
        for call in calls:
            with pytest.raises(SystemExit, match=r"error: task [01] of 2 is at '[ab]' while task [01] is at '[ab]'"):
                call.result(20)


def test_a_host_that_does_not_come_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "GRACE_S", 0.0)
    one, _ = both(tmp_path, limit_s=0.05)
    with pytest.raises(SystemExit, match="error: task 1 of 2 did not come to: a turn"):
        one.agree("a turn", "")
    with pytest.raises(SystemExit, match="is of another run"):
        Hosts(0, 2, tmp_path, 1.0)
    with pytest.raises(SystemExit, match="all tasks need one folder"):
        Hosts(1, 2, tmp_path / "elsewhere", 0.05)


SLURM = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
SLURM |= {"SLURM_STEP_NODELIST": "host[1-2]", "RDMARPC_SECRET": "a"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "RDMARPC_SECRET": "a"}


@pytest.mark.parametrize(
    ("environment", "job", "says"),
    [
        ({}, {"cluster": "slurm"}, "error: cluster=slurm: this process was not started by srun, with several tasks"),
        ({}, {"cluster": "torchrun"}, "error: cluster=torchrun: this process was not started by torchrun"),
        (TORCHRUN, {"cluster": "torchrun", "device": "shm"}, "shared memory reaches one host only"),
        (TORCHRUN | {"RDMARPC_SECRET": ""}, {"cluster": "torchrun"}, "needs RDMARPC_SECRET"),
    ],
)
def test_what_cannot_be_a_task_is_one_line(
    environment: dict[str, str], job: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=re.escape(says)):
        hosts.task_of({"device": "tcp"} | job)


@pytest.mark.parametrize(("cluster", "environment"), [("slurm", SLURM), ("torchrun", TORCHRUN)])
@pytest.mark.parametrize("app", APPS)
def test_every_app_takes_the_config(
    app: str, cluster: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with initialize_config_dir(apps.CONF, version_base="1.3"):
        here = compose(app)
        chosen = compose(app, [f"cluster={cluster}"], return_hydra_config=True)
        named = compose(app, [f"cluster={cluster}", "device=tcp"])
    assert here.cluster == "here" and hosts.task_of(apps.plain(here)) is None
    assert (chosen.device, named.device) == ("verbs", "tcp")
    assert hosts.task_of(apps.plain(named)) == (1, 2)
    OmegaConf.update(chosen, "hydra.job.name", app)
    where = chosen.hydra.run.dir
    assert where == f"outputs/{app}/" + ("slurm-7.0" if cluster == "slurm" else "torchrun-x")


@pytest.mark.parametrize("app", APPS)
def test_the_submitit_launcher_takes_every_app(app: str) -> None:
    pytest.importorskip(
        "hydra_plugins.hydra_submitit_launcher", reason="hydra-submitit-launcher is not installed (extra: slurm)"
    )
    given = ["hydra/launcher=submitit_slurm", "hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=1", "cluster=slurm"]
    with initialize_config_dir(apps.CONF, version_base="1.3"):
        found = compose(app, given, return_hydra_config=True)
    assert (found.hydra.launcher.nodes, found.hydra.launcher.tasks_per_node, found.cluster) == (2, 1, "slurm")
    assert found.hydra.sweep.dir.startswith(f"multirun/{app}/")
