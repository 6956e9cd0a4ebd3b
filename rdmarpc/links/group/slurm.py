"""The meeting place of the tasks of a SLURM step: what ``init_method="slurm://"`` stands for.

``srun`` tells each task its number, how many there are, and on which hosts. So nothing has to be exported by the script.
"""

from __future__ import annotations

import os
import re
from urllib.parse import urlparse

_FIRST_PORT, _PORTS = 20000, 12000  # below the ports that the kernel gives out by itself


def this_task(init_method: str = "slurm://") -> tuple[int, int, str]:
    """The task that this process is in its step: its rank, how many there are, and (an ``init_method``) where rank 0 runs the
    store. ``slurm://:PORT`` says which port of the first host to use; else the port follows from the numbers of job and step.
    Raises ``RuntimeError`` outside of a step."""
    try:
        rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_STEP_NUM_TASKS"])
        job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ["SLURM_STEP_ID"])
        host = first_host(os.environ["SLURM_STEP_NODELIST"])
    except KeyError as missing:
        raise RuntimeError(f"slurm://: {missing} is not set: this process was not started by srun") from None
    port = urlparse(init_method).port or _FIRST_PORT + (97 * job + step) % _PORTS
    return rank, world_size, f"tcp://{host}:{port}"


def first_host(nodes: str) -> str:
    """The first host of a list in SLURM's notation: ``rack[01-02,7]n[3-4],login`` -> ``rack01n3``. Task 0 runs there."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())
