"""An app on several hosts (``cluster=slurm``, ``cluster=torchrun``): the launcher of the cluster starts the same app once on
each of them as a task, and each task starts its share of the processes of every turn.

The tasks see one folder, which the run's folder is, and meet in it: nobody goes on before all have said how a turn ended.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from . import notes

FOLDER = ".hosts"
GRACE_S = 60.0
"""So much longer than a turn may take do tasks wait for each other."""


def task_of(job: dict[str, Any]) -> tuple[int, int] | None:
    """The number of this task and how many there are; `None` for ``cluster=here``. Ends the program where it cannot be one."""
    kind = job.get("cluster", "here")
    if kind == "here":
        return None
    from .launched import task

    found = task()
    if found is None:
        how = "srun, with several tasks" if kind == "slurm" else "torchrun"
        raise SystemExit(f"error: cluster={kind}: this process was not started by {how}")
    if job["device"] == "shm":
        raise SystemExit(f"error: cluster={kind} device=shm: shared memory reaches one host only")
    if not os.environ.get("RDMARPC_SECRET"):
        raise SystemExit(f"error: cluster={kind} needs RDMARPC_SECRET, the same at all hosts: openssl rand -hex 32")
    return found.rank, found.world_size


class Hosts:
    """This task among all of them."""

    def __init__(self, number: int, count: int, folder: Path, timeout_s: float) -> None:
        """``timeout_s``: of the longest turn. Task 0 ends the program if ``folder`` has what an earlier run left; the launcher
        then ends the others."""
        self.number, self.count = number, count
        self.first = number == 0
        self.address = {"address": socket.gethostname(), "bind": "0.0.0.0"}
        """Where servers of gRPC of this host are found, and what they listen on."""
        self._place, self._limit_s = folder / FOLDER, timeout_s + GRACE_S
        self._met = 0
        self._store: TCPStore | None = None
        if self.first:
            try:
                self._place.mkdir(parents=True)
            except FileExistsError:
                raise SystemExit(f"error: {self._place} is of another run: choose another hydra.run.dir") from None
        elif not _until(self._place.exists, self._limit_s):
            raise SystemExit(f"error: task 0 of {count} made no {self._place}: all tasks need one folder")

    def mine(self, processes: int) -> list[int]:
        """Which ranks of so many run here."""
        return list(range(self.number, processes, self.count))

    def turn(self) -> dict[str, Any]:
        """Where the processes of the turn meet that begins now: a folder, and a store of torch. Task 0 keeps the store until
        the next turn: kept by a process of the turn, it would be gone while slower ones still leave their groups."""
        place = self._place / f"turn{self._met}"
        place.mkdir(exist_ok=True)
        said = place / "store"
        if self.first:
            self._store = TCPStore(self.address["address"], 0, is_master=True, wait_for_workers=False)
            notes.write(said, f"tcp://{self.address['address']}:{self._store.port}")
        store = notes.wait_for(said, time.monotonic() + self._limit_s, "task 0 opened no store").read_text()
        return {"meeting_place": str(place), "store": store}

    def agree(self, about: str, reason: str) -> str:
        """Wait until all tasks have said this. Returns all reasons, each once. Ends the program if a task does not come, or
        comes with something else: hosts may differ in memory or packages, so that they leave out other turns."""
        self._met += 1
        notes.write(self._place / f"{self._met}-{self.number}", f"{about}\n{reason}")
        said = [self._said(number, about) for number in range(self.count)]
        return "; ".join(dict.fromkeys(each for each in said if each))

    def _said(self, number: int, about: str) -> str:
        path = self._place / f"{self._met}-{number}"
        if not _until(path.exists, self._limit_s):
            raise SystemExit(f"error: task {number} of {self.count} did not come to: {about}")
        theirs, _, reason = path.read_text().partition("\n")
        if theirs != about:
            raise SystemExit(f"error: task {number} of {self.count} is at {theirs!r} while task {self.number} is at {about!r}")
        return reason

    def leave(self) -> None:
        """After the last turn; nothing stays of the folder."""
        self.agree("the end", "")
        if not self.first:
            notes.write(self._place / f"left{self.number}", "")
            return
        for number in range(1, self.count):
            _until((self._place / f"left{number}").exists, GRACE_S)
        shutil.rmtree(self._place, ignore_errors=True)


def _until(true: Callable[[], bool], limit_s: float) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
