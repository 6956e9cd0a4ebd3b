"""Beginnings and ends: what init_rpc and shutdown promise, and what happens when a worker does not play along."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from called import identity, slow
from group import die, dismiss, results, run_group, until_dismissed

import rdmarpc as rpc
from rdmarpc.calls import agent
from rdmarpc.links.ring import RING_BYTES

DEVICES = ["shm", "tcp"]


def leave(rank):
    rpc.shutdown()


def test_before_init_and_after_shutdown():
    for call in (lambda: rpc.rpc_sync("x", identity), lambda: rpc.get_worker_info(), lambda: rpc.shutdown()):
        with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
            call()
    with pytest.raises(RuntimeError, match="Current RPC agent is not set! Did you initialize the RPC framework"):
        rpc.RRef(1)


def beside_torchs_own(meeting):
    from torch.distributed import rpc as torchs

    with tempfile.NamedTemporaryFile() as store:
        options = torchs.TensorPipeRpcBackendOptions(init_method=f"file://{store.name}")
        torchs.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
        for call in (lambda: rpc.device("worker0"), lambda: rpc.rpc_sync("worker0", identity, (1,))):
            with pytest.raises(RuntimeError, match=r"not been initialized.* torch's own RPC: .*python -m rdmarpc run"):
                call()
        torchs.shutdown()


def test_where_torchs_own_rpc_is_up_the_error_says_so():
    results(run_group(beside_torchs_own, 1, dynamic=True))


def test_bad_arguments():
    with pytest.raises(TypeError, match="backend must be a member of BackendType"):
        rpc.init_rpc("a", backend="TENSORPIPE")
    with pytest.raises(TypeError, match="must be an instance of RpcBackendOptions"):
        rpc.init_rpc("a", rpc_backend_options={})
    for name, text in (("abc*", "Worker name must match"), ("", "must be non-empty"), ("a" * 200, "shorter than 128")):
        with pytest.raises(RuntimeError, match=text):
            rpc.init_rpc(name, rank=0, world_size=1)
    with pytest.raises(RuntimeError, match="non-negative"):
        rpc.RpcBackendOptions(rpc_timeout=-1)


def again(rank):
    with pytest.raises(RuntimeError, match="is already initialized"):
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    assert rpc.rpc_sync(f"worker{1 - rank}", identity, (rank,)) == rank
    rpc.shutdown()
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
        rpc.rpc_sync("worker0", identity)


def test_second_init():
    results(run_group(again))


def by_two_threads(meeting):
    def join(_):
        with suppress(RuntimeError):
            meeting.join(world_size=2)
            return "joined"

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(join, range(3))).count("joined") == 1
    again(meeting.rank)


def test_of_several_threads_that_join_one_does():
    results(run_group(by_two_threads, dynamic=True))


@pytest.mark.parametrize("device", DEVICES)
def test_one_worker_alone(device):
    results(run_group(leave, 1, transport=device))


def test_a_name_used_twice_fails_at_every_worker():
    outcomes = run_group(leave, 3, each={2: {"name": "worker0"}})
    for outcome in outcomes:
        assert outcome.error == "RuntimeError" and "worker0 is not unique" in outcome.text


@pytest.mark.parametrize("device", DEVICES)
def test_a_wrong_secret_fails_at_every_worker(device):
    outcomes = run_group(leave, 2, transport=device, secret="the right secret", each={1: {"secret": "the wrong secret"}})
    for outcome in outcomes:
        assert outcome.error == "AuthenticationError" and "worker1 (rank 1)" in outcome.text


def test_a_worker_that_never_joins_is_named():
    outcomes = run_group(leave, 3, ranks=[0, 2], rpc_timeout=5.0)
    for rank in (0, 2):
        assert outcomes[rank].error == "TransferTimeout" and "no sign of rank 1" in outcomes[rank].text


def busy_when_others_leave(rank):
    if rank == 1:
        time.sleep(0.5)
        return rpc.rpc_sync("worker2", identity, ("served in shutdown",)), rpc.shutdown()
    rpc.shutdown()
    return None


def test_graceful_shutdown_keeps_serving():
    assert results(run_group(busy_when_others_leave, 3))[1][0] == "served in shutdown"


def hop(path, seen):
    if path:
        rpc.rpc_async(path[0], hop, (path[1:], seen + 1))
    else:
        finished.append(seen)


finished: list[int] = []


def unawaited(rank):
    if rank == 0:
        rpc.rpc_async("worker1", hop, ([f"worker{n % 3}" for n in range(2, 22)], 0))
    rpc.shutdown()
    return finished


def test_graceful_shutdown_waits_for_calls_nobody_waits_for():
    assert [seen for hops in results(run_group(unawaited, 3)) for seen in hops] == [20]


def killed_peer(rank):
    if rank == 1:
        rpc.rpc_sync("worker0", identity, (1,))
        time.sleep(30)
    if rank == 0:
        rpc.rpc_sync("worker1", identity, (1,))
        pending = rpc.rpc_async("worker1", slow, (30,))
        other = rpc.rpc_async("worker2", slow, (1.0, "unharmed"))
        rpc.rpc_async("worker1", die)
        start = time.monotonic()
        with pytest.raises(rpc.PeerLost, match="worker1"):
            pending.wait()
        assert time.monotonic() - start < 15.0
        with pytest.raises(rpc.PeerLost):
            rpc.rpc_sync("worker1", identity, (1,))
        with pytest.raises(rpc.PeerLost):
            rpc.rpc_async("worker1", identity, (1,)).wait()
        with pytest.raises(rpc.PeerLost):
            rpc.remote("worker1", identity, (1,)).to_here()
        assert other.wait() == "unharmed"
    start = time.monotonic()
    with pytest.raises(rpc.PeerLost):
        rpc.shutdown(timeout=25)
    assert time.monotonic() - start < 20.0
    return "survived"


@pytest.mark.parametrize("device", DEVICES)
def test_a_killed_worker_is_lost_to_all_others(device):
    outcomes = run_group(killed_peer, 3, transport=device)
    assert [outcomes[rank].result for rank in (0, 2)] == ["survived", "survived"], outcomes
    assert outcomes[1].exit_code == -9


def never_comes(rank):
    if rank == 1:
        time.sleep(6.0)
        rpc.shutdown(graceful=False)
        return
    start = time.monotonic()
    with pytest.raises(rpc.TransferTimeout, match="shutdown"):
        rpc.shutdown(timeout=1.0)
    assert time.monotonic() - start < 5.5
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
        rpc.get_worker_info()
    return


def test_shutdown_has_a_limit():
    results(run_group(never_comes))


def leave_at_once(rank):
    if rank == 0:
        rpc.rpc_async("worker1", slow, (20.0,))
        time.sleep(0.2)
    start = time.monotonic()
    rpc.shutdown(graceful=False)
    assert time.monotonic() - start < 15.0


def test_ungraceful_shutdown_returns_promptly():
    results(run_group(leave_at_once))


def full_arena(rank):
    if rank == 0:
        with pytest.raises(rpc.ArenaFull, match=r"limit 134217728(.|\n)*arena_limit"):
            rpc.rpc_sync("worker1", torch.ones, (50_000_000,))
        assert rpc.rpc_sync("worker1", identity, (torch.ones(1_000_000),)).sum() == 1_000_000
    rpc.shutdown()


def test_a_result_larger_than_the_arena():
    results(run_group(full_arena, arena_limit=128 << 20))


def strangers(rank):
    if rank == 0:
        address = agent.current().device.address.decode()
        host, port = address.split(":")[1:3]
        held = []
        for payload in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000)):
            sock = socket.create_connection((host, int(port)), timeout=5)
            sock.sendall(payload)
            held.append(sock)
        assert rpc.rpc_sync("worker1", identity, ("in peace",)) == "in peace"
        for sock in held:
            sock.close()
    rpc.shutdown()


def test_strangers_on_the_port_disturb_nobody():
    results(run_group(strangers, transport="tcp"))


_TORCHRUN = """
import torch, rdmarpc as rpc, os
rpc.init_rpc(f"w{os.environ['RANK']}")
assert rpc.rpc_sync(f"w{1 - int(os.environ['RANK'])}", torch.add, (torch.ones(2), 1)).sum() == 4
rpc.shutdown()
print("fine")
"""


def test_torchrun_unchanged(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0 and done.stdout.count("fine") == 2, done.stderr


def talk_nonsense(rank):
    if rank == 0:
        link = agent.current().connections.to(1)
        assert rpc.rpc_sync("worker1", identity, (1,)) == 1
        link._out[:64] = b"\xff" * 64
        link._window.put(link._written % RING_BYTES, 64)
        with pytest.raises(rpc.PeerLost):
            rpc.rpc_sync("worker1", slow, (20,))
        assert rpc.rpc_sync("worker2", identity, ("unharmed",)) == "unharmed"
        dismiss("worker2")
    else:
        assert rpc.rpc_sync(f"worker{3 - rank}", identity, ("still serves",)) == "still serves"
        until_dismissed()
        if rank == 2:
            dismiss("worker1")
    rpc.shutdown(graceful=False)


def test_bytes_that_are_no_frame_end_that_connection_only():
    results(run_group(talk_nonsense, 3))


def row_used_again(meeting):
    meeting.join(world_size=3)
    if meeting.rank == 0:
        meeting.hear("ready")
        link = agent.current().connections.to(1)
        assert rpc.rpc_sync("worker1", identity, (1,)) == 1
        link._out[:64] = b"\xff" * 64
        link._window.put(link._written % RING_BYTES, 64)
    elif meeting.rank == 1:
        losses = agent.current().losses
        cut_off = losses.cut_off

        def late(link, error):
            meeting.say("refused")
            meeting.hear("connected")
            cut_off(link, error)
            meeting.say("cut off")

        losses.cut_off = late
        meeting.say("ready")
    else:
        meeting.hear("refused")
        assert rpc.rpc_sync("worker1", identity, ("new",)) == "new"
        meeting.say("connected")
        meeting.hear("cut off")
        for _ in range(20):
            assert rpc.rpc_sync("worker1", identity, ("still read",), timeout=5) == "still read"
            time.sleep(0.01)
        meeting.say("done")
    meeting.hear("done")
    rpc.shutdown(graceful=False)


def test_the_row_of_a_refused_connection_may_be_another_ones_when_it_is_settled():
    results(run_group(row_used_again, 3, dynamic=True))


def forgets_to_shut_down(rank):
    """Calls pending, threads waiting, functions running: the interpreter must come to its end all the same."""
    peer = f"worker{1 - rank}"
    assert rpc.rpc_sync(peer, identity, (rank,)) == rank
    kept.append([rpc.rpc_async(peer, slow, (600.0,)) for _ in range(5)])
    kept.append(rpc.remote(peer, slow, (600.0,)))
    kept.append(rpc.rpc_async(peer, identity, (torch.ones(100_000),)))
    threading.Thread(target=rpc.rpc_sync, args=(peer, slow, (600.0,)), daemon=True).start()
    time.sleep(0.3)


kept: list[object] = []


@pytest.mark.parametrize("device", DEVICES)
def test_exit_without_shutdown_with_everything_pending(device):
    results(run_group(forgets_to_shut_down, 2, transport=device, timeout=90))


def prompt_with_the_dead(rank):
    if rank == 1:
        rpc.rpc_sync("worker0", identity, (1,))
        time.sleep(0.5)
        die()
    rpc.rpc_async("worker1", slow, (30.0,))
    rpc.rpc_async("worker1", identity, (torch.ones(500_000),))
    time.sleep(0.8)
    start = time.monotonic()
    rpc.shutdown(graceful=False)
    assert time.monotonic() - start < 15.0
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
        rpc.shutdown()
    return "prompt"


@pytest.mark.parametrize("device", DEVICES)
def test_ungraceful_shutdown_is_prompt_with_dead_peers(device):
    outcomes = run_group(prompt_with_the_dead, 3, transport=device)
    assert [outcomes[rank].result for rank in (0, 2)] == ["prompt", "prompt"], outcomes


_NO_SHUTDOWN = """
import sys, torch, rdmarpc as rpc
rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(init_method="file://" + sys.argv[1]))
assert rpc.rpc_sync("alone", torch.add, (torch.ones(2), 1)).sum() == 4
print("fine")
"""


def test_a_program_may_end_without_shutdown(tmp_path):
    command = [sys.executable, "-c", _NO_SHUTDOWN, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


def threads_after_shutdown(rank):
    rpc.rpc_async(f"worker{1 - rank}", identity, (torch.ones(5000),)).wait()
    rpc.shutdown()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rdmarpc")]


@pytest.mark.parametrize("device", DEVICES)
def test_shutdown_leaves_no_thread(device):
    assert results(run_group(threads_after_shutdown, transport=device)) == [[], []]
