"""Ranks that cannot join a group, that are stopped for a while, and that end between two calls or in a step of FSDP2."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import time
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from group import Meeting, results, run_group
from timing import eventually

LONG = timedelta(seconds=600)
"""The timeout of groups that have to end much sooner than by it."""


def join(meeting: Meeting, size: int, what: str) -> None:
    import rdmarpc

    options = rdmarpc.RpcBackendOptions(peer_timeout=60.0)
    store = dist.FileStore(f"{meeting._place}-{what}", -1)
    dist.init_process_group("rdmarpc", store=store, rank=meeting.rank, world_size=size, timeout=LONG, pg_options=options)


def _without_memory(meeting: Meeting) -> None:
    from rdmarpc.transport import ArenaFull, PeerLost

    if meeting.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
        with pytest.raises(ArenaFull, match="ulimit -f"):
            join(meeting, 3, "memory")
        return
    with pytest.raises(PeerLost, match="rank 1 could not join the group: ArenaFull: "):
        join(meeting, 3, "memory")


def test_a_rank_that_cannot_join_is_named_at_once():
    """The others waited for it as long as the group's timeout."""
    results(run_group(_without_memory, 3, dynamic=True, timeout=100))


def _dies_as_it_joins(meeting: Meeting) -> None:
    """Rank 0 dies before it tells as ``kind`` what the other waits for, or just after, before they are connected."""
    from rdmarpc.collectives import meeting as ranks
    from rdmarpc.transport import PeerLost

    kind, told = os.environ["TEST_KIND"], os.environ["TEST_TOLD"]
    if meeting.rank == 0:
        if kind == "claim":
            ranks.LaneMeeting.begin = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        whole = ranks.LaneMeeting.tell

        def dying(self: ranks.LaneMeeting, key: str, text: str) -> None:
            last = key.startswith(kind)
            if told or not last:
                whole(self, key, text)
            if last:
                os.kill(os.getpid(), signal.SIGKILL)

        ranks.LaneMeeting.tell = dying  # type: ignore[method-assign]
    with pytest.raises(PeerLost, match=r"rank 0 was lost before it had joined the group: (process \d+ has|nobody listens)"):
        join(meeting, 2, "dies")


@pytest.mark.parametrize(("kind", "told"), [("claim", "1"), ("member", ""), ("member", "1")])
def test_a_rank_that_dies_before_it_is_connected_is_lost_at_once(kind: str, told: str):
    """The other waited for it as long as the group's timeout, 30 minutes by default, or named it by its address."""
    outcomes = run_group(_dies_as_it_joins, 2, dynamic=True, environment={"TEST_KIND": kind, "TEST_TOLD": told}, timeout=100)
    assert not outcomes[1].error, outcomes[1].text
    assert outcomes[0].exit_code == -signal.SIGKILL


def _named(meeting: Meeting) -> None:
    """Rank 2 of all is rank 1 of this group."""
    from rdmarpc.collectives.signature import Mismatch

    join(meeting, 3, "named")
    group = dist.new_group([0, 2])
    if meeting.rank != 1:
        words = r"rank [02] calls broadcast\(\d elements, float32, root 2\) .* and rank [02] calls broadcast"
        with pytest.raises(Mismatch, match=words):
            dist.broadcast(torch.ones(4 + meeting.rank), 2, group=group)
            dist.barrier(group)
    dist.barrier()
    with pytest.raises(RuntimeError, match=r"rank \d makes a group of the ranks 0-[12], and another rank one of 0-[12]"):
        dist.new_group([0, 1] if meeting.rank == 0 else [0, 1, 2])
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_are_named_as_torch_names_them_and_agree_on_their_group():
    """Errors named the places of ranks in their group. Groups that were not alike ended with a ``KeyError``, or not at all."""
    results(run_group(_named, 3, dynamic=True, timeout=100))


def _unseen(meeting: Meeting) -> None:
    """Rank 1 ends its program though rank 0 has given it what it did not ask for, which no call can come upon any more."""
    said: list[str] = []
    logger = logging.getLogger("rdmarpc")
    logger.addFilter(lambda record: bool(said.append(record.getMessage())))
    join(meeting, 2, "unseen")
    group = dist.new_group()
    dist.barrier()
    if meeting.rank == 0:
        dist.broadcast(torch.ones(8), 0)
        dist.send(torch.ones(4), 1, group=group, tag=3)
        meeting.say("gone")
    else:
        meeting.hear("gone")
    dist.destroy_process_group()
    found = [text.partition(": ")[2] for text in said]
    called = "rank 0 called broadcast(8 elements, float32, root 0), and this rank has not"
    assert sorted(found) == ([] if meeting.rank == 0 else ["a message of rank 0 (16 bytes, tag 3) was not received", called])


