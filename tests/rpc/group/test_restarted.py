"""A launcher that starts all workers again and keeps the store: torchrun's ``--max-restarts``."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import programs
import pytest
import torch.distributed as dist

from rdmarpc import RpcBackendOptions
from rdmarpc.links.group import meeting, members
from rdmarpc.links.group.meeting import Again, Meeting, Rendezvous
from rdmarpc.transport import TransferTimeout

_pids = itertools.count(1 << 23)  # above every number that a process can have


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torchrun; and every worker here counts as a process of its own, which does not run."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(meeting, "_FIRST_LOOK_S", 0.001)
    claim = members.claim

    def someones(*given: object) -> tuple[members.Claim, bytes]:
        mine, secret = claim(*given)  # type: ignore[arg-type]
        return replace(mine, pid=next(_pids)), secret

    monkeypatch.setattr(meeting, "claim", someones)


class Worker(Meeting):
    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(store, rank, range(size), str(size), 20.0)
        self.claim(f"worker{rank}", RpcBackendOptions())

    def meet(self) -> None:
        while True:
            try:
                self.begin()
                self.all("worker", "")
                return
            except Again:
                continue


def life(store: dist.Store, order: Sequence[int], looks: float = 0.01) -> str:
    """Workers that come one after the other, each of which waits for the others; where in the store all of them meet."""
    there = []
    for rank in order:
        assert not any(thread.join(looks) for _, thread in there) and all(thread.is_alive() for _, thread in there)
        worker = Worker(store, rank, len(order))
        there.append((worker, threading.Thread(target=worker.meet)))
        there[-1][1].start()
    for _, thread in there:
        thread.join(20)
    assert not any(thread.is_alive() for _, thread in there)
    (place,) = {worker.digest for worker, _ in there}
    return place


@pytest.mark.parametrize("first", list(itertools.permutations(range(3))))
def test_every_life_meets_whoever_comes_first(first: tuple[int, ...]) -> None:
    store = dist.HashStore()
    assert len({life(store, order) for order in ([0, 1, 2], first, [2, 1, 0])}) == 3


@pytest.mark.parametrize("died", [[0], [1], [2], [0, 1], [1, 2], [2, 0], [0, 1, 2]])
@pytest.mark.parametrize("seen", [False, True])
def test_a_life_that_was_never_complete_is_not_mistaken_for_the_next(died: list[int], seen: bool) -> None:
    """Workers enter and die before all others have come; those of the next life come in any order."""
    for order in itertools.permutations(range(3)):
        store = dist.HashStore()
        early = [Worker(store, rank, 3) for rank in died]
        if seen and len(early) == 3:
            for each in early[1:]:
                each.begin()
                each.tell(f"worker/{each.rank}", "")
        life(store, order, 0.001)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_a_life_of_more_or_fewer_workers(before: int, after: int) -> None:
    """A worker that had not been there before took the others of the earlier life for those that it waited for."""
    store = dist.HashStore()
    for rank in range(before):
        Rendezvous(store, rank, before, 20.0).claim(f"worker{rank}", RpcBackendOptions())
    there = [Rendezvous(store, rank, after, 20.0) for rank in reversed(range(after))]
    for each in there:
        each.claim(f"worker{each.rank}", RpcBackendOptions())
        if each is there[0]:
            each.timeout = 0.2
            with pytest.raises(TransferTimeout, match="no sign of rank 0"):
                each.begin()
    assert [each.begin() for each in there] == [b""] * after


def test_a_process_that_runs_keeps_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    store, of_pid = dist.HashStore(), next(_pids)
    monkeypatch.setattr(meeting, "process_runs", lambda pid: pid == of_pid + 1)
    Worker(store, 0, 2)
    with pytest.raises(RuntimeError, match=rf"rank 0 is taken by worker0 \(process {of_pid + 1}\)"):
        Worker(store, 0, 2)


def test_missing_workers_are_named() -> None:
    store = dist.HashStore()
    for rank in (0, 1):
        Worker(store, rank, 2)
    with pytest.raises(TransferTimeout, match="no sign of rank 1"):
        late = Worker(store, 0, 2)
        late.timeout = 0.2
        late.meet()


def test_training_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    done = programs.run("tests/helpers/restarts.py", "examples/elastic.py", str(tmp_path))
    assert done.returncode == 0 and "goes on from step 8" in done.stdout, done.stdout
    assert "all 20 losses are those of one process: True" in done.stdout, done.stdout


def test_ddp_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    done = programs.run("tests/helpers/restarts.py", "examples/elastic_ddp.py", str(tmp_path))
    assert done.returncode == 0 and done.stdout.count("goes on from step 8") == 2, done.stdout
    assert done.stdout.count("all parameters are those of one process: True") == 2, done.stdout
