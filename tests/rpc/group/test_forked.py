"""Processes that fork: the child gets an error that says why, the parent does not notice; or they begin anew."""

from __future__ import annotations

import atexit
import gc
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings

import pytest
import torch
from called import held, let_go
from group import dismiss, results, run_group, until_dismissed
from ports import free_port
from programs import run
from torch.utils.data import DataLoader, Dataset

import rdmarpc as rpc
from rdmarpc.transport.memory import mapping

DEVICES = ["shm", "tcp"]


def twice(tensor):
    return tensor * 2


def child(job):
    """Run ``job`` in a fork that then ends as an interpreter does: with its handlers, and everything destroyed that it can."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        said = "fine"
        try:
            job()
        except BaseException:
            said = traceback.format_exc()
        os.write(writing, said.encode())
        gc.collect()
        atexit._run_exitfuncs()
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        said = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    assert said == "fine", said


def still_works():
    for size in (1, 10_000, 1 << 20):
        tensor = torch.rand(size)
        for _ in range(20):
            assert torch.equal(rpc.rpc_sync("worker1", twice, (tensor,)), tensor * 2)


def while_up(rank):
    mp.current_process()._config["daemon"] = False
    if rank == 1:
        until_dismissed()
        rpc.shutdown()
        return
    tensor = torch.rand(1000)
    doubled = rpc.rpc_sync("worker1", twice, (tensor,))
    reference = rpc.remote("worker1", twice, (tensor,))
    assert torch.equal(reference.to_here(), doubled)
    pending = rpc.rpc_async("worker1", held, ("pending", "answered"))

    def uses():
        for use in (
            lambda: rpc.rpc_sync("worker1", twice, (tensor,)),
            lambda: rpc.rpc_async("worker1", twice, (tensor,)),
            lambda: rpc.remote("worker1", twice, (tensor,)),
            rpc.get_worker_info,
            rpc.shutdown,
            reference.to_here,
            lambda: reference.rpc_sync().sum(),
            pending.wait,
        ):
            with pytest.raises(RuntimeError, match="fork"):
                use()
        assert not rpc._is_current_rpc_agent_set()
        assert torch.equal(doubled, tensor * 2)

    def nested():
        child(uses)
        uses()

    child(nested)
    still_works()
    for _ in range(20):  # also while calls are under way
        more = rpc.rpc_async("worker1", twice, (tensor,))
        child(lambda: None)
        assert torch.equal(more.wait(), doubled)
    with mp.get_context("fork").Pool(2) as pool:
        with pytest.raises(RuntimeError, match="fork"):
            pool.apply(rpc.get_worker_info)
        assert pool.map(len, ["a", "bb"]) == [1, 2]
    assert subprocess.run([sys.executable, "-c", "print(1)"], check=True, capture_output=True).stdout == b"1\n"
    still_works()
    rpc.rpc_sync("worker1", let_go, ("pending",))
    assert pending.wait() == "answered"
    assert torch.equal(reference.to_here(), doubled)
    dismiss("worker1")
    rpc.shutdown()


@pytest.mark.parametrize("device", DEVICES)
def test_a_fork_of_a_worker(device):
    results(run_group(while_up, transport=device))


class Rows(Dataset):
    def __init__(self, whole):
        self.whole = whole

    def __len__(self):
        return len(self.whole)

    def __getitem__(self, at):
        return self.whole[at]


def filled(tensor, value):
    return tensor.fill_(value)


def in_a_fork(tensor):
    """A fork that waits for its pipe, then says what ``tensor`` holds there, and writes to it."""
    asked, said = mp.Pipe(), mp.Pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        asked[0].recv()
        said[1].send((tensor.unique().tolist(), tensor.fill_(3).sum().item()))
        os._exit(0)
    return pid, asked[1], said[0]


def said_by(child):
    pid, asked, said = child
    asked.send("now")
    assert said.poll(20)
    heard = said.recv()
    assert os.waitpid(pid, 0)[1] == 0
    return heard


_children = []


def keep_in_a_fork(tensor):
    _children.append(in_a_fork(tensor))


def said_there():
    return said_by(_children.pop())


def memory_of_forks(rank):
    size = 50_000
    if rank == 0:
        for function, args in ((torch.full, ((size,), 1.0)), (filled, (torch.empty(size), 1.0))):  # the latter is handed over
            for _ in range(3):
                came = rpc.rpc_sync("worker1", function, args)
            child = in_a_fork(came)
            came.add_(1)
            del came
            for _ in range(20):
                rpc.rpc_sync("worker1", function, (*args[:-1], 9.0))
            assert said_by(child) == ([1.0], 3.0 * size)
            came = rpc.rpc_sync("worker1", function, args)
            assert said_by(in_a_fork(came)) == ([1.0], 3.0 * size)
            assert came.sum() == size
        for _ in range(3):
            rpc.rpc_sync("worker1", torch.sum, (torch.full((size,), 9.0),))
        rpc.rpc_sync("worker1", keep_in_a_fork, (torch.full((size,), 1.0),))
        for _ in range(20):
            rpc.rpc_sync("worker1", torch.sum, (torch.full((size,), 9.0),))
        assert rpc.rpc_sync("worker1", said_there) == ([1.0], 3.0 * size)
        mapping.COPIED_AT_MOST, limit = size, mapping.COPIED_AT_MOST
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            child = in_a_fork(came)
        mapping.COPIED_AT_MOST = limit
        assert said_by(child) == ([1.0], 3.0 * size)
        said = [str(each.message) for each in warned if "too much to copy for a forked child" in str(each.message)]
        assert len(said) == (rpc.api._get_current_rpc_agent().device.memory.shared)  # else a fork copies on write
        came.fill_(1)
    rpc.shutdown()
    if rank == 0:
        child = in_a_fork(came)
        came.add_(1)
        assert said_by(child) == ([1.0], 3.0 * size)
        assert came.sum() == 2 * size


@pytest.mark.parametrize("device", DEVICES)
def test_a_fork_has_the_tensors_as_they_were(device):
    results(run_group(memory_of_forks, transport=device))


def loads_data(rank):
    mp.current_process()._config["daemon"] = False
    if rank == 0:
        whole = rpc.rpc_sync("worker1", twice, (torch.arange(64.0).reshape(16, 4),))
        for _ in range(2):
            loader = DataLoader(Rows(whole), 4, num_workers=2, multiprocessing_context="fork")
            batches = [rpc.rpc_sync("worker1", twice, (batch,)) for batch in loader]
            assert torch.equal(torch.cat(batches), whole * 2)
    rpc.shutdown()


@pytest.mark.parametrize("device", DEVICES)
def test_data_loaders(device):
    results(run_group(loads_data, transport=device))


def begins_anew(meeting):
    options = rpc.RpcBackendOptions(init_method=f"tcp://localhost:{free_port()}", transport=meeting._options["transport"])
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    assert rpc.rpc_sync("alone", len, ("four",)) == 4

    def of_its_own():
        join(1, "of its own")
        child(lambda: join(1, "nested"))
        assert rpc.rpc_sync("worker0", len, ("four",)) == 4
        rpc.shutdown()

    def join(size, place, rank=0):
        if rpc._is_current_rpc_agent_set():
            rpc.shutdown()
        rpc.init_rpc(
            f"worker{rank}",
            rank=rank,
            world_size=size,
            rpc_backend_options=rpc.RpcBackendOptions(
                init_method=f"file://{meeting._place} {place}", transport=meeting._options["transport"], rpc_timeout=20
            ),
        )

    def with_others(rank):
        join(2, "others", rank)
        assert torch.equal(rpc.rpc_sync(f"worker{1 - rank}", twice, (torch.ones(3),)), torch.full((3,), 2.0))
        rpc.shutdown()

    child(of_its_own)
    assert rpc.rpc_sync("alone", len, ("four",)) == 4
    rpc.shutdown()
    with pytest.raises(RuntimeError, match="has not been initialized"):
        rpc.get_worker_info()
    mp.current_process()._config["daemon"] = False
    others = [mp.get_context("fork").Process(target=with_others, args=(rank,)) for rank in range(2)]
    for process in others:
        process.start()
    for process in others:
        process.join(30)
        process.kill()
    return [process.exitcode for process in others]


@pytest.mark.parametrize("device", DEVICES)
def test_a_fork_begins_anew(device):
    assert results(run_group(begins_anew, 1, transport=device, dynamic=True)) == [[0, 0]]


_PROGRAM = """
import multiprocessing as mp, os, sys
import rdmarpc as rpc

