"""A SLURM over the two hosts, and jobs in it as a user starts them.

Debian's slurm-wlm: controller and a node on the first host, a node on the second; everything it writes is in the guests'
memory, but for its configuration and key, which lie in the shared folder.
"""

from __future__ import annotations

import json
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

from cluster_hosts import HOME, Cluster
from guest import GENERIC
from image import Unavailable

PACKAGES = ("slurm-wlm", "munge")
START_S = 240.0
JOB_S = 900.0
EPOCHS = 1

# Patience is for hosts where a program needs a minute to start. What is not about time is what a small cluster has; a real one
# would have cgroups, accounts and a user for the controller.
CONF = """\
ClusterName=rdmarpc
SlurmctldHost=n1(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/builtin
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile=/run/slurm/log
SlurmdLogFile=/run/slurm/log
SlurmctldTimeout=600
SlurmdTimeout=600
MessageTimeout=100
TCPTimeout=30
BatchStartTimeout=120
KillWait=10
NodeName=n1 NodeAddr=10.77.0.1 CoresPerSocket={cpus} State=UNKNOWN
NodeName=n2 NodeAddr=10.77.0.2 CoresPerSocket={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

# Nothing here uses cgroups, but slurmd wants to load a plugin for them, and that for v1 does not mind that there are none.
CGROUP_CONF = "CgroupPlugin=cgroup/v1\n"

SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --output={output}
srun --kill-on-bad-exit=1 {job}
"""


def install() -> None:
    """What a host of a cluster has, where we may install it; else ``Unavailable`` with the command."""
    if shutil.which("slurmctld") and shutil.which("munged"):
        return
    command = (
        f"apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends {' '.join(PACKAGES)}"
    )
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise Unavailable(f"there is no SLURM here: `{command}` failed: {done.stderr[-800:]}")


def start(cluster: Cluster, device: str) -> tuple[str, float]:
    """Until both nodes are idle."""
    folder = cluster.home / "slurm"
    folder.mkdir()
    (folder / "slurm.conf").write_text(CONF.format(cpus=cluster.hosts[0].sh("nproc").strip()))
    (folder / "cgroup.conf").write_text(CGROUP_CONF)
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    begin = time.monotonic()
    for host in cluster.hosts:
        host.sh(
            # Copied, because munged refuses a key in a folder that others may write to.
            "mkdir -p /run/slurm/state /run/slurm/spool /run/munge && chmod 700 /run/slurm && chmod 755 /run/munge"
            f" && cp {HOME}/slurm/munge.key /run/slurm/ && chmod 600 /run/slurm/munge.key"
            f" && cp {HOME}/slurm/slurm.conf {HOME}/slurm/cgroup.conf /etc/slurm/"
            " && munged --force --key-file=/run/slurm/munge.key --pid-file=/run/munge/munged.pid"
            " --log-file=/run/slurm/munged.log --seed-file=/run/slurm/munge.seed"
        )
    cluster.hosts[0].sh("slurmctld")
    for host in cluster.hosts:
        host.sh(f"slurmd -N {host.name}")
    while "2 idle" not in (seen := cluster.hosts[0].sh("sinfo -h -o '%D %t'")):
        if time.monotonic() > begin + START_S:
            logs = "\n".join(host.sh("tail -n 20 /run/slurm/log") for host in cluster.hosts)
            raise AssertionError(f"the nodes are not idle within {START_S:g} s: {seen}{logs}")
        time.sleep(0.5)
    return "2 idle", time.monotonic() - begin


def sbatch(cluster: Cluster, device: str) -> tuple[str, float]:
    """The script of ``docs/clusters.md``: ``srun python -m experiments.train device=verbs``."""
    job = shlex.join(_training(device, f"hydra.run.dir={HOME}/sbatch/result"))
    folder = cluster.home / "sbatch"
    folder.mkdir()
    (folder / "job.sh").write_text(SCRIPT.format(output=f"{HOME}/sbatch/job.out", job=job))
    wait = f"sbatch --wait {HOME}/sbatch/job.sh; status=$?; cat {HOME}/sbatch/job.out; exit $status"
    return _trained(cluster, device, "sbatch", wait)


def submitit(cluster: Cluster, device: str) -> tuple[str, float]:
    """The same through hydra's launcher, which writes such a script and waits for the job."""
    command = shlex.join(_training(device, *by_submitit(JOB_S, "submitit")))
    return _trained(cluster, device, "submitit", command)


def by_submitit(limit_s: float, folder: str) -> list[str]:
    """Overrides for a job of both hosts that leaves its result in ``folder`` of the shared one."""
    options = {"nodes": 2, "tasks_per_node": 1, "timeout_min": int(limit_s // 60)}
    chosen = [f"hydra.launcher.{name}={value}" for name, value in options.items()]
    return ["-m", "hydra/launcher=submitit_slurm", *chosen, f"hydra.sweep.dir={HOME}/{folder}"]


def measured(cluster: Cluster, run: Callable[[], object]) -> tuple[float, list[int]]:
    """How many seconds that took, and how many RDMA packets each host has sent."""
    before = [host.rdma_counters() for host in cluster.hosts]
    begin = time.monotonic()
    run()
    seconds = time.monotonic() - begin
    return seconds, [host.rdma_counters()["sent_pkts"] - first["sent_pkts"] for host, first in zip(cluster.hosts, before)]


def _training(device: str, *overrides: str) -> list[str]:
    fixed = [f"device={device}", "model=mlp", f"epochs={EPOCHS}", "rpc_timeout_s=300"]
    return [sys.executable, "-m", "experiments.train", *overrides, *fixed]


def _trained(cluster: Cluster, device: str, folder: str, command: str) -> tuple[str, float]:
    """Run it on the first host; what is judged is the result that it leaves below ``folder`` of the shared one."""
    environment = {**GENERIC, "MPLCONFIGDIR": "/run/matplotlib", "RDMARPC_SECRET": secrets.token_hex(32)}
    seconds, packets = measured(cluster, lambda: cluster.hosts[0].sh(command, JOB_S, **environment))
    found = sorted((cluster.home / folder).rglob("result.json"))
    assert len(found) == 1, f"one result expected: {found}"
    result = json.loads(found[0].read_text())
    assert result["config"]["workers"] == 2 and set(result["config"]["placement"].values()) == {"worker0", "worker1"}
    assert result["equal_to_single_process"]["rdmarpc"], "losses differ from those of a single process"
    counters = result["counters"]
    assert counters["registrations"] == counters["rpc_messages"] == 0, f"in the steady state: {counters}"
    if device != "verbs":  # there what lies outside the arena, small activations and gradients, is staged once
        assert counters["bytes_staged"] == 0, f"in the steady state: {counters}"
    if device == "verbs":
        assert all(count > counters["steps"] for count in packets), f"RDMA packets of {counters['steps']} steps: {packets}"
    return f"{counters['steps'] + 1} steps, equal bits; RDMA packets {packets[0]} and {packets[1]}", seconds
