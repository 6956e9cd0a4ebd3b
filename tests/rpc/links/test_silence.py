"""Peers that are killed, stopped, cut off, or only busy: who is given up, when, and what it costs the others."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
from called import hold_the_gil, identity, slow
from group import die, dismiss, on_every_device, results, run_group, until_dismissed
from halt import halt
from timing import eventually

import rdmarpc as rpc
from rdmarpc.calls import agent

TIMEOUT = 2.0


class Calls:
    """One call of each kind to a worker, all pending."""

    def __init__(self, to: str) -> None:
        self.errors: list[Exception] = []
        self.done: list[float] = []
        self._threads = [threading.Thread(target=self._expect_loss, args=(call, to)) for call in (self.sync, self.reference)]
        self._futures = [rpc.rpc_async(to, slow, (60.0,)) for _ in range(3)]
        for thread in self._threads:
            thread.start()
        time.sleep(0.2)

    @staticmethod
    def sync(to: str) -> None:
        rpc.rpc_sync(to, slow, (60.0,))

    @staticmethod
    def reference(to: str) -> None:
        rpc.remote(to, slow, (60.0,)).to_here()

    def _expect_loss(self, call, to: str) -> None:
        try:
            call(to)
        except Exception as error:
            self.errors.append(error)

    def all_lost(self, text: str, within: float) -> None:
        start = time.monotonic()
        for future in self._futures:
            with pytest.raises(rpc.PeerLost, match=text):
                future.wait()
        for thread in self._threads:
            thread.join(within)
        assert time.monotonic() - start < within
        assert len(self.errors) == 2, "calls still pending"
        for error in self.errors:
            assert isinstance(error, rpc.PeerLost) and text in str(error), error


def lose_worker1(how, text, within):
    """On worker 0: all calls to worker 1 fail, those to worker 2 go on."""
    calls = Calls("worker1")
    other = rpc.rpc_async("worker2", slow, (1.5 * TIMEOUT, "unharmed"))
    how()
    calls.all_lost(text, within)
    for call in (lambda: rpc.rpc_sync("worker1", identity, (1,)), lambda: rpc.remote("worker1", identity, (1,)).to_here()):
        with pytest.raises(rpc.PeerLost, match="worker1"):
            call()
    assert rpc.rpc_sync("worker2", identity, (torch.ones(100_000),)).sum() == 100_000
    assert other.wait() == "unharmed"


def killed(rank):
    if rank == 0:
        lose_worker1(lambda: rpc.rpc_async("worker1", die), "worker1", 20.0)
        dismiss("worker2")
    else:
        until_dismissed()
    rpc.shutdown(graceful=False)
    return "survived"


def test_all_kinds_of_calls_to_a_killed_worker_fail():
    for device, outcomes in on_every_device(killed, 3).items():
        assert [outcomes[rank].result for rank in (0, 2)] == ["survived", "survived"], (device, outcomes)


connected = threading.Event()


def is_connected():
    return connected.is_set()


def has_lost(number):
    return number in agent.current().links.lost


def stopped(rank):
    if rank == 1:
        mine = rpc.rpc_async("worker0", slow, (60.0,))
        with pytest.raises(rpc.PeerLost, match="worker0"):  # it was stopped meanwhile, and finds out that it was cut off
            mine.wait()
        with pytest.raises(rpc.PeerLost, match="worker0"):
            rpc.rpc_sync("worker0", identity, (1,))
        with pytest.raises(rpc.PeerLost, match="worker2"):  # nobody waited there, but it was connected too
            rpc.rpc_sync("worker2", identity, (1,))
        rpc.shutdown(graceful=False)
        return "went on"
    if rank == 0:
        pid = rpc.rpc_sync("worker1", os.getpid)
        eventually(partial(rpc.rpc_sync, "worker2", is_connected))
        lose_worker1(lambda: halt(pid), "has not been seen running for 2 s", 8 * TIMEOUT)
        eventually(partial(rpc.rpc_sync, "worker2", has_lost, (1,)))  # it looks for itself
        os.kill(pid, signal.SIGCONT)
        assert rpc.rpc_sync("worker2", identity, ("after",)) == "after"
        time.sleep(0.5)
        dismiss("worker2")
    else:
        rpc.rpc_sync("worker1", identity, ("connected",))
        connected.set()
        until_dismissed()
    rpc.shutdown(graceful=False)
    return "survived"


def test_a_stopped_worker_is_given_up_and_finds_out():
    for outcomes in on_every_device(stopped, 3, peer_timeout=TIMEOUT).values():
        assert results(outcomes) == ["survived", "went on", "survived"]


def busy(rank):
    if rank == 0:
        held = rpc.rpc_async("worker1", hold_the_gil, (2.5 * TIMEOUT,))
        long = rpc.rpc_async("worker2", slow, (3 * TIMEOUT, "long"))
        behind = rpc.rpc_async("worker1", identity, (torch.ones(300_000),))
        assert rpc.rpc_sync("worker2", identity, (1,)) == 1
        assert held.wait() == "held"
        assert behind.wait().sum() == 300_000
        assert long.wait() == "long"
        # And the one that looks: it saw nothing for longer than the timeout, which is no fault of its peers.
        hold_the_gil(2.5 * TIMEOUT)
        for to in ("worker1", "worker2"):
            assert rpc.rpc_sync(to, identity, (to,)) == to
    rpc.shutdown()


def test_a_busy_worker_is_not_given_up():
    for outcomes in on_every_device(busy, 3, peer_timeout=TIMEOUT).values():
        results(outcomes)


def first_contact(meeting):
    meeting.join(world_size=3)
    if meeting.rank == 0:
        meeting.hear("held")
        pid = int(meeting.said("pid"))
        halt(pid)
        answer = rpc.rpc_async("worker1", identity, (1,))
        with pytest.raises(rpc.PeerLost, match="worker2 cannot be reached: no answer within 4 s: stopped"):
            rpc.rpc_sync("worker2", identity, (1,))
        assert answer.wait() == 1
        os.kill(pid, signal.SIGCONT)
        meeting.say("over")
    elif meeting.rank == 1:
        meeting.say("held")
        hold_the_gil(15.0)
    else:
        meeting.say("pid", str(os.getpid()))
    meeting.hear("over")
    rpc.shutdown(graceful=False)


def test_a_busy_worker_that_nobody_has_connected_to_is_told_from_a_stopped_one():
    for outcomes in on_every_device(first_contact, 3, dynamic=True, peer_timeout=TIMEOUT).values():
        results(outcomes)


def all_stopped(rank):
    """The whole group freezes, as with a laptop's lid or Ctrl-Z: nobody is to blame."""
    if rank == 0:
        pids = [rpc.rpc_sync(f"worker{other}", os.getpid) for other in (1, 2)]
        pending = [rpc.rpc_async(f"worker{other}", slow, (1.0, other)) for other in (1, 2)]
        script = (
            "import os,signal,sys,time; pids=[int(a) for a in sys.argv[1:]];[os.kill(p,signal.SIGSTOP) for p in pids];"
            "time.sleep(4);[os.kill(p,signal.SIGCONT) for p in pids]"
        )
        helper = subprocess.Popen([sys.executable, "-c", script, *map(str, [os.getpid(), *pids])])
        assert [future.wait() for future in pending] == [1, 2]
        assert helper.wait(20) == 0
        assert rpc.rpc_sync("worker1", identity, (1,)) == 1
    rpc.shutdown()


