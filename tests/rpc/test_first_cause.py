"""A worker that ends by an exception: whoever loses it says which, so the user sees the first cause, whoever exits first."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch
from forks import forks
from group import Meeting
from programs import run

import rdmarpc as rpc

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
        for worker in workers:
            worker.join(30)
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


def while_others_shut_down(meeting):
    if meeting.rank == 1:
        time.sleep(0.2)
        raise ValueError("the first cause")
    rpc.shutdown()


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


@pytest.mark.parametrize("device", ["shm", "tcp"])
@pytest.mark.parametrize("scenario", [in_main, while_others_shut_down, in_a_finally, by_another_one])
def test_the_others_name_it(tmp_path, device, scenario):
    codes, outs = _run(tmp_path, scenario, device)
    assert codes == [1, 1, 1]
    for rank, out in enumerate(outs):
        assert _WHAT in out, (rank, out)
    for out in outs[0], outs[2]:
        assert re.search(r"PeerLost: worker worker[01] is lost: it ended by .*ValueError: the first cause", out), out
        assert "own output has the reason" in out


def interrupted(meeting):
    if meeting.rank == 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        time.sleep(60)
    rpc.shutdown()


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_an_interrupt_of_one_is_no_error_of_the_others(tmp_path, device):
    codes, outs = _run(tmp_path, interrupted, device)
    assert codes == [0, 1, 0]
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
