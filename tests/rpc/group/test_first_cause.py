"""A worker that ends by an exception: whoever loses it says which, so the user sees the first cause, whoever exits first."""

from __future__ import annotations

import atexit
import os
import re
import signal
import time
from contextlib import suppress
from functools import partial
from multiprocessing import util

import pytest
import torch
from forks import forks
from group import Meeting, on_every_device, results
from halt import halt
from programs import run
from timing import eventually

import rdmarpc as rpc
from rdmarpc.calls import agent

_WHAT = "ValueError: the first cause"


def never(rank):
    time.sleep(60)


def _start(scenario, rank, size, place, device, out):
    """As a launcher starts a worker: nobody catches what it raises."""
    log = os.open(out, os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    meeting = Meeting(place, rank, {"transport": device})
    meeting.join(world_size=size)
    scenario(meeting)


def _run(folder, scenario, device, size=3):
    """The exit codes and the outputs."""
    outs = [folder / f"out{rank}" for rank in range(size)]
    arguments = [(scenario, rank, size, str(folder / "store"), device, str(outs[rank])) for rank in range(size)]
    workers = [forks().Process(target=_start, args=each, daemon=True) for each in arguments]
    for worker in workers:
        worker.start()
    try:
        limit = time.monotonic() + 90
        for worker in workers:
            worker.join(max(0.0, limit - time.monotonic()))
        return [worker.exitcode for worker in workers], [out.read_text() for out in outs]
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def in_main(meeting):
    if meeting.rank == 1:
        meeting.hear("waits/0", "waits/2")
        raise ValueError("the first cause")
    rpc.rpc_sync("worker1", abs, (-1,))
    meeting.say(f"waits/{meeting.rank}")
    rpc.rpc_sync("worker1", never, (meeting.rank,))


def at_exit(meeting):
    """As a library does that registers ``shutdown`` with ``atexit``, which comes last in a child that was spawned."""
    util._run_finalizers(0)
    rpc.shutdown()  # connects for the first time


def at_exit_and_before_init(meeting):
    """As a script does that registers it at its top: this worker serves in there."""
    rpc.shutdown()
    atexit.register(rpc.shutdown)
    meeting.join(world_size=2, init_method=f"file://{meeting._place}-2")
    if meeting.rank == 1:
        atexit._run_exitfuncs()
    else:
        time.sleep(0.3)
        assert rpc.rpc_sync("worker1", abs, (-1,)) == 1
        rpc.shutdown()
        atexit.unregister(rpc.shutdown)  # Python 3.13 runs these in such processes, too
    assert not rpc._is_current_rpc_agent_set()


@pytest.mark.parametrize("scenario", [at_exit, at_exit_and_before_init])
def test_shutdown_may_come_last(tmp_path, scenario):
    codes, outs = _run(tmp_path, scenario, "shm", size=2)
    assert (codes, outs) == ([0, 0], ["", ""])


def others_have_come():
    return len(agent.current().termination._reports.get(0, ())) == 2


def others_shut_down():
    """Worker 0 connects to all others when it comes to ``shutdown``, and there they tell it that they have come."""
    eventually(lambda: 0 in agent.current().links.by_worker)
    eventually(partial(rpc.rpc_sync, "worker0", others_have_come))


def while_others_shut_down(meeting):
    if meeting.rank == 1:
        others_shut_down()
        raise ValueError("the first cause")
    rpc.shutdown()


def with_a_slow_reader(meeting):
    """The goodbye was taken, and not yet looked at, when the end of the connection is heard."""
    if meeting.rank == 1:
        meeting.hear("waits/0", "waits/2")
        raise ValueError("the first cause")
    progress = agent.current().progress
    read = progress.read

    def late(row, fresh):
        time.sleep(0.2)
        read(row, fresh)

    rpc.rpc_sync("worker1", abs, (-1,))
    progress.read = late
    meeting.say(f"waits/{meeting.rank}")
    rpc.rpc_sync("worker1", never, (meeting.rank,))


def in_a_finally(meeting):
    """The usual idiom: ``shutdown`` closes the connections long before the traceback is written."""
    if meeting.rank == 1:
        try:
            meeting.hear("waits/0", "waits/2")
            raise ValueError("the first cause")
        finally:
            rpc.shutdown(graceful=False)
    in_main(meeting)


def by_another_one(meeting):
    """Worker 2 knows worker 1 through worker 0 only, which it ends."""
    if meeting.rank == 1:
        meeting.hear("waits/0", "waits/2")
        raise ValueError("the first cause")
    to = "worker1" if meeting.rank == 0 else "worker0"
    rpc.rpc_sync(to, abs, (-1,))
    meeting.say(f"waits/{meeting.rank}")
    rpc.rpc_sync(to, never, (meeting.rank,))


def in_a_step(meeting):
    """Their tensors lie at worker 1."""
    if meeting.rank == 1:
        meeting.hear("waits/0", "waits/2")
        raise ValueError("the first cause")
    x = torch.ones(3).to(rpc.device("worker1"))
    meeting.say(f"waits/{meeting.rank}")
    while x.sum().item() == 3:
        pass


def in_what_is_sent(meeting):
    """They write plain tensors to worker 1: what is told in the midst of a copy comes from the connection."""
    if meeting.rank == 1:
        meeting.hear("waits/0", "waits/2")
        raise ValueError("the first cause")
    x = torch.ones(1 << 20)
    x.to(rpc.device("worker1"))
    meeting.say(f"waits/{meeting.rank}")
    while True:
        x.to(rpc.device("worker1"))


@pytest.mark.parametrize("device", ["shm", "tcp"])
@pytest.mark.parametrize(
    "scenario",
    [
        in_main,
        in_a_step,
        in_what_is_sent,
        while_others_shut_down,
        with_a_slow_reader,
        in_a_finally,
        by_another_one,
    ],
)
def test_the_others_name_it(tmp_path, device, scenario):
    codes, outs = _run(tmp_path, scenario, device)
    assert codes == [1, 1, 1], outs
    for rank, out in enumerate(outs):
        assert _WHAT in out, (rank, out)
    for out in outs[0], outs[2]:
        assert re.search(r"PeerLost: worker worker[01] is lost: it ended by .*ValueError: the first cause", out), out
        assert "own output has the reason" in out


def leaves(error, meeting):
    """Worker 0 connects to worker 1 when that has said goodbye to all whom it knew."""
    meeting.join(world_size=2)
    me = agent.current()
    if meeting.rank == 0:
        meeting.hear("leaves")
        for _ in range(2):
            with pytest.raises(
                rpc.PeerLost, match="worker1 is lost: " + ("it ended by " + _WHAT if error else "it is leaving")
            ) as raised:
                rpc.rpc_sync("worker1", abs, (-1,))
            assert (raised.value.peer, raised.value.status) == ("worker1", "RAISED" if error else "CLOSED")
        meeting.say("told")
        meeting.hear("left")
        with pytest.raises(rpc.PeerLost, match="worker1 is lost"):
            rpc.rpc_sync("worker1", abs, (-1,))
        rpc.shutdown(graceful=False)
        return
    close = me.close

    def late():
        meeting.say("leaves")
        meeting.hear("told")
        close()
        meeting.say("left")

    me.close = late
    with suppress(ValueError):
        try:
            if error:
                raise error
        finally:
            rpc.shutdown(graceful=False)


@pytest.mark.parametrize("error", [ValueError("the first cause"), None], ids=["for an error", "for none"])
def test_who_connects_to_one_that_leaves_is_told_why(error):
    for outcomes in on_every_device(partial(leaves, error), 2, dynamic=True).values():
        results(outcomes)


def gone(meeting):
    meeting.join(world_size=2)
    if meeting.rank == 0:
        meeting.hear("left")
        with pytest.raises(rpc.PeerLost, match=r"worker1 cannot be reached(?s:.)*own output has the reason"):
            rpc.rpc_sync("worker1", abs, (-1,))
    rpc.shutdown(graceful=False)
    meeting.say("left")


def test_who_connects_to_one_that_has_left_is_told_where_to_look():
    for outcomes in on_every_device(gone, 2, dynamic=True).values():
        results(outcomes)


def ask_for_an_absolute(to):
    return rpc.rpc_sync(to, abs, (-1,))


def given_up(meeting):
    """Worker 2 gives up worker 1, which is stopped; then worker 0, who knew nothing of either, has worker 1 ask worker 2."""
    meeting.join(world_size=3)
    if meeting.rank == 1:
        meeting.say("pid", str(os.getpid()))
    elif meeting.rank == 2:
        pid = int(meeting.said("pid"))
        assert rpc.rpc_sync("worker1", abs, (-1,)) == 1
        halt(pid)
        with pytest.raises(rpc.PeerLost, match="has not been seen running"):
            rpc.rpc_sync("worker1", abs, (-1,))
        os.kill(pid, signal.SIGCONT)
        meeting.say("given up")
    else:
        meeting.hear("given up")
        with pytest.raises(rpc.PeerLost, match="worker worker2 is lost: the peer gave worker1 up") as raised:
            rpc.rpc_sync("worker1", ask_for_an_absolute, ("worker2",))
        assert (raised.value.peer, raised.value.status) == ("worker1", "SILENT")
        meeting.say("told")
    meeting.hear("told")
    rpc.shutdown(graceful=False)


def test_others_are_told_of_who_was_stopped_not_of_who_gave_it_up():
    for outcomes in on_every_device(given_up, 3, dynamic=True, peer_timeout=3.0).values():
        results(outcomes)


def interrupted(meeting):
    if meeting.rank == 1:
        others_shut_down()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        time.sleep(60)
    rpc.shutdown()


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_an_interrupt_of_one_is_no_error_of_the_others(tmp_path, device):
    codes, outs = _run(tmp_path, interrupted, device)
    assert codes == [0, 1, 0], outs
    for out in outs[0], outs[2]:
        assert "Traceback" not in out
        assert "worker1 is lost: it ended by KeyboardInterrupt" in out


_PROGRAM = """
import sys, time
import torch.multiprocessing as mp
import rdmarpc as rpc

def main(rank, place):
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=rpc.RpcBackendOptions(init_method=place))
    if rank == 1:
        rpc.rpc_sync("worker0", abs, (-1,))
        raise ValueError("the first cause")
    rpc.shutdown()

if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        mp.spawn(main, (sys.argv[2],), nprocs=2)
    else:
        main(int(sys.argv[1]), sys.argv[2])
"""


def test_under_spawn(tmp_path):
    """Interpreters of their own, which take a while to end."""
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    ended = run(str(program), "spawn", f"file://{tmp_path}/store", fresh=True)
    assert ended.returncode == 1
    shown = ended.stdout.rpartition("-- Process ")[2]  # what the parent raises for the first that exited
    assert _WHAT in shown, ended.stdout