def test_a_group_that_freezes_as_a_whole_goes_on():
    for outcomes in on_every_device(all_stopped, 3, peer_timeout=TIMEOUT).values():
        results(outcomes)


def large(number: int) -> torch.Tensor:
    return torch.full((50 << 20,), number, dtype=torch.int64)


def stopped_while_it_copies(rank):
    if rank == 1:
        while not agent.current().links.lost:
            time.sleep(0.05)
        rpc.shutdown(graceful=False)
        return None
    pid = rpc.rpc_sync("worker1", os.getpid)
    for number in (1, 2, 3):
        assert int(rpc.rpc_sync("worker1", large, (number,))[-1]) == number
    channel = agent.current().connections.to(1).channel
    for _ in range(30):  # the copy may end between our look and the signal
        future = rpc.rpc_async("worker1", large, (7,))
        deadline = time.monotonic() + 20.0
        while not (channel.inboxes.peer_copies or future.done()):
            assert time.monotonic() < deadline
        halt(pid)
        if channel.inboxes.peer_copies:
            break
        os.kill(pid, signal.SIGCONT)
        assert int(future.wait()[-1]) == 7
    else:
        pytest.fail("the worker was never stopped in the middle of a copy")
    with pytest.raises(rpc.PeerLost, match="has not been seen running"):
        future.wait()
    del future
    under_way = channel.peer_copies
    # Whatever was free, or becomes so, is used now; when the peer goes on, nothing of this may change.
    device = agent.current().device
    mine = [device.empty(50 << 20, dtype=torch.int64).fill_(-1) for _ in range(6)]
    assert channel.peer_copies == under_way
    os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + 30.0
    while channel.peer_copies or agent.current().losses.kept:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)
    assert all(int(tensor.min()) == int(tensor.max()) == -1 for tensor in mine)
    rpc.shutdown(graceful=False)
    return under_way


