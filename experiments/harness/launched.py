"""Workers that another launcher has started, one a task, on any hosts: `srun`, `torchrun`, or submitit through `srun`.

This process is then one worker of the job, and the launcher of the cluster looks after it: it ends the others when one
fails, and knows how long the job may take.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .processes import Launcher, OnEvent


class Task(NamedTuple):
    """One worker of a job: its rank, how many there are, and where they meet."""

    rank: int
    world_size: int
    init_method: str


def task() -> Task | None:
    """The task of this process among the workers; `None` if this process has to start the workers itself."""
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks > 1:  # 1: the shell of `sbatch` and `salloc`
        return Task(int(os.environ["SLURM_PROCID"]), tasks, "slurm://")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return Task(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
    return None


class Alone(Launcher):
    """The launcher of a worker that none of our launchers started: events go to `on_event`, and it is always its turn."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event

    def tell(self, event: tuple[Any, ...]) -> None:
        self._on_event("rdmarpc", event)

    def wait_for_turn(self) -> None: ...


def run_here(main: Callable[[int, dict[str, Any], Launcher], None], task: Task, job: dict[str, Any], on_event: OnEvent) -> None:
    """Be this worker until it has ended; raises what it raises."""
    torch.set_num_threads(1)  # as for workers of our own, so that sums have one order
    main(task.rank, job | {"init_method": task.init_method}, Alone(on_event))
