"""Where the processes of a turn find each other, and where its clients wait for each other outside of the library that is
measured."""

import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from . import notes


def init_method(rank: int, job: dict[str, Any], name: str = "store") -> str:
    """That of the group ``name``, which has one such group in a turn: a file. On several hosts the store of the turn, which no
    process of it keeps (``Hosts.turn``): a store in a file needs locks, which seldom hold between hosts."""
    if "store" not in job:
        return f"file://{Path(job['meeting_place']) / name}"
    # For torch and rdmarpc: rank 0, too, is a client of the store.
    url = urlparse(job["store"])
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": str(url.hostname), "MASTER_PORT": str(url.port)}
    return job["store"]


def meet(name: str, job: dict[str, Any]) -> None:
    """Wait until all clients have called this with the same ``name``, which is good for once. Raises RuntimeError after
    ``job["timeout_s"]``."""
    place = Path(job["meeting_place"])
    (place / f"{name}{job['rank']}").touch()
    deadline = time.monotonic() + job["timeout_s"]
    for rank in range(job["clients"]):
        notes.wait_for(place / f"{name}{rank}", deadline, f"not every client came to {name}")
