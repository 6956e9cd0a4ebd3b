"""Where the processes of a turn find each other, and where its clients wait for each other outside of the library that is
measured."""

import socket
import time
from pathlib import Path
from typing import Any

from ..harness import notes


def init_method(rank: int, job: dict[str, Any], name: str = "store") -> str:
    """That of the group ``name``, which has one such group in a turn: a file. Where processes have addresses of their own, on
    several hosts or networks, rank 0 opens a port and writes its address in the folder instead: a store in a file needs locks,
    which seldom hold between hosts. Raises RuntimeError if rank 0 has not come after ``job["timeout_s"]``."""
    place = Path(job["meeting_place"])
    if "address" not in job:
        return f"file://{place / name}"
    said = place / f"{name}.address"
    if rank == 0:
        with socket.create_server(("", 0)) as free:
            notes.write(said, f"tcp://{job['address']}:{free.getsockname()[1]}")
    deadline = time.monotonic() + job["timeout_s"]
    return notes.wait_for(said, deadline, f"rank 0 did not come to the group {name!r}").read_text()


def meet(name: str, job: dict[str, Any]) -> None:
    """Wait until all clients have called this with the same ``name``, which is good for once. Raises RuntimeError after
    ``job["timeout_s"]``."""
    place = Path(job["meeting_place"])
    (place / f"{name}{job['rank']}").touch()
    deadline = time.monotonic() + job["timeout_s"]
    for rank in range(job["clients"]):
        notes.wait_for(place / f"{name}{rank}", deadline, f"not every client came to {name}")
