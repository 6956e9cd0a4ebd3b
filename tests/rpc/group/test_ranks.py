"""Meeting: a rank that is started twice, and workers that never come."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psutil
import pytest
import torch.distributed as dist
from called import identity
from group import die, results, run_group
from ports import free_port
from test_secrets import calls
from timing import eventually

import rdmarpc as rpc
from rdmarpc.calls import agent
from rdmarpc.links.group.meeting import Rendezvous

DEVICES = ["shm", "tcp", pytest.param("verbs", marks=pytest.mark.rdma)]


def place(store: str) -> dict[str, str]:
    """Options for a store of that kind; that of ``run_group`` is a file."""
    return {"init_method": f"tcp://127.0.0.1:{free_port()}"} if store == "tcp" else {}


def called_until_refused(meeting):
    """Of two workers that meet, call each other, and go on when a third one has been refused."""
    meeting.join(world_size=2)
    assert rpc.rpc_sync(f"worker{1 - meeting.rank}", identity, (1,)) == 1
    meeting.say(f"called/{meeting.rank}")
    meeting.hear("refused")
    return calls(meeting.rank)


def started_twice(rank, meeting):
    """Worker 2 is ``rank`` once more, while the right one is at work."""
    if meeting.rank == 2:
        meeting.hear("called/0", "called/1")
        with pytest.raises(RuntimeError, match=rf"^rank {rank} is taken by worker{rank} \(process \d+\)$"):
            meeting.join(name="again", rank=rank, world_size=2)
        meeting.say("refused")
        return "refused"
    return called_until_refused(meeting)


@pytest.mark.parametrize(("device", "rank", "store"), [("shm", 1, "tcp"), ("tcp", 1, "file"), ("tcp", 0, "file")])
def test_a_rank_that_is_taken(device, rank, store):
    found = results(run_group(partial(started_twice, rank), 3, dynamic=True, transport=device, **place(store)))
    assert found == ["fine", "fine", "refused"]


def both_at_once(meeting):
    name = f"a{meeting.rank}"
    try:
        meeting.join(name=name, rank=min(meeting.rank, 1), world_size=2)
    except RuntimeError as error:
        meeting.say("refused")
        return str(error)
    if meeting.rank == 0:
        assert rpc.rpc_sync(1, identity, (1,)) == 1
    else:
        assert rpc.rpc_sync("a0", identity, (1,)) == 1
    meeting.hear("refused")  # the store lives as long as rank 0
    rpc.shutdown()
    return name


@pytest.mark.parametrize("device", DEVICES)
def test_of_two_that_start_at_once_one_has_the_rank(device):
    zero, *ones = results(run_group(both_at_once, 3, dynamic=True, transport=device, **place("tcp")))
    (winner,) = [text for text in ones if text in ("a1", "a2")]
    (refused,) = [text for text in ones if text != winner]
    assert zero == "a0" and refused.startswith(f"rank 1 is taken by {winner} (process ")


def dies_while_it_waits(meeting):
    if meeting.rank == 0:

        def waits(*_):  # for the claims of all others; its own is in the store
            meeting.say("pid", str(os.getpid()))
            die()

        Rendezvous.begin = waits
        meeting.join(world_size=2)
    pid = int(meeting.said("pid"))
    eventually(lambda: psutil.pid_exists(pid), False)
    with pytest.raises(RuntimeError, match=r"^rank 0 is taken by worker0 \(process \d+, which has ended\): a group meets once"):
        meeting.join(name="again", rank=0, world_size=2)
    return "told"


def test_a_worker_started_again_into_the_same_meeting():
    outcomes = run_group(dies_while_it_waits, 2, dynamic=True)
    assert outcomes[0].exit_code == -9 and outcomes[1].result == "told", outcomes


def dies_in_its_second_life(meeting):
    meeting.join(world_size=2)
    rpc.shutdown()
    if meeting.rank == 0:
        Rendezvous.begin = lambda _: die()
        meeting.join(world_size=2)
    with pytest.raises(rpc.PeerLost, match=r"^rank 0 was lost before it had joined the group: process \d+ has ended"):
        meeting.join(world_size=2)
    return "told"


def test_a_worker_that_dies_while_it_joins_is_named_at_once():
    outcomes = run_group(dies_in_its_second_life, 2, dynamic=True, rpc_timeout=60)
    assert outcomes[0].exit_code == -9 and outcomes[1].result == "told", outcomes


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_who_is_missing_is_named_by_all(store):
    outcomes = run_group(calls, 3, ranks=[0, 1], rpc_timeout=6.0, **place(store))
    for rank in (0, 1):
        error, text = outcomes[rank].error, outcomes[rank].text
        assert error == "TransferTimeout" or (error == "PeerLost" and rank == 1 and store == "tcp"), text
        assert "no sign of rank 2" in text


def test_the_first_rank_is_missing_and_with_it_the_store():
    outcomes = run_group(calls, 3, ranks=[1, 2], rpc_timeout=1.0, **place("tcp"))
    for rank in (1, 2):
        assert outcomes[rank].error == "TransferTimeout" and "no sign of rank 0" in outcomes[rank].text


def finds_a_host_with_two_addresses(meeting):
    """The first of them answers nothing: the queue of who listens there is full."""
    with contextlib.ExitStack() as held:
        if meeting.rank == 1:
            full = held.enter_context(socket.create_server(("127.0.0.9", 0), backlog=0))
            for _ in range(4):
                waits = held.enter_context(socket.socket())
                waits.setblocking(False)
                waits.connect_ex(full.getsockname())
            dead = socket.AF_INET, socket.SOCK_STREAM, 0, "", full.getsockname()
            real = socket.getaddrinfo
            socket.getaddrinfo = lambda *asked, **named: [dead, *real(*asked, **named)]
        start = time.monotonic()
        meeting.join(world_size=2)
        assert time.monotonic() - start < 30.0
        rpc.shutdown()


def test_the_host_of_the_store_has_an_address_that_leads_nowhere():
    results(run_group(finds_a_host_with_two_addresses, 2, dynamic=True, rpc_timeout=60, transport="shm", **place("tcp")))


def test_the_store_ends_before_all_are_there():
    """Rank 0 gives up; the others, who would wait longer, say for whom it waited."""
    outcomes = run_group(calls, 3, ranks=[0, 1], rpc_timeout=20, each={0: {"rpc_timeout": 4.0}}, **place("tcp"))
    assert outcomes[0].error == "TransferTimeout" and outcomes[1].error == "PeerLost"
    assert "no sign of rank 2" in outcomes[1].text and "rank 0" in outcomes[1].text


def test_who_waits_to_leave_writes_nothing(tmp_path):
    """Hosts whose file locks do not hold between them would overwrite what each of them writes at every look."""
    file = tmp_path / "store"
    meetings = [Rendezvous(dist.FileStore(str(file), 2), rank, 2, 10.0) for rank in range(2)]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meetings[0].leave, 10.0, ())
        eventually(lambda: file.stat().st_size > 0 and b"left" in file.read_bytes())
        before = file.read_bytes()
        time.sleep(0.2)
        assert file.read_bytes() == before
        meetings[1].leave(10.0, ())
        first.result(10)
    assert [file.read_bytes().count(word) for word in (b"left/0", b"left/1", b"gone/1")] == [1, 1, 1]


def begins_again_before_the_store_ends(meeting):
    meeting.join(world_size=2)
    store = agent.current().group._way._whole
    rpc.shutdown()
    if meeting.rank == 0:
        key = ["rdmarpc/1/claim/1"]
        eventually(partial(store.check, key))
    del store  # with the last reference at rank 0 it ends
    meeting.join(world_size=2)
    assert rpc.rpc_sync(f"worker{1 - meeting.rank}", identity, (5,)) == 5
    rpc.shutdown()


def test_a_worker_begins_again_before_the_store_of_the_life_before_has_ended():
    results(run_group(begins_again_before_the_store_ends, 2, dynamic=True, **place("tcp")))


def lives_in_a_file(path, meeting):
    for _ in range(2):
        meeting.join(world_size=1, init_method=f"file://{path}")
        rpc.shutdown()
        assert path.exists()


def test_the_file_of_a_store_stays_between_two_lives(tmp_path):
    """One that begins again as the others end would read for ever in a file that the last of them removes."""
    path = tmp_path / "store"
    results(run_group(partial(lives_in_a_file, path), 1, dynamic=True))
    assert not path.exists()  # it goes with the last process


def interrupted(who, when, meeting):
    """``who`` is interrupted in its first try, while the others wait for its claim or for its record."""
    if meeting.rank == who:
        whole = getattr(Rendezvous, when)

        def ctrl_c(self, *given):
            setattr(Rendezvous, when, whole)
            if when == "meet":
                eventually(partial(self.store.check, [f"worker/{1 - who}"]))
            raise KeyboardInterrupt

        setattr(Rendezvous, when, ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            meeting.join(world_size=2)
    meeting.join(world_size=2)
    for life in range(2):
        assert rpc.rpc_sync(f"worker{1 - meeting.rank}", identity, (life,)) == life
        rpc.shutdown()
        if life == 0:
            meeting.join(world_size=2)


@pytest.mark.parametrize(("store", "who"), [("file", 0), ("file", 1), ("tcp", 1)])
@pytest.mark.parametrize("when", ["begin", "meet"])
def test_a_worker_that_was_interrupted_tries_again(store, who, when):
    """Its second try waited in another place of the store than the others."""
    results(run_group(partial(interrupted, who, when), 2, dynamic=True, **place(store)))


def comes_late(meeting):
    if meeting.rank == 0:
        with pytest.raises(rpc.TransferTimeout, match="no sign of rank 1"):
            meeting.join(world_size=2, rpc_timeout=0.3)
        meeting.say("gave up")
    meeting.hear("gave up")
    meeting.join(world_size=2)
    assert rpc.rpc_sync(f"worker{1 - meeting.rank}", identity, (5,)) == 5
    rpc.shutdown()


def test_a_worker_that_gave_up_meets_one_that_came_later():
    results(run_group(comes_late, 2, dynamic=True))


def of_another_size(meeting):
    """Worker 2 takes the group for a larger one, or itself for one beyond it; the others meet."""
    if meeting.rank == 2:
        with pytest.raises(ValueError, match="rank 5 is none of world_size 2: the ranks are 0 to 1"):
            meeting.join(name="beyond", rank=5, world_size=2)
        meeting.hear("called/0", "called/1")
        with pytest.raises(RuntimeError, match="rank 0 came with world_size 1, another worker with 2"):
            meeting.join(name="alone", rank=0, world_size=1)
        meeting.say("refused")
        return "refused"
    return called_until_refused(meeting)


def test_a_worker_that_takes_the_group_for_another_one():
    assert results(run_group(of_another_size, 3, dynamic=True)) == ["fine", "fine", "refused"]


def of_two_sizes(meeting):
    mine, other = 2 + meeting.rank, 3 - meeting.rank
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=f"rank {meeting.rank} came with world_size {mine}, another worker with {other}"):
        meeting.join(world_size=mine)
    assert time.monotonic() - began < 15  # of 20 s, and rank 2 never comes


def test_two_sizes_of_a_group_are_told_to_both_at_once():
    results(run_group(of_two_sizes, 2, dynamic=True))


def many_lives(meeting):
    for life in range(8):
        meeting.join(world_size=3)
        assert rpc.rpc_sync((meeting.rank + 1) % 3, identity, (life,)) == life
        rpc.shutdown()


def test_one_address_for_one_group_after_the_other():
    results(run_group(many_lives, 3, dynamic=True, **place("tcp")))


def meets_after_being_alone(meeting):
    for life in range(meeting.rank):
        meeting.join(rank=0, world_size=1, init_method=f"file://{meeting._place}-{meeting.rank}-{life}")
        rpc.shutdown()
    meeting.join(world_size=3)
    assert rpc.rpc_sync((meeting.rank + 1) % 3, identity, (5,)) == 5
    rpc.shutdown()


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_workers_meet_that_were_in_other_groups_before(store):
    results(run_group(meets_after_being_alone, 3, dynamic=True, **place(store)))
