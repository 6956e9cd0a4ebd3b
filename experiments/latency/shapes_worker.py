"""A process of one of the programs: it joins the group of one library, runs its part and leaves."""

from __future__ import annotations

import importlib
import time
from typing import Any

import torch

from ..harness.libraries import TENSORPIPE
from ..harness.meeting import init_method
from ..harness.processes import Launcher


def library(job: dict[str, Any]) -> Any:
    return importlib.import_module("rdmarpc" if job["library"] == "rdmarpc" else "torch.distributed.rpc")


def join(rpc: Any, rank: int, job: dict[str, Any], name: str) -> None:
    """Be the worker ``name`` of ``job["processes"]`` workers."""
    common = {
        "init_method": init_method(rank, job),
        "num_worker_threads": max(16, 2 * job["processes"]),
        "rpc_timeout": job["timeout_s"],
    }
    if job["library"] == "rdmarpc":
        options = rpc.RpcBackendOptions(transport=job["device"], **common)
    else:
        options = rpc.TensorPipeRpcBackendOptions(**TENSORPIPE[job["device"]], **common)
    rpc.init_rpc(name, rank=rank, world_size=job["processes"], rpc_backend_options=options)


def main(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """Rank 0 tells ("figures", ...) of its case, and ("results", {name: bytes})."""
    program: Any = importlib.import_module(f".{job['program']}", __package__)
    program.rpc = library(job)  # before others can call
    join(program.rpc, rank, job, program.name_of(rank, job))
    found = program.run(rank, job)
    program.rpc.shutdown()
    if rank == 0:
        figures, results = found
        case, size = job["case"], job["processes"]
        launcher.tell(("figures", [(f"{case}: {name}", size, value) for name in figures for value in figures[name]]))
        launcher.tell(("results", results))


def as_bytes(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """What can be compared bit for bit in another process."""
    return {name: tensor.detach().contiguous().numpy().tobytes() for name, tensor in tensors.items()}


class Stopwatch:
    """Milliseconds between calls of ``lap``."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self._begin = time.perf_counter()

    def start(self) -> None:
        self._begin = time.perf_counter()

    def lap(self) -> None:
        self.samples.append(1e3 * (time.perf_counter() - self._begin))
