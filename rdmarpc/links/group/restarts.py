"""Which life of a static group this is, where a launcher starts all workers again and keeps the store: torchrun's
``--max-restarts``. The store then still holds what the workers of the earlier lives published.

``TORCHELASTIC_RESTART_COUNT`` does not tell: each host counts the failures that it saw itself, so that the counts of two hosts
differ. One fact holds instead: all workers of a life have ended before the first of the next one starts. So a worker that
finds its rank taken by another process belongs to a later life, and says so in the store; the workers that came before it and
had joined what was left of the earlier life follow it. A life counts once each of its workers has seen that it is complete,
which no worker that has ended can do.
"""

from __future__ import annotations

import json
import os

import torch.distributed as dist

from ...transport import process_runs
from .job_secret import Claim

_KEY = "lives"


def restarted_by_launcher() -> bool:
    return "TORCHELASTIC_RESTART_COUNT" in os.environ


def runs(claim: Claim, mine: Claim) -> bool | None:
    """Whether the process of a claim has not ended; None: its number says nothing here, on another host or in another
    container."""
    if (claim.host, claim.pids) != (mine.host, mine.pids):
        return None
    if claim.pid == mine.pid:
        return False  # an earlier process with our number
    return process_runs(claim.pid)


class Restarts:
    """One worker's look at the lives in the store. ``number``, ``missing``: as of the last call of ``agreed``."""

    def __init__(self, store: dist.Store, world_size: int, mine: Claim) -> None:
        self.number = 0
        self.missing = [f"rank {rank}" for rank in range(world_size)]
        self._store, self._size, self._mine = store, world_size, mine
        self._said = -1

    def agreed(self) -> bool:
        """Whether all workers are in one life, ours, and have seen that. Enters us where we are not in. Raises ``RuntimeError``
        if a process that runs on this host has our rank."""
        text = bytes(self._store.get(_KEY)).decode() if self._store.check([_KEY]) else ""
        number, there = json.loads(text) if text else (0, {})
        held = there.get(str(self._mine.rank))
        if held != self._mine.dump():
            if held is not None:
                if runs(first := Claim.load(held), self._mine):
                    raise RuntimeError(f"rank {first.rank} is taken by {first.name} (process {first.pid})")
                number, there = number + 1, {}
            there[str(self._mine.rank)] = self._mine.dump()
            self._store.compare_set(_KEY, text, json.dumps([number, there]))
            return False
        self.missing = [f"rank {rank}" for rank in range(self._size) if str(rank) not in there]
        if self.missing:
            return False
        if self._said != number:
            self._store.set(f"{number}/complete/{self._mine.rank}", "1")
            self._said = self.number = number
        said = [f"{number}/complete/{rank}" for rank in range(self._size)]
        if self._store.check(said):
            return True
        self.missing = [f"rank {rank}" for rank, key in enumerate(said) if not self._store.check([key])]
        return False
