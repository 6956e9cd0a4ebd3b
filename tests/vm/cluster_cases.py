"""`make vm-cluster`: two guests on one link are two hosts. RDMA crosses between them, every fault ends as documented, and a
SLURM trains over both.

    python tests/vm/cluster_cases.py [--device verbs] [--only TEXT ...]

Prints a table and ends with 0 only if every case was as expected.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import cluster_apps
import cluster_slurm
from cluster_faults import CASES, Case, Trio
from cluster_hosts import ROOT, Cluster, ThisMachine
from guest import GENERIC, GuestFailed
from image import Unavailable

EXPECTED = {"verbs": 36, "tcp": 32}
"""So many cases have to run: one that is left out is a failure."""


def crosses(cluster: Cluster, device: str) -> tuple[str, float]:
    """Without any of ours: the libibverbs and perftest of the distribution."""
    before = [host.rdma_counters() for host in cluster.hosts]
    client, server = cluster.hosts
    begin = time.monotonic()
    pong = server.start("ibv_rc_pingpong -g 1 -m 4096 -n 100")
    time.sleep(2.0)
    client.sh(f"ibv_rc_pingpong -g 1 -m 4096 -n 100 {server.address}")
    assert pong.wait() == 0, pong.output().decode()
    seconds = time.monotonic() - begin
    write = server.start("ib_write_bw -x 1 -d rxe0 -s 65536 -n 200 -F")
    time.sleep(3.0)
    output = client.sh(f"ib_write_bw -x 1 -d rxe0 -s 65536 -n 200 -F {server.address}")
    assert write.wait() == 0, write.output().decode()
    speed = float(re.findall(r"^ *65536 +\d+ +[\d.]+ +([\d.]+)", output, re.MULTILINE)[0])
    sent = client.rdma_counters()["sent_pkts"] - before[0]["sent_pkts"]
    received = server.rdma_counters()["rcvd_pkts"] - before[1]["rcvd_pkts"]
    assert sent > 200 * 16 and received > 200 * 16, f"{sent} RDMA packets sent, {received} received"
    return f"{sent} RDMA packets out, {received} in; ib_write_bw {speed:.0f} MB/s", seconds


def all_cases(device: str) -> list[Case]:
    """In their order: the last one leaves one host."""
    both = (device,)
    first = [Case("ibv_rc_pingpong, ib_write_bw", "RDMA crosses", crosses, both)]
    jobs = [
        Case("SLURM: controller and two nodes", "2 idle", cluster_slurm.start, both),
        Case("sbatch: srun python -m experiments.train", "equal bits", cluster_slurm.sbatch, both),
        Case("hydra/launcher=submitit_slurm", "equal bits", cluster_slurm.submitit, both),
    ]
    faults = [case for case in CASES if device in case.devices]
    apps = [case for case in cluster_apps.cases() if device in case.devices]
    return [*first, *faults[:-1], *jobs, *apps, faults[-1]]


def compile_kernels() -> None:
    """On this machine, so that the guests find them: each would take them 20 s."""
    with tempfile.TemporaryDirectory(prefix="rdmarpc-cluster-") as folder:
        options = ["device=tcp", "model=mlp", "epochs=1", "torch_rpc=false", f"hydra.run.dir={folder}/train"]
        environment = {**os.environ, **GENERIC}
        for program in (
            ["-m", "experiments.train", *options],
            ["-c", "from rdmarpc.tools.doctor import compile_kernels; compile_kernels()"],
        ):
            command = [sys.executable, *program]
            subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=600, stdout=subprocess.DEVNULL)
        here = ThisMachine(Path(folder))
        try:
            trio = Trio((here, here), "tcp")
            trio.writes()
            trio.end()
        finally:
            here.close()


def run(case: Case, cluster: Cluster, device: str) -> tuple[bool, str, float]:
    """Whether it was as expected, what came, seconds."""
    try:
        came, seconds = case.run(cluster, device)
    except Exception as error:
        traceback.print_exc()
        for host in cluster.hosts:
            host.end_peers()
        cluster.trio = None
        return False, f"{type(error).__name__}: {error}".splitlines()[0], 0.0
    return True, came, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="verbs", choices=sorted(EXPECTED))
    parser.add_argument("--only", default=[""], nargs="+", metavar="TEXT", help="the cases with one of these in their names")
    asked = parser.parse_args()
    cases = [case for case in all_cases(asked.device) if any(text in case.name for text in asked.only)]
    begin = time.monotonic()
    rows: list[tuple[bool, Case, str, float]] = []
    try:
        cluster_slurm.install()
        compile_kernels()
        with Cluster() as cluster:
            kernel = cluster.hosts[0].sh("uname -r").strip()
            accel, seconds = cluster.hosts[0].guest.accel, time.monotonic() - begin
            print(f"two guests ({accel}, Linux {kernel}) are ready after {seconds:.0f} s", flush=True)
            for case in cases:
                good, came, seconds = run(case, cluster, asked.device)
                rows.append((good, case, came, seconds))
                print(f"{'ok  ' if good else 'FAIL'} {case.name}: {came} ({seconds:.1f} s)", flush=True)
    except (GuestFailed, Unavailable) as error:
        print(error, file=sys.stderr)
        return 1
    print(table(rows))
    wanted = EXPECTED[asked.device] if asked.only == [""] else len(cases)
    good = sum(row[0] for row in rows)
    print(f"{good} of {len(rows)} cases over {asked.device} as expected, {wanted} have to be; {time.monotonic() - begin:.0f} s")
    return 0 if good == len(rows) == wanted else 1


def table(rows: list[tuple[bool, Case, str, float]]) -> str:
    lines = [("", "case", "expected", "got", "s")]
    lines += [
        ("ok" if good else "FAIL", case.name, case.expected, came, f"{seconds:.1f}") for good, case, came, seconds in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    return "\n".join("  ".join(f"{cell:{width}}" for cell, width in zip(line, widths)).rstrip() for line in lines)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
