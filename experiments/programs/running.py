"""The processes that run one program of one library."""

from __future__ import annotations

import importlib
import os
from typing import Any

from ..harness.processes import Launcher
from .tasks import PROGRAMS, WORKERS


def processes(program: str) -> int:
    """The stages of the pipeline; of the others, the workers and one more."""
    return WORKERS + (program != "pipeline")


def main(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A process from its first line to its last; rank 0 tells how far its result is from that of one process."""
    program = importlib.import_module(f"{__package__}.{job['library']}.{job['program']}")
    os.chdir(job["meeting_place"])
    # gRPC's programs listen to Unix sockets there, whose paths must be short.
    result = program.run(rank, "." if job["library"] == "grpc" else job["meeting_place"])
    if rank == 0:
        launcher.tell(("figures", [(f"{job['program']}: apart from one process", 0, apart(job["program"], result))]))


def apart(program: str, result: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(result, PROGRAMS[program](), strict=True))
