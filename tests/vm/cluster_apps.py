"""The experiments that run over several hosts, over both guests: each as a step of the SLURM there, two of them by torchrun and
by submitit, too. Two that measure one host, on the first guest over its RDMA device.

Their figures are of emulated hosts and mean nothing. What is looked at: every library that can run there has ended well at
both hosts, what it computed is what the others computed (the apps compare it), and by ``verbs`` the tensors went by RDMA.
"""

from __future__ import annotations

import json
import secrets
import shlex
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import cluster_slurm
from cluster_faults import Case
from cluster_hosts import HOME, Cluster, Host
from guest import GENERIC

TURN_S, APP_S = 1200, 2700.0
"""Emulated hosts need a minute to import torch, and an app has a turn for each library."""
APPS: dict[str, list[str]] = {
    "grid": ["functions=[identity]", "sizes=[40000,4000000]", "batches=2", "calls=4"],
    "dlrm": ["steps=3"],
    "parameter_server": ["steps=3", "layers=2"],
    "mixture": ["steps=3"],
    "graph_network": ["steps=3"],
    "gpt": ["steps=2", "micro_batches=[2]", "samples=4", "tokens=8", "vocabulary=100"],
    "convergence": ["problems=[images]", "images.width=4"],  # a wider one has minutes to compute in each look
    "reinforcement": ["steps=10", "episodes=1"],
    "scaling": ["net=GRU", "workers=[2]", "steps=2", "compute_ms=10"],
    "a3c": ["actors=2", "most_games=20"],
}
ALONE: dict[str, list[str]] = {
    "sizes": ["sizes=[4,65536,1048576]"],
    "minibatch": ["parts=[end_to_end]", "workers=[1]", "servers=[2]", "batch.GRU=1"],
}
"""On one host. Only over verbs: over tcp any machine can run them."""


def cases() -> list[Case]:
    both = ("verbs", "tcp")
    steps = [Case(f"srun: experiments.{name}", "no library left out", partial(step, name), both) for name in APPS]
    alone = [
        Case(f"one host: experiments.{name}", "no library left out", partial(by_itself, name), ("verbs",)) for name in ALONE
    ]
    return [
        *steps,
        *alone,
        Case("torchrun at each host: experiments.dlrm", "no library left out", by_torchrun, both),
        Case("hydra/launcher=submitit_slurm: experiments.grid", "no library left out", by_submitit, both),
    ]


def step(name: str, cluster: Cluster, device: str) -> tuple[str, float]:
    job = shlex.join([*_app(name, device), "cluster=slurm", f"hydra.run.dir={HOME}/apps/srun/{name}"])
    return _ran(cluster, device, f"srun/{name}", lambda run: run(f"srun -N2 --ntasks-per-node=1 --kill-on-bad-exit=1 {job}"))


def by_itself(name: str, cluster: Cluster, device: str) -> tuple[str, float]:
    job = shlex.join([*_app(name, device), f"hydra.run.dir={HOME}/apps/alone/{name}"])
    return _ran(cluster, device, f"alone/{name}", lambda run: run(job), hosts=1)


def by_submitit(cluster: Cluster, device: str) -> tuple[str, float]:
    python, flag, module, *options = _app("grid", device)
    launched = cluster_slurm.by_submitit(APP_S, "apps/submitit")  # its -m has to come before any override
    command = [python, flag, module, *launched, *options, "cluster=slurm"]
    return _ran(cluster, device, "submitit", lambda run: run(shlex.join(command)))


def by_torchrun(cluster: Cluster, device: str) -> tuple[str, float]:
    """As a user starts it: the same command at both hosts."""
    first, second = cluster.hosts
    meeting = [
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={first.address}:29400",
        "--rdzv-id=apps",
    ]
    job = [*_app("dlrm", device)[1:], "cluster=torchrun", f"hydra.run.dir={HOME}/apps/torchrun"]
    command = shlex.join([sys.executable, "-m", "torch.distributed.run", *meeting, *job])

    def launch(run: Callable[..., object]) -> None:
        other = second.start(command, APP_S, **_ENVIRONMENT)
        run(command)
        assert other.wait() == 0, other.output().decode()[-2000:]

    return _ran(cluster, device, "torchrun", launch)


def _app(name: str, device: str) -> list[str]:
    over = f"devices=[{device}]" if name in ("grid", "sizes") else f"device={device}"
    return [sys.executable, "-m", f"experiments.{name}", "quick=true", f"timeout_s={TURN_S}", over, *(APPS | ALONE)[name]]


_ENVIRONMENT = {**GENERIC, "MPLCONFIGDIR": "/run/matplotlib", "RDMARPC_SECRET": secrets.token_hex(32)}


def _ran(
    cluster: Cluster, device: str, folder: str, launch: Callable[[Callable[..., object]], object], hosts: int = 2
) -> tuple[str, float]:
    """``launch`` it, with the function that runs a command at the first host; what is judged is the result that it leaves below
    ``folder`` of ours in the shared one, and that the first ``hosts`` have sent by RDMA."""
    first: Host = cluster.hosts[0]
    seconds, packets = cluster_slurm.measured(cluster, lambda: launch(lambda command: first.sh(command, APP_S, **_ENVIRONMENT)))
    found = [path for path in sorted((cluster.home / "apps" / folder).rglob("*.json")) if path.parent.name != ".hydra"]
    assert len(found) == 1, f"one result expected: {found}"
    result: dict[str, Any] = json.loads(found[0].read_text())
    measured = result["samples"] if "samples" in result else result["records"]
    assert measured, "nothing was measured"
    assert not result["left_out"], f"left out: {result['left_out']}"
    if device == "verbs":
        assert all(count > 100 for count in packets[:hosts]), f"RDMA packets: {packets}"
    return f"{len(measured)} figures; RDMA packets {packets[0]} and {packets[1]}", seconds
