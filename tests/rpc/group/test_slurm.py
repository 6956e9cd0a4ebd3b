"""Meeting as tasks of a SLURM step. That a real SLURM sets these variables so is what ``make vm-cluster`` shows."""

from __future__ import annotations

import os

import pytest
from group import results, run_group

import rdmarpc as rpc
from rdmarpc.links.group import meeting as groups


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("login,n[1-2]", "login"),
        ("rack[01-02,7]n[3-4],login", "rack01n3"),
        ("gpu[008,010-012]-ib", "gpu008-ib"),
        ("a.cluster.example,b", "a.cluster.example"),
    ],
)
def test_first_host_of_a_list(nodes: str, first: str) -> None:
    assert groups._first_host(nodes) == first


def step(rank: int, **changes: str) -> dict[str, str]:
    """What ``srun`` leaves in the environment of a task."""
    known = {"JOB_ID": "71", "STEP_ID": "2", "STEP_NUM_TASKS": "2", "STEP_NODELIST": "localhost", "PROCID": str(rank)}
    return {f"SLURM_{name}": value for name, value in {**known, **changes}.items()}


def test_where_a_step_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    with pytest.raises(RuntimeError, match="not started by srun"):
        groups.slurm_task("slurm://")
    for name, value in step(1, STEP_NODELIST="n[3-9]", STEP_NUM_TASKS="7").items():
        monkeypatch.setenv(name, value)
    assert groups.slurm_task("slurm://") == (1, 7, f"tcp://n3:{20000 + (97 * 71 + 2) % 12000}")
    assert groups.slurm_task("slurm://:29517") == (1, 7, "tcp://n3:29517")


def meet(meeting) -> tuple[int, int]:
    os.environ.update(step(meeting.rank, JOB_ID=str(os.getppid())))  # the port follows from it
    rpc.init_rpc(f"worker{meeting.rank}", rpc_backend_options=rpc.RpcBackendOptions(init_method="slurm://", rpc_timeout=20))
    found = rpc.get_worker_info().id, rpc.rpc_sync(f"worker{1 - meeting.rank}", os.getpid)
    rpc.shutdown()
    return found


def test_tasks_meet() -> None:
    (first, second_pid), (second, first_pid) = results(run_group(meet, dynamic=True))
    assert (first, second) == (0, 1) and first_pid != second_pid