def test_what_a_rank_leaves_unseen_is_told():
    """A broadcast or a gather that its receiver never called was lost silently, if the program ended there."""
    results(run_group(_unseen, 2, dynamic=True, timeout=60))


def _ends_before(meeting: Meeting) -> None:
    """Rank 1 ends before it makes a group, or between two things that it tells the others of one."""
    from rdmarpc.collectives.meeting import LaneMeeting as Ranks

    join(meeting, 3, "ends before")
    dist.barrier()
    if meeting.rank == 1:
        if os.environ["TEST_END"] == "lanes":
            Ranks.lanes = lambda *_: os._exit(3)
            dist.new_group(timeout=LONG)
        os._exit(3)
    with pytest.raises(RuntimeError, match="rank 1 was lost before it had joined the group"):
        dist.new_group(timeout=LONG)
    meeting.say(f"named/{meeting.rank}")
    meeting.hear("named/0", "named/2")
    dist.destroy_process_group()


@pytest.mark.parametrize("end", ["before", "lanes"])
def test_a_rank_that_ends_before_a_new_group_is_there(end: str):
    """The others waited for it as long as the group's timeout: half an hour."""
    outcomes = run_group(_ends_before, 3, dynamic=True, environment={"TEST_END": end}, timeout=100)
    assert not outcomes[0].error, outcomes[0].text
    assert not outcomes[2].error, outcomes[2].text
    assert outcomes[1].exit_code == 3


def _stopped_shortly(meeting: Meeting) -> None:
    join(meeting, 3, "shortly")
    dist.barrier()
    if meeting.rank == 2:
        meeting.say("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        process = psutil.Process(int(meeting.said("pid")))
        eventually(lambda: process.status() == psutil.STATUS_STOPPED)
    x = torch.arange(1 << 20, dtype=torch.float32) * (meeting.rank + 1)
    work = dist.all_reduce(x, async_op=True)
    if meeting.rank == 0:
        time.sleep(0.3)
        process.send_signal(signal.SIGCONT)
    work.wait()
    assert torch.equal(x, torch.arange(1 << 20, dtype=torch.float32) * 6)
    dist.destroy_process_group()


def _leaves(meeting: Meeting) -> None:
    from rdmarpc.transport import PeerLost

    join(meeting, 3, "leaves")
    found: list[object] = [None] * 3
    dist.all_gather_object(found, {"rank": meeting.rank})
    assert found == [{"rank": rank} for rank in range(3)]
    if meeting.rank == 2:
        sys.exit(3)
    with pytest.raises(PeerLost, match="rank 2"):
        dist.all_gather_object(found, {})
    meeting.step("named", 2)  # who is named after one has left may be that one
    dist.destroy_process_group()


def _in_step(meeting: Meeting) -> None:
    from torch.distributed.fsdp import fully_shard

    join(meeting, 3, "sharded")
    torch.manual_seed(0)
    network = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
    mesh = dist.device_mesh.init_device_mesh("cpu", (3,))
    for layer in network:
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    network(torch.ones(2, 64)).sum().backward()
    x = torch.ones(2, 64, requires_grad=True)
    if meeting.rank == 2:
        middle = network[1]
        middle.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError, match="rank 2 was lost"):
        network(x).sum().backward()
    meeting.step("sharded", 2)
    dist.destroy_process_group()


def _ends(meeting: Meeting) -> None:
    _stopped_shortly(meeting)
    _leaves(meeting) if os.environ["TEST_END"] == "leaves" else _in_step(meeting)


@pytest.mark.parametrize("end", ["leaves", "in a step of FSDP2"])
def test_ranks_that_are_stopped_shortly_and_then_end(end: str):
    outcomes = run_group(_ends, 3, dynamic=True, environment={"TEST_END": end}, timeout=110)
    results(outcomes[:2])
    assert (outcomes[2].error, outcomes[2].exit_code) == (("SystemExit", 0) if end == "leaves" else ("", -signal.SIGKILL))
