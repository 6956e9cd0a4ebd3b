"""Groups across two jobs, made again with a new process in the place of a killed one: a number is not a process."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group import Meeting, results, run_group
from torch.distributed import distributed_c10d as c10d

SOON = timedelta(seconds=int(os.environ.get("TEST_LIMIT", "40")))
TRAINERS = 2


def _by_hand(meeting: Meeting, rank: int, name: str, size: int = 2) -> Any:
    """As frameworks of reinforcement learning make it."""
    store = dist.PrefixStore(name, dist.FileStore(f"{meeting._place}-hand", -1))
    made = c10d._new_process_group_helper(size, rank, [], "rdmarpc", store, group_name=name, timeout=SOON)
    group = made[0]
    c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}
    return group


def _trainer(meeting: Meeting, names: list[str]) -> list[float]:
    """Rank 1 of the job has the number of the engine in the groups of the two jobs."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"  # torchrun has started the trainers, and not the engines
    store = dist.FileStore(f"{meeting._place}-job", -1)
    dist.init_process_group("rdmarpc", store=store, rank=meeting.rank, world_size=TRAINERS, timeout=SOON)
    found = []
    for number, name in enumerate(names):
        if meeting.rank == 0:
            group = _by_hand(meeting, 0, name)
            x = torch.full((5,), 1.0 + number)
            dist.all_reduce(x, group=group)
            found.append(x[0].item())
            meeting.say(f"kill/{number}")
            with pytest.raises(RuntimeError, match="rank 1 was lost"):
                while True:
                    dist.broadcast(x, 0, group=group)
            dist.destroy_process_group(group)
        dist.barrier()
        dist.barrier(dist.new_group())
    dist.destroy_process_group()
    return found


def _engine(meeting: Meeting, number: int, name: str) -> None:
    if number:
        meeting.hear(f"kill/{number - 1}")
    group = _by_hand(meeting, 1, name)
    x = torch.full((5,), 10.0)
    group.allreduce(x).wait()
    assert x[0] == 11 + number
    meeting.hear(f"kill/{number}")
    os.kill(os.getpid(), signal.SIGKILL)


def _two_jobs(meeting: Meeting) -> Any:
    names = ["weights"] * 3 if os.environ["TEST_NAMES"] == "one" else [f"weights/{number}" for number in range(3)]
    if meeting.rank < TRAINERS:
        return _trainer(meeting, names)
    return _engine(meeting, meeting.rank - TRAINERS, names[meeting.rank - TRAINERS])


@pytest.mark.parametrize("names", ["one", "several"])
def test_a_new_process_takes_the_place_of_a_killed_one(names: str):
    """``rank 1 was lost before it had joined the group``: the dead process was another one, in another group."""
    outcomes = run_group(_two_jobs, TRAINERS + 3, dynamic=True, environment={"TEST_NAMES": names}, timeout=110)
    assert results(outcomes[:TRAINERS]) == [[11.0, 12.0, 13.0], []]
    for each in outcomes[TRAINERS:]:
        assert not each.error, each.text
        assert each.exit_code == -signal.SIGKILL


def _replaced(meeting: Meeting) -> float:
    """Rank 1 claims its place, and is killed while it waits for rank 2; rank 3 takes it."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"  # a launcher may start a worker again while others wait
    if meeting.rank == 1:
        from rdmarpc.collectives.meeting import LaneMeeting as Ranks

        def dying(_: Ranks) -> bytes:
            meeting.say("claimed")
            os.kill(os.getpid(), signal.SIGKILL)
            return b""

        Ranks.begin = dying  # type: ignore[method-assign]
    if meeting.rank >= 2:
        meeting.hear("claimed")
    if meeting.rank == 3:
        meeting.hear("third")
    if meeting.rank == 2:
        meeting.say("third")
    group = _by_hand(meeting, {3: 1}.get(meeting.rank, meeting.rank), "weights", 3)
    x = torch.ones(3) * meeting.rank
    group.allreduce([x]).wait()
    group.shutdown()
    return x[0].item()


def test_a_process_that_comes_while_the_others_meet_is_taken():
    outcomes = run_group(_replaced, 4, dynamic=True, timeout=100)
    assert [results([outcomes[rank]])[0] for rank in (0, 2, 3)] == [5.0, 5.0, 5.0]


def _twins(meeting: Meeting) -> str:
    from rdmarpc.collectives.signature import Mismatch

    try:
        _by_hand(meeting, min(meeting.rank, 1), "twins", 3)
    except (Mismatch, RuntimeError) as error:
        return str(error)
    return ""


def test_two_processes_of_one_rank():
    found = results(run_group(_twins, 3, ranks=[1, 2], dynamic=True, environment={"TEST_LIMIT": "5"}, timeout=100)[1:])
    assert any("two processes joined the group as rank 1" in each for each in found), found
