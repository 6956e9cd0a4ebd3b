"""Where the processes of a turn find each other, and where its clients wait for each other outside of the library that is
measured."""

import socket
import time
from pathlib import Path
from typing import Any


def init_method(rank: int, job: dict[str, Any], name: str = "store") -> str:
    """That of the group ``name``, which has one such group in a turn: a file. Over several hosts rank 0 opens a port and writes
    its address into the folder instead: a store in a file needs locks, which seldom hold between hosts. Raises RuntimeError
    if rank 0 has not come after ``job["timeout_s"]``."""
    place = Path(job["meeting_place"])
    if "address" not in job:
        return f"file://{place / name}"
    said = place / f"{name}.address"
    if rank == 0:
        with socket.create_server(("", 0)) as free:
            text = f"tcp://{job['address']}:{free.getsockname()[1]}"
        hidden = place / f".{name}.address"
        hidden.write_text(text)
        hidden.rename(said)
    _wait([said], job["timeout_s"], f"rank 0 did not come to the group {name!r}")
    return said.read_text()


def meet(name: str, job: dict[str, Any]) -> None:
    """Wait until all clients have called this with the same ``name``, which is good for once. Raises RuntimeError after
    ``job["timeout_s"]``."""
    place = Path(job["meeting_place"])
    (place / f"{name}{job['rank']}").touch()
    clients = [place / f"{name}{rank}" for rank in range(job["clients"])]
    _wait(clients, job["timeout_s"], f"not every client came to {name}")


def _wait(paths: list[Path], timeout_s: float, otherwise: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            raise RuntimeError(otherwise)
        time.sleep(0.002)
