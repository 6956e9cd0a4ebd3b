"""The processes that run one program of one library."""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import Any

from ..harness.processes import Launcher
from .tasks import PROGRAMS, WORKERS


def processes(program: str) -> int:
    """The stages of the pipeline; of the others, the workers and one more."""
    return WORKERS + (program != "pipeline")


def main(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A process from its first line to its last; rank 0 tells ("result", numbers)."""
    logging.captureWarnings(True)  # torch warns of its own deprecated parts
    warnings.simplefilter("ignore")
    program = importlib.import_module(f"{__package__}.{job['library']}.{job['program']}")
    result = program.run(rank, job["place"])
    if rank == 0:
        launcher.tell(("result", result))


def alone(program: str) -> list[float]:
    """What it must give: the same in one process."""
    return PROGRAMS[program]()
