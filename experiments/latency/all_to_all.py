"""Many workers on this machine that all call each other at once: calls without tensors, counted for some seconds.

A worker has one call to each of the others in flight, waits for all of them, and begins again. The workers of rdmarpc and
those of torch RPC take turns, and the others are stopped in between.
"""

import importlib
import logging
import time
from typing import Any

import psutil

from ..harness.measure import Samples, nothing
from ..harness.processes import Group, Launcher

# By name, because a worker imports the one that it needs.
OURS, THEIRS = "rdmarpc", "torch.distributed.rpc"


SHM_PAIR_BYTES = 20 << 20
"""The bytes that TensorPipe's shared-memory transport takes for each pair of a worker and one that it calls."""
WORKER_BYTES = 200 << 20
"""The further bytes that each worker takes."""


def torch_transport(workers: int) -> str:
    """TensorPipe's transport that this machine has the memory for: "shm", its first choice, or "uv" (sockets)."""
    needed = 2 * workers * WORKER_BYTES + workers * (workers - 1) * SHM_PAIR_BYTES
    return "shm" if needed < psutil.virtual_memory().available else "uv"


def groups(workers: int) -> list[Group]:
    return [Group("rdmarpc", ours, workers, freeze=True), Group("torch RPC", theirs, workers, freeze=True)]


def ours(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A worker from its first line to its last; worker0 tells ("progress", text) and ("measured", records)."""
    rpc = importlib.import_module(OURS)
    meeting = f"file://{job['meeting_place']}/all_to_all_rdmarpc"
    options = rpc.RpcBackendOptions(init_method=meeting, rpc_timeout=job["timeout_s"], transport=job["device"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=job["all_to_all"], rpc_backend_options=options)
    if rank == 0:
        measure(OURS, "rdmarpc", job, launcher)
    rpc.shutdown()


def theirs(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """The same over torch RPC."""
    logging.captureWarnings(True)  # torch warns of its own deprecated parts
    rpc = importlib.import_module(THEIRS)
    meeting = f"file://{job['meeting_place']}/all_to_all_torch_rpc"
    transports = ["uv"] if job["all_to_all_torch"] == "uv" else None  # None: all, the best first
    limit_s = job["timeout_s"]
    options = rpc.TensorPipeRpcBackendOptions(init_method=meeting, rpc_timeout=limit_s, _transports=transports)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=job["all_to_all"], rpc_backend_options=options)
    if rank == 0:
        measure(THEIRS, "torch_rpc", job, launcher)
    rpc.shutdown()


def measure(module: str, what: str, job: dict[str, Any], launcher: Launcher) -> None:
    """All rounds, as worker0 drives them."""
    workers = job["all_to_all"]
    samples = Samples()
    launcher.tell(("progress", f"{workers} workers of {module} connect"))
    calls_per_s(module, workers, 0)
    for number in range(job["rounds"]):
        launcher.wait_for_turn()
        launcher.tell(("progress", f"{workers} workers, all to all, round {number + 1}"))
        samples.add("all_to_all", workers, what, calls_per_s(module, workers, job["all_to_all_s"]))
    launcher.tell(("measured", samples.records()))


def calls_per_s(module: str, workers: int, seconds: float) -> float:
    """Calls a second of all workers together, from the first one's start to the last one's end."""
    layer = importlib.import_module(module)
    others = [layer.rpc_async(f"worker{rank}", call_all, args=(module, rank, workers, seconds)) for rank in range(1, workers)]
    told = [call_all(module, 0, workers, seconds), *(other.wait() for other in others)]
    calls, begins, ends = zip(*told)
    return sum(calls) / (max(ends) - min(begins))


def call_all(module: str, me: int, workers: int, seconds: float) -> tuple[int, float, float]:
    """Calls all others, again and again for some seconds, at least once: number of calls, begin and end by the host's clock."""
    layer = importlib.import_module(module)
    names = [f"worker{(me + distance) % workers}" for distance in range(1, workers)]
    calls, begin = 0, time.monotonic()
    while True:
        pending = [layer.rpc_async(name, nothing) for name in names]
        for future in pending:
            future.wait()
        calls += len(pending)
        if (end := time.monotonic()) - begin >= seconds:
            return calls, begin, end
