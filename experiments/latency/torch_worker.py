"""The workers of the benchmark that stand for torch RPC (TensorPipe): the same cases in the same turns."""

import logging
import os
from typing import Any

import torch
import torch.distributed.rpc as rpc

from ..harness.measure import IDLE_PARTS, LARGE, Samples, calls_per_s, identity, idle_percent, nothing, per_iteration, window
from ..harness.processes import Launcher
from .cells import CELLS, turns

CALLS = 2_000


def main(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A worker from its first line to its last; worker0 tells ("measured", samples)."""
    logging.captureWarnings(True)  # torch warns of its own deprecated parts
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{job['meeting_place']}/torch_rpc", rpc_timeout=0)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        measure(job, launcher)
    rpc.shutdown()


def measure(job: dict[str, Any], launcher: Launcher) -> None:
    """The benchmark as worker0 drives it."""
    samples = Samples()
    for size in job["sizes"]:
        x = torch.ones(size, dtype=torch.uint8)
        for _ in range(job["rounds"]):
            launcher.wait_for_turn()
            measure_size(x, samples)
    for case, size, _ in turns(job):
        launcher.wait_for_turn()
        for name, us in CELLS[case](rpc, torch.ones(size, dtype=torch.uint8), iterations(size)).items():
            samples.add(name, size, "torch_rpc", us)
    for in_flight in job["targets"]["calls"]:
        for _ in range(job["rounds"]):
            launcher.wait_for_turn()
            samples.add("calls", in_flight, "torch_rpc", calls_per_s(rpc, in_flight, CALLS))
    launcher.wait_for_turn()
    idle = rpc.rpc_sync("worker1", os.getpid)
    for _ in range(IDLE_PARTS):
        samples.add("idle", 0, "torch_rpc", idle_percent(idle, job["idle_s"] / IDLE_PARTS))
    launcher.tell(("measured", samples.records()))


def measure_size(x: torch.Tensor, samples: Samples) -> None:
    """One round at one size."""
    size = x.numel()
    times = iterations(size)
    push_us = per_iteration(lambda: rpc.rpc_sync("worker1", nothing, args=(x,)), times)
    samples.add("one_way", size, "torch_rpc", push_us)
    call_us = per_iteration(lambda: rpc.rpc_sync("worker1", identity, args=(x,)), times)
    samples.add("identity", size, "torch_rpc", call_us)
    if size >= LARGE:
        pushes_us = per_iteration(lambda: window(lambda: rpc.rpc_async("worker1", nothing, args=(x,)), 2, times), 1)
        samples.add("stream", size, "torch_rpc", pushes_us / times)


def iterations(size: int) -> int:
    """How often a case runs in a round."""
    return min(200, max(3, int(3e8) // size))
