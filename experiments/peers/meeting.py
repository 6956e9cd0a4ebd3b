"""Where the clients of a turn wait for each other outside of the library that is measured."""

import time
from pathlib import Path
from typing import Any


def meet(name: str, job: dict[str, Any]) -> None:
    """Wait until all clients have called this with the same ``name``, which is good for once. Raises RuntimeError after
    ``job["timeout_s"]``."""
    place = Path(job["meeting_place"])
    (place / f"{name}{job['rank']}").touch()
    deadline = time.monotonic() + job["timeout_s"]
    while not all((place / f"{name}{rank}").exists() for rank in range(job["clients"])):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not every client came to {name}")
        time.sleep(0.002)