def who():
    try:
        return rpc.get_worker_info().name
    except RuntimeError as error:
        return str(error).split(".")[0]

if __name__ == "__main__":
    options = rpc.RpcBackendOptions(init_method="tcp://localhost:" + sys.argv[1])
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    if os.fork() == 0:
        sys.exit(0)
    assert os.wait()[1] == 0
    for method in ("fork", "forkserver"):
        with mp.get_context(method).Pool(1) as pool:
            print(pool.apply(who))
    print(rpc.rpc_sync("alone", who))
    rpc.shutdown()
"""


def test_pools_of_a_program(tmp_path):
    """An interpreter of its own: what a fork of it destroys, and in which order, is not the same elsewhere."""
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    ended = run(str(program), str(free_port()), fresh=True)
    assert ended.returncode == 0, ended.stdout
    said = [line for line in ended.stdout.splitlines() if "socket" not in line]
    assert said[-3:] == [
        "RPC was initialized in the process that this one is a fork of: a fork cannot use it",
        "RPC has not been initialized",
        "alone",
    ]


def forks_and(how):
    """Returned: how the child ended that does not end itself in the function that was called."""
    pid = os.fork()
    if pid:
        limit = time.monotonic() + 15.0
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < limit:
            time.sleep(0.01)
        if not ended[0]:
            os.kill(pid, signal.SIGKILL)
            ended = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(ended[1])
    if how == "silent":
        sys.stderr.close()
    if how in ("raises", "silent"):
        raise ValueError("in the child")
    if how == "exits":
        sys.exit(7)
    return "twice"


def leaves_children(rank):
    if rank == 0:
        ends = {how: rpc.rpc_sync("worker1", forks_and, (how,)) for how in ("raises", "exits", "returns", "silent")}
        assert ends == {"raises": 1, "exits": 7, "returns": 0, "silent": 1}
        still_works()
    rpc.shutdown()


@pytest.mark.parametrize("device", DEVICES)
def test_a_child_ends_with_the_function_that_forked_it(device):
    results(run_group(leaves_children, transport=device))