def test_memory_that_a_stopped_worker_may_write_is_not_used_again():
    assert results(run_group(stopped_while_it_copies, 2, transport="shm", peer_timeout=2.0, arena_limit=6 << 30))[0]


_RELAY = """
import socket, sys, threading
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
def pump(source, sink):
    while data := source.recv(1 << 16):
        sink.sendall(data)
    sink.shutdown(socket.SHUT_WR)
while True:
    near, _ = listener.accept()
    far = socket.create_connection((sys.argv[1], int(sys.argv[2])))
    for ends in ((near, far), (far, near)):
        threading.Thread(target=pump, args=ends, daemon=True).start()
"""


def cut_off(rank):
    if rank == 0:
        workers = agent.current().workers
        there = workers.records[1]
        kind, host, port, uid = there.address.split(":")
        with subprocess.Popen([sys.executable, "-c", _RELAY, host, port], stdout=subprocess.PIPE, text=True) as relay:
            try:
                assert relay.stdout is not None
                through = dataclasses.replace(there, address=f"{kind}:127.0.0.1:{int(relay.stdout.readline())}:{uid}")
                workers.replace([through if record.rank == 1 else record for record in workers.records.values()])
                assert rpc.rpc_sync("worker1", identity, (torch.ones(1000),)).sum() == 1000
                time.sleep(1.5 * TIMEOUT)  # beats travel through the relay too
                assert rpc.rpc_sync("worker1", identity, (1,)) == 1
                lose_worker1(lambda: relay.send_signal(signal.SIGSTOP), "has not been seen running for 2 s", 8 * TIMEOUT)
            finally:
                relay.kill()
        dismiss("worker2")
    elif rank == 1:
        while 0 not in agent.current().links.by_worker:  # the connection is the one through the relay
            time.sleep(0.01)
        with pytest.raises(rpc.PeerLost, match="worker0"):
            rpc.rpc_sync("worker0", slow, (60.0,))
        assert rpc.rpc_sync("worker2", identity, ("not cut off",)) == "not cut off"
        dismiss("worker2")
    else:
        until_dismissed(2)
    rpc.shutdown(graceful=False)


def test_a_worker_that_the_network_cuts_off_is_given_up_at_both_ends():
    results(run_group(cut_off, 3, transport="tcp", peer_timeout=TIMEOUT))


def test_a_timeout_must_leave_room_for_beats():
    with pytest.raises(RuntimeError, match="at least 1 s"):
        rpc.RpcBackendOptions(peer_timeout=0.1)
    assert rpc.RpcBackendOptions(peer_timeout=0).peer_timeout == 0
