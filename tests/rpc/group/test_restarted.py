"""A launcher that starts all workers again and keeps the store: torchrun's ``--max-restarts``."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path

import programs
import pytest
import torch.distributed as dist

from rdmarpc import RpcBackendOptions
from rdmarpc.links.group import rendezvous
from rdmarpc.links.group.job_secret import Claim, claim
from rdmarpc.links.group.restarts import Restarts
from rdmarpc.transport import TransferTimeout

_pids = itertools.count(1 << 23)  # above every number that a process can have


def someone(rank: int) -> Claim:
    """The claim of a process that does not run."""
    mine, _ = claim(f"worker{rank}", rank, RpcBackendOptions())
    return replace(mine, pid=next(_pids))


def look(workers: list[Restarts]) -> list[bool]:
    return [worker.agreed() for worker in workers]


def life(store: dist.Store, order: list[int]) -> int:
    """Three workers that come one after the other, each of which looks often; the number that all of them agree on."""
    there: list[Restarts] = []
    for rank in order:
        there.append(Restarts(store, 3, someone(rank)))
        for _ in range(3):
            some = look(there)
            assert not any(some) or len(there) == 3
    while not all(look(there)):
        pass
    (number,) = {worker.number for worker in there}
    return number


@pytest.mark.parametrize("first", list(itertools.permutations(range(3))))
def test_every_life_meets_whoever_comes_first(first: tuple[int, ...]) -> None:
    store = dist.HashStore()
    assert [life(store, list(order)) for order in ([0, 1, 2], first, [2, 1, 0])] == [0, 1, 2]


@pytest.mark.parametrize("died", [[0], [1], [2], [0, 1], [1, 2], [2, 0], [0, 1, 2]])
@pytest.mark.parametrize("looks", [1, 2])
def test_a_life_that_was_never_complete_is_not_mistaken_for_the_next(died: list[int], looks: int) -> None:
    """Workers enter and die before all others have come; those of the next life come in any order."""
    for order in itertools.permutations(range(3)):
        store = dist.HashStore()
        early = [Restarts(store, 3, someone(rank)) for rank in died]
        for _ in range(looks):
            look(early)
        assert life(store, list(order)) == 1


def test_a_process_that_runs_keeps_its_rank() -> None:
    store = dist.HashStore()
    mine, _ = claim("worker0", 0, RpcBackendOptions())
    Restarts(store, 2, replace(mine, pid=os.getppid())).agreed()
    with pytest.raises(RuntimeError, match=rf"rank 0 is taken by worker0 \(process {os.getppid()}\)"):
        Restarts(store, 2, mine).agreed()


def test_missing_workers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    store = dist.HashStore()
    for rank in (0, 1):
        Restarts(dist.PrefixStore("rdmarpc/0", store), 2, someone(rank)).agreed()
    meeting = rendezvous.Rendezvous(store, 0, 2, 0.2)
    with pytest.raises(TransferTimeout, match="no sign of rank 1"):
        meeting.begin("worker0", RpcBackendOptions())


LAUNCHER = (
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node=2",
    "--max-restarts=2",
    "--monitor-interval=0.1",
)


def test_training_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    done = programs.run(*LAUNCHER, "examples/elastic.py", str(tmp_path))
    assert done.returncode == 0 and "goes on from step 8" in done.stdout, done.stdout
    assert "all 20 losses are those of one process: True" in done.stdout, done.stdout


def test_ddp_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    done = programs.run(*LAUNCHER, "examples/elastic_ddp.py", str(tmp_path))
    assert done.returncode == 0 and done.stdout.count("goes on from step 8") == 2, done.stdout
    assert done.stdout.count("all parameters are those of one process: True") == 2, done.stdout
