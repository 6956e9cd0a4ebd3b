"""Workers that are called for the first time when they do not run any more."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from group import results, run_group
from timing import eventually

import rdmarpc as rpc
from rdmarpc.calls import agent
from rdmarpc.links import connecting
from rdmarpc.nn import RemoteModule

DEVICES = ["shm", "tcp"]


def number(value):
    return value


def call_one_that_stopped(rank):
    """Rank 1 stops before anybody has called it; three threads call it at once, and again, and one many times."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    eventually(lambda: len(_stopped_siblings()), 1)
    found = []

    def call() -> None:
        for _ in range(2):
            start = time.monotonic()
            try:
                rpc.rpc_sync("worker1", number, (1,))
            except rpc.PeerLost as error:
                found.append((time.monotonic() - start, str(error)))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    start, futures = time.monotonic(), [rpc.rpc_async("worker1", number, (value,)) for value in range(40)]
    for future in futures:
        with pytest.raises(rpc.PeerLost, match="worker1"):
            future.wait()
    many = time.monotonic() - start
    peers = [thread for thread in threads if thread.is_alive()]
    rpc.shutdown(graceful=False)
    for pid in _stopped_siblings():
        os.kill(pid, signal.SIGKILL)
    return len(peers), found, many


def _stopped_siblings() -> list[int]:
    """The other workers that do not run."""
    with open(f"/proc/{os.getppid()}/task/{os.getppid()}/children") as file:
        return [pid for pid in map(int, file.read().split()) if pid != os.getpid() and _stopped(pid)]


def _stopped(pid: int) -> bool:
    """All of its threads."""
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return False
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


@pytest.mark.parametrize("device", DEVICES)
def test_a_first_call_to_a_stopped_worker_is_an_error_for_all_at_once(device):
    outcomes = run_group(call_one_that_stopped, 2, transport=device, peer_timeout=1.0)
    hanging, found, many = outcomes[0].result
    assert not hanging and len(found) == 6 and many < 20.0
    for seconds, text in found:
        assert seconds < 20.0 and "worker1" in text, found


def deadlines_of_first_calls(rank):
    """Rank 1 stops before anybody has called it, and goes on before it is given up."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        rpc.shutdown(timeout=30)
        return None
    eventually(lambda: len(_stopped_siblings()), 1)
    (stopped,) = _stopped_siblings()
    ways = {
        "rpc_sync": lambda: rpc.rpc_sync("worker1", number, (1,), timeout=0.5),
        "rpc_async": lambda: rpc.rpc_async("worker1", number, (2,), timeout=0.5).wait(),
        "remote": lambda: rpc.remote("worker1", number, (3,), timeout=0.5).to_here(timeout=0.5),
        "RemoteModule": lambda: RemoteModule("worker1/cpu", torch.nn.Linear, (2, 2)).forward(torch.ones(2)),
    }
    took = {}
    rpc._set_rpc_timeout(0.5)
    try:
        for way, call in ways.items():
            start = time.monotonic()
            with pytest.raises(RuntimeError, match=r"RPC ran for more than set timeout|timed out"):
                call()
            took[way] = time.monotonic() - start
    finally:
        os.kill(stopped, signal.SIGCONT)
    rpc._set_rpc_timeout(60.0)
    assert rpc.rpc_sync("worker1", number, (4,)) == 4
    rpc.shutdown(timeout=30)
    return took


@pytest.mark.parametrize("device", DEVICES)
def test_a_first_call_ends_at_its_deadline(device):
    took = results(run_group(deadlines_of_first_calls, 2, transport=device, peer_timeout=30.0))[0]
    assert max(took.values()) < 15.0, took


def call_one_that_no_way_leads_to(rank):
    """Twenty calls each by three threads to a host that is cut off, which the kernel says after a while."""
    if rank == 1:
        time.sleep(3.0)
        rpc.shutdown(graceful=False)
        return None
    device, attempts, errors = agent.current().device, [], []

    def connect(peer, **options):
        attempts.append(peer)
        time.sleep(0.1)
        raise rpc.PeerLost("No route to host", peer=peer.decode(), device="tcp")

    device.connect = connect
    connecting._AGAIN_S = 60.0  # all these calls come within that time

    def call() -> None:
        for _ in range(20):
            try:
                rpc.rpc_async("worker1", number, (1,)).wait()
            except rpc.PeerLost as error:
                errors.append(error.peer)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    del device.connect
    rpc.shutdown(graceful=False)
    return len(attempts), errors


def test_calls_to_a_host_that_is_cut_off_do_not_each_look_for_a_way():
    attempts, errors = run_group(call_one_that_no_way_leads_to, 2, transport="tcp")[0].result
    assert attempts == 1 and errors == ["worker1"] * 60


def all_is_here(rank):
    """The callee dies when all of a large answer has been READ, and before that was looked at."""
    if rank == 1:
        time.sleep(60)
    pid, caller = rpc.rpc_sync("worker1", os.getpid), agent.current().caller
    arrived, lost, taken = caller._arrived, caller.lost, threading.Event()

    def take(pending, fetch):
        eventually(lambda: pending.link.channel.error is not None, True, limit=20.0)
        arrived(pending, fetch)
        taken.set()

    def late(pending, fetch):
        os.kill(pid, signal.SIGKILL)
        threading.Thread(target=take, args=(pending, fetch)).start()

    caller._arrived = late
    caller.lost = lambda link, error: (taken.wait(20), lost(link, error))[1]
    found = rpc.rpc_sync("worker1", torch.ones, (1 << 20,)).sum().item()
    rpc.shutdown(graceful=False)
    return found


def test_an_answer_that_is_here_counts_though_its_worker_has_died_since():
    assert run_group(all_is_here, transport="tcp")[0].result == 1 << 20
