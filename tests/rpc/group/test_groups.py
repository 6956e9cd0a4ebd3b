"""Groups whose members come and go."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from functools import partial
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from called import identity, slow
from group import Meeting, die, results, run_group
from halt import halt
from ports import free_port
from timing import eventually

import rdmarpc as rpc
from rdmarpc.calls import agent

DEVICES = ["shm", "tcp"]
MIXED = r"^RPC group mixes statically and dynamically initialized members which is not supported\.$"


def names() -> list[str]:
    return agent.current().worker_names()


def each_calls_each(meeting):
    # The old ones are there before; then all others join at once.
    if meeting.rank:
        meeting.hear("first")
    meeting.join()
    if meeting.rank == 0:
        meeting.say("first")
    else:
        assert rpc.rpc_sync("worker0", torch.add, (torch.ones(2), 1)).sum() == 4  # at once
    meeting.step("joined", 4)
    for rank in range(4):
        assert rpc.rpc_sync(f"worker{rank}", identity, (rank,)) == rank
        assert rpc.rpc_sync(rank, identity, (rank,)) == rank
        info = rpc.get_worker_info(f"worker{rank}")
        assert info.id == rank and rpc.get_worker_info(rank) == info
        with pytest.raises(TypeError, match="incompatible function arguments"):
            rpc.get_worker_info(info)
        assert rpc._get_current_rpc_agent()._get_device_map(info) == {}
        assert rpc.remote(f"worker{rank}", identity, (rank,)).to_here() == rank
    seen = names()
    meeting.step("called", 4)
    rpc.shutdown()
    return seen


@pytest.mark.parametrize("device", DEVICES)
def test_workers_join_and_call_each_other(device):
    found = results(run_group(each_calls_each, 4, dynamic=True, transport=device))
    assert found == [[f"worker{rank}" for rank in range(4)]] * 4


def leaves_and_is_missed(meeting):
    meeting.join()
    meeting.step("joined", 3)
    if meeting.rank == 2:
        futures = [rpc.rpc_async("worker0", slow, (0.8, n)) for n in range(3)]
        meeting.hear("under way")
        rpc.shutdown()  # its own calls end first, and so does what it runs for others
        meeting.say("left")
        return [future.value() for future in futures]
    if meeting.rank == 1:
        under_way = rpc.rpc_async("worker2", slow, (0.8, "answered"))
        assert rpc.rpc_sync("worker2", identity, (1,)) == 1
        meeting.say("under way")
        assert under_way.wait() == "answered"
    meeting.hear("left")
    eventually(lambda: "worker2" in names(), False)
    for to in ("worker2", 2):
        with pytest.raises(RuntimeError, match=r"could not find destination|has left the group"):
            rpc.rpc_sync(to, identity, (1,))
    assert rpc.rpc_sync(f"worker{1 - meeting.rank}", identity, ("still here",)) == "still here"
    meeting.step("missed", 2)
    rpc.shutdown()
    return names_after_shutdown()


def names_after_shutdown() -> str:
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
        rpc.get_worker_info()
    return "done"


@pytest.mark.parametrize("device", DEVICES)
def test_a_worker_leaves_when_its_calls_are_done(device):
    found = results(run_group(leaves_and_is_missed, 3, dynamic=True, transport=device))
    assert found == ["done", "done", [0, 1, 2]]


def a_call_into_the_leaver(meeting):
    meeting.join()
    meeting.step("joined", 2)
    if meeting.rank == 1:
        meeting.hear("called")
        time.sleep(0.3)
        rpc.shutdown(graceful=False)
        return
    assert rpc.rpc_sync("worker1", identity, (1,)) == 1  # it is connected
    future = rpc.rpc_async("worker1", slow, (20.0,))
    meeting.say("called")
    with pytest.raises(rpc.PeerLost, match="worker1 has left the group"):
        future.wait()
    rpc.shutdown()


def test_a_call_to_a_worker_that_leaves_ungracefully_says_so():
    results(run_group(a_call_into_the_leaver, 2, dynamic=True))


def ranks_used_again(meeting):
    if meeting.rank == 0:
        meeting.join()
        meeting.say("first")
        for life in range(4):
            meeting.hear(f"here{life}")
            name = f"life{life}"
            assert rpc.get_worker_info(name).id == 7
            for to in (name, 7):
                assert rpc.rpc_sync(to, whoami) == (name, 7)
            assert rpc.rpc_sync(name, identity, (torch.full((3000,), life),)).sum() == 3000 * life
            meeting.say(f"called{life}")
            meeting.hear(f"gone{life}")
            with pytest.raises(RuntimeError, match=f"could not find destination name {name}|{name} has left"):
                rpc.rpc_sync(name, identity, (1,))
        counters = agent.current().counters()
        rpc.shutdown()
        return counters["channels"]
    meeting.hear("first")
    for life in range(4):
        meeting.join(name=f"life{life}", rank=7)
        assert rpc.rpc_sync("worker0", identity, (life,)) == life
        meeting.say(f"here{life}")
        meeting.hear(f"called{life}")
        rpc.shutdown()
        meeting.say(f"gone{life}")
    return None


def whoami():
    me = rpc.get_worker_info()
    return me.name, me.id


@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_is_used_again_by_another_worker(device):
    results(run_group(ranks_used_again, 2, dynamic=True, transport=device))


def comes_back_under_its_name(meeting):
    if meeting.rank == 0:
        meeting.join()
        meeting.say("first")
        for life in range(3):
            meeting.hear(f"called{life}")
            assert rpc.rpc_sync("worker1", identity, (life,)) == life  # whatever became of the link before
            assert torch.ones(3).to(rpc.device("worker1")).sum().item() == 3
            meeting.say(f"answered{life}")
        rpc.shutdown()
        return
    meeting.hear("first")
    for life in range(3):
        meeting.join()
        rpc.rpc_sync("worker0", identity, (1,))
        meeting.say(f"called{life}")
        meeting.hear(f"answered{life}")
        rpc.shutdown(graceful=life != 1)


@pytest.mark.parametrize("device", DEVICES)
def test_a_worker_comes_back_under_its_name_and_rank(device):
    results(run_group(comes_back_under_its_name, 2, dynamic=True, transport=device))


def names_and_ranks_taken(meeting):
    if meeting.rank == 0:
        meeting.join()
        meeting.say("first")
        meeting.hear("refused")
        assert rpc.rpc_sync("other", identity, (5,)) == 5
        meeting.say("called")
        rpc.shutdown()
        return
    meeting.hear("first")
    with pytest.raises(RuntimeError, match="worker0 is not unique"):
        meeting.join(name="worker0", rank=3)
    with pytest.raises(RuntimeError, match="rank 0 is taken by worker0"):
        meeting.join(name="other", rank=0)
    with pytest.raises(rpc.AuthenticationError, match="do not hold the same job secret"):
        meeting.join(name="other", rank=3, secret="another secret than theirs")
    meeting.join(name="other", rank=3)
    meeting.say("refused")
    meeting.hear("called")
    rpc.shutdown()


def test_a_name_or_rank_that_is_taken():
    results(run_group(names_and_ranks_taken, 2, dynamic=True))


def dies_and_is_replaced(meeting, *, missed_late=False):
    """``missed_late``: worker 0 knows that it has lost the first one, and has not got round to looking who is in the group."""
    if meeting.rank == 2:
        meeting.join(name="mortal", rank=5)
        meeting.say("joined")
        meeting.hear("linked")
        die()
    if meeting.rank == 0:
        meeting.hear("joined")
        meeting.join()
        assert rpc.rpc_sync("mortal", identity, (1,)) == 1
        lay_there = torch.ones(3).to(rpc.device("mortal"))
        assert lay_there.sum().item() == 3
        if missed_late:
            agent.current().group.take_out = lambda record: meeting.hear("greeted")
        pending = rpc.rpc_async("mortal", slow, (20.0,))
        meeting.say("linked")
        with pytest.raises(rpc.PeerLost, match="mortal"):
            pending.wait()
        meeting.say("buried")
        meeting.hear("replaced")
        assert rpc.rpc_sync("mortal", identity, ("second life",)) == "second life"
        assert rpc.rpc_sync(5, identity, ("by rank",)) == "by rank"
        assert torch.ones(4).to(rpc.device("mortal")).sum().item() == 4
        with pytest.raises(rpc.PeerLost, match="mortal"):
            lay_there.sum().item()
        assert torch.ones(5).to(rpc.device("mortal")).sum().item() == 5
        meeting.say("greeted")
        rpc.shutdown()
    else:
        meeting.hear("buried")
        meeting.join(name="mortal", rank=5)
        meeting.say("replaced")
        meeting.hear("greeted")
        rpc.shutdown()


@pytest.mark.parametrize("missed_late", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_a_killed_worker_is_replaced(device, missed_late):
    scenario = partial(dies_and_is_replaced, missed_late=missed_late)
    outcomes = run_group(scenario, 3, dynamic=True, transport=device)
    assert not outcomes[0].error and not outcomes[1].error, outcomes
    assert outcomes[2].exit_code == -signal.SIGKILL


def taken_out_by_others(meeting):
    meeting.join()
    group = agent.current().group
    group.take_out(group.workers.records[group.number])  # as those do who give it up
    group.refresh()
    assert rpc.rpc_sync("worker0", abs, (-1,)) == 1 == rpc.rpc_sync(rpc.get_worker_info(), abs, (-1,))
    rpc.shutdown()


def test_a_worker_that_others_took_out_can_call_itself():
    results(run_group(taken_out_by_others, 1, dynamic=True))


def cuts_one_off(meeting):
    """Worker 0 has had enough of what worker 1 sends: worker 2 has not."""
    meeting.join()
    meeting.step("joined", 3)
    for rank in range(3):
        assert rpc.rpc_sync(f"worker{rank}", identity, (rank,)) == rank
    meeting.step("linked", 3)
    if meeting.rank == 0:
        here = agent.current()
        other = rpc.get_worker_info("worker1").number
        here.losses.distrust(here.connections.to(other), rpc.RdmaError("it does not keep to the protocol", peer="worker1"))
    if meeting.rank < 2:
        with pytest.raises(rpc.PeerLost, match=f"worker{1 - meeting.rank}"):
            for _ in range(1000):
                rpc.rpc_sync(f"worker{1 - meeting.rank}", identity, (1,))
                time.sleep(0.01)
    meeting.step("lost", 3)
    time.sleep(0.5)  # for whatever the loss is to bring
    assert names() == ["worker0", "worker1", "worker2"]
    assert rpc.rpc_sync("worker2", identity, (2,)) == 2
    if meeting.rank == 2:
        assert [rpc.rpc_sync(f"worker{rank}", identity, (rank,)) for rank in range(2)] == [0, 1]
    meeting.step("called", 3)
    rpc.shutdown(graceful=False)


@pytest.mark.parametrize("device", DEVICES)
def test_who_is_cut_off_by_one_stays_a_member_for_the_others(device):
    results(run_group(cuts_one_off, 3, dynamic=True, transport=device))


def dies_unseen(meeting):
    if meeting.rank == 1:
        meeting.join(name="mortal", rank=5)
        meeting.say("joined", str(os.getpid()))
        die()
    pid = int(meeting.said("joined"))
    eventually(lambda: psutil.pid_exists(pid), False)
    meeting.join(name="mortal", rank=5)  # nobody was connected with it: the joiner finds out that it is dead
    assert rpc.rpc_sync("mortal", os.getpid) == os.getpid()
    rpc.shutdown()


@pytest.mark.parametrize("device", DEVICES)
def test_a_dead_record_blocks_nobody(device):
    outcomes = run_group(dies_unseen, 2, dynamic=True, transport=device)
    assert not outcomes[0].error, outcomes


def dies_while_joining(meeting):
    from rdmarpc.links.group.group import Registry

    if meeting.rank == 1:
        swap = Registry._swap

        def swap_and_die(self, *args):
            swap(self, *args)
            meeting.say("dies")
            die()

        Registry._swap = swap_and_die
        meeting.join()
    meeting.hear("dies")
    start = time.monotonic()
    meeting.join()
    assert time.monotonic() - start < 20.0
    with pytest.raises(rpc.PeerLost, match="worker1"):
        rpc.rpc_sync("worker1", identity, (1,))
    rpc.shutdown()


def test_a_worker_that_dies_while_it_joins_blocks_nobody():
    outcomes = run_group(dies_while_joining, 2, dynamic=True)
    assert not outcomes[0].error, outcomes


def dynamic_after_static(meeting):
    if meeting.rank < 2:
        meeting.join(world_size=2)
        meeting.say(f"static{meeting.rank}")
        meeting.hear("refused")
        assert rpc.rpc_sync(f"worker{1 - meeting.rank}", identity, ("undisturbed",)) == "undisturbed"
        rpc.shutdown()
        return
    meeting.hear("static0", "static1")
    with pytest.raises(RuntimeError, match=MIXED):
        meeting.join()
    meeting.say("refused")


def static_after_dynamic(meeting):
    if meeting.rank == 0:
        meeting.join()
        meeting.say("dynamic")
    else:
        meeting.hear("dynamic")
        with pytest.raises(RuntimeError, match=MIXED):
            meeting.join(world_size=2)
        meeting.say("refused")
        return
    meeting.hear("refused")
    rpc.shutdown()


@pytest.mark.parametrize(("scenario", "size"), [(dynamic_after_static, 3), (static_after_dynamic, 2)])
def test_static_and_dynamic_members_do_not_mix(scenario, size):
    results(run_group(scenario, size, dynamic=True))


def without_a_rank(meeting):
    with pytest.raises(ValueError, match="rank parameter missing"):
        meeting.join(name="x", rank=-1)
    with pytest.raises(ValueError, match="rank parameter missing"):
        meeting.join(name="x", rank=-1, init_method="tcp://127.0.0.1:23456")
    for variable in ("RANK", "WORLD_SIZE"):
        os.environ.pop(variable, None)
    with pytest.raises(ValueError, match="environment variable RANK expected"):
        meeting.join(name="x", rank=-1, init_method="env://")
    with pytest.raises(RuntimeError, match="No rendezvous handler for foo://"):
        meeting.join(init_method="foo://x")
    with pytest.raises(RuntimeError, match="names a file in /not/here, and there is no such folder"):
        meeting.join(init_method="file:///not/here/store", rpc_timeout=0, world_size=2)
    os.statvfs = lambda _: SimpleNamespace(f_blocks=1 << 30, f_bavail=2, f_frsize=4096)
    with pytest.raises(RuntimeError, match="and the disk of that folder is full"):
        meeting.join(rpc_timeout=0, world_size=2)


def test_a_rank_is_needed():
    results(run_group(without_a_rank, 1, dynamic=True))


def beside_a_process_group(meeting, first: str):
    def group():
        dist.init_process_group("gloo", init_method=f"file://{meeting._place}", rank=meeting.rank, world_size=2)

    if first == "group":
        group()
    meeting.join(world_size=None if first == "group" else 2)
    if first == "rpc":
        group()
    assert dist.is_initialized()
    value = torch.ones(1)
    dist.all_reduce(value)
    assert rpc.rpc_sync(f"worker{1 - meeting.rank}", identity, (value,)) == 2
    dist.barrier()
    rpc.shutdown()
    dist.barrier()
    dist.destroy_process_group()


def group_first(meeting):
    beside_a_process_group(meeting, "group")


def rpc_first(meeting):
    beside_a_process_group(meeting, "rpc")


@pytest.mark.parametrize("scenario", [group_first, rpc_first])
def test_one_file_for_a_process_group_and_rpc(scenario):
    results(run_group(scenario, 2, dynamic=True))


def initialised_again(meeting):
    for life in range(3):
        meeting.join(world_size=2, init_method=f"file://{meeting._place}-{life}")
        assert rpc.rpc_sync(f"worker{1 - meeting.rank}", identity, (life,)) == life
        assert rpc.remote(f"worker{1 - meeting.rank}", identity, (life,)).to_here() == life
        rpc.shutdown()
    return threading.active_count()


def test_a_process_initialises_again_with_another_file():
    for threads in results(run_group(initialised_again, 2, dynamic=True)):
        assert threads < 8, "threads of earlier lives are left"


def meetings_are_kept_apart(meeting):
    # The same store, again and again: leftovers of the life before must not leak in.
    for life in range(3):
        meeting.join(name=f"w{meeting.rank}of{life}", world_size=2)
        assert rpc.rpc_sync(f"w{1 - meeting.rank}of{life}", identity, (life,)) == life
        rpc.shutdown()


def test_one_store_for_one_group_after_the_other():
    results(run_group(meetings_are_kept_apart, 2, dynamic=True))


def whose_store_stands_still(meeting):
    port = free_port()
    host = os.fork()
    if host == 0:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        signal.pause()
        del store
    try:
        eventually(lambda: socket.socket().connect_ex(("127.0.0.1", port)), 0)
        meeting.join(init_method=f"tcp://127.0.0.1:{port}", rank=1)
        halt(host)
        for _ in range(3):  # the first of them asks the store, for 5 s
            with pytest.raises(RuntimeError, match="could not find destination name nobody"):
                rpc.rpc_sync("nobody", identity, (1,))
        assert rpc.rpc_sync("worker1", identity, (1,)) == 1
        rpc.shutdown(timeout=8)
    finally:
        os.kill(host, signal.SIGKILL)
        os.waitpid(host, 0)


def test_a_store_whose_host_stands_still_is_given_up():
    results(run_group(whose_store_stands_still, 1, dynamic=True, timeout=40))


def test_the_meeting_helper_waits(tmp_path):
    meeting = Meeting(str(tmp_path / "place"), 0, {})
    with pytest.raises(AssertionError, match="did not happen"):
        meeting.hear("never", timeout=0.05)
