"""Causes that had been told as others: a worker with torch's RPC, and files and system calls that a sandbox forbids."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from functools import partial

import pytest
import sandbox
import torch
from called import identity
from group import results, run_group
from ports import free_port

import rdmarpc as rpc
from rdmarpc.calls import agent
from rdmarpc.transport.memory import mapping
from rdmarpc.transport.shm.channel import runs

TORCHS = """
import sys, torch.distributed.rpc as rpc
options = rpc.TensorPipeRpcBackendOptions(init_method=sys.argv[1], rpc_timeout=60)
rpc.init_rpc("worker1", rank=1, world_size=2, rpc_backend_options=options)
"""


def test_a_worker_with_torchs_own_rpc_is_named(tmp_path):
    place = f"file://{tmp_path}/store"
    lo = {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    other = subprocess.Popen([sys.executable, "-c", TORCHS, place], env=os.environ | lo, stderr=subprocess.DEVNULL)
    try:
        options = rpc.RpcBackendOptions(init_method=place, rpc_timeout=20)
        with pytest.raises(rpc.TransferTimeout, match=r"no sign of rank 1; rank 1 came with torch.distributed.rpc itself"):
            rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options)
    finally:
        other.kill()
        other.wait(30)


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        (
            "MASTER_ADDR",
            "nosuchhost.invalid",
            "no store at nosuchhost.invalid:.* no sign of rank 0, which hosts it.*\n.*its address",
        ),
        ("MASTER_PORT", "abc", "MASTER_PORT is not a number: .*'abc'"),
        ("WORLD_SIZE", "two", "WORLD_SIZE is not a number: .*'two'"),
    ],
)
def test_a_variable_of_the_launcher_that_makes_no_sense_is_named(monkeypatch, variable, value, error):
    right = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "2"}
    for each, text in (right | {variable: value}).items():
        monkeypatch.setenv(each, text)
    with pytest.raises((rpc.TransferTimeout, ValueError), match=error):
        rpc.init_rpc("worker0", rpc_backend_options=rpc.RpcBackendOptions(rpc_timeout=1))


@pytest.mark.parametrize("scheme", ["env", "tcp"])
def test_a_dynamic_group_without_its_store_says_so_in_time(monkeypatch, scheme):
    port = free_port()
    right = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": "1", "WORLD_SIZE": "2"} if scheme == "env" else {}
    for each, text in right.items():
        monkeypatch.setenv(each, text)
    place = "env://" if scheme == "env" else f"tcp://localhost:{port}"
    with pytest.raises(rpc.TransferTimeout, match=f"no store at localhost:{port} .* no sign of rank 0"):
        rpc.init_rpc("late", rank=1, rpc_backend_options=rpc.RpcBackendOptions(init_method=place, rpc_timeout=1))


def first_of_several(meeting):
    """A dynamic group needs nobody else, however many the launcher has started."""
    place = rpc.RpcBackendOptions(init_method="env://", rpc_timeout=20)
    rpc.init_rpc("first", rank=0, rpc_backend_options=place)
    assert agent.current().worker_names() == ["first"]
    rpc.shutdown()


def test_a_dynamic_group_begins_with_one_worker():
    environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "2"}
    results(run_group(first_of_several, 1, dynamic=True, environment=environment))


def calls_another(rank):
    assert rpc.rpc_sync(f"worker{1 - rank}", abs, (-1,)) == 1
    rpc.shutdown()


def test_torchrun_hosts_no_store_but_at_its_own_address():
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    results(run_group(calls_another, environment=environment, init_method=f"tcp://127.0.0.1:{free_port()}"))


def calls(meeting, hidden=(), forbidden=(), device=""):
    for path in hidden:
        sandbox.hide(path)
    if forbidden:
        sandbox.forbid(*forbidden)
    meeting.join(world_size=2)
    for size in (1, 300_000):
        tensor = torch.ones(size)
        assert torch.equal(rpc.rpc_sync(f"worker{1 - meeting.rank}", identity, (tensor,)), tensor)
    found = {link.channel.device.name for link in agent.current().links.rows.values()}
    rpc.shutdown()
    return found


def without_system_files(meeting):
    return calls(meeting, hidden=["/proc/sys"])


@pytest.mark.skipif(os.geteuid() != 0, reason="hiding /proc/sys needs root")
def test_a_job_runs_without_the_files_of_the_system():
    assert results(run_group(without_system_files, dynamic=True))[0] == {"shm"}


def without_descriptors_of_processes(meeting):
    return calls(meeting, forbidden=["pidfd_open", "process_vm_readv", "process_vm_writev"])


@pytest.mark.skipif(bool(sandbox.why_not()), reason=sandbox.why_not())
def test_a_job_runs_where_a_sandbox_forbids_calls():
    assert results(run_group(without_descriptors_of_processes, dynamic=True))[0] == {"shm"}


needs_filters = pytest.mark.skipif(bool(sandbox.why_not()), reason=sandbox.why_not())
ANYWHERE = [
    "epoll_create1",
    "epoll_ctl",
    "fallocate",
    "getcpu",
    "getrandom",
    "kill",
    "madvise",
    "membarrier",
    "mlock",
    "mremap",
    "pidfd_open",
    "prctl",
    "prlimit64",
    "process_vm_readv+process_vm_writev",
    "sched_getaffinity",
    "sched_setaffinity",
    "sched_yield",
    "socket(AF_INET6)",
    "socket(AF_NETLINK)",
    "socketpair",
    "statx",
    "sysinfo",
    "tgkill",
]
"""What a rank does without, or does otherwise, whatever its device."""
NEEDED = {
    "memfd_create": ("shm", "memfd_create"),
    "fcntl(F_ADD_SEALS)": ("shm", "F_ADD_SEALS"),
    "fcntl(F_GET_SEALS)": ("shm", "F_GET_SEALS"),
    "getsockopt(SO_PEERCRED)": ("shm", "SO_PEERCRED"),
    "socket(AF_UNIX)": ("shm", "AF_UNIX"),
    "mprotect(PROT_EXEC)": ("both", "mprotect"),
}
"""Without which one of the devices does not open, and what its error says. The other one works."""


def over(meeting, devices, calls, code=errno.EPERM, refused=(1,)):
    """The ranks ``refused`` may not use ``calls``; both call each other over each device."""
    if meeting.rank in refused:
        sandbox.forbid(*calls.split("+"), code=code)
    for device in devices:
        meeting.join(world_size=2, transport=device, init_method=f"file://{meeting._place}-{device}")
        for size in (1, 1 << 20, 1 << 20):
            tensor = torch.arange(float(size)) + meeting.rank
            assert torch.equal(rpc.rpc_sync(f"worker{1 - meeting.rank}", identity, (tensor,)), tensor)
        assert {link.channel.device.name for link in agent.current().links.rows.values()} == {device}
        assert "spins" in agent.current().device.explain() or device == "tcp"
        rpc.shutdown()


@needs_filters
@pytest.mark.parametrize("calls", ANYWHERE)
def test_a_job_runs_without_this_call(calls):
    results(run_group(partial(over, devices=["shm", "tcp"], calls=calls), dynamic=True))


@needs_filters
@pytest.mark.parametrize("calls", ["fallocate", "pidfd_open", "process_vm_readv+process_vm_writev", "sched_getaffinity"])
def test_a_job_runs_on_a_system_that_does_not_know_this_call(calls):
    results(run_group(partial(over, devices=["shm", "tcp"], calls=calls, code=errno.ENOSYS), dynamic=True))


@needs_filters
@pytest.mark.parametrize("call", NEEDED)
def test_a_call_that_a_device_needs_is_named(call):
    device, text = NEEDED[call]
    for each in ("shm", "tcp"):
        if device not in (each, "both"):
            results(run_group(partial(over, devices=[each], calls=call), dynamic=True))
            continue
        for found in run_group(partial(over, devices=[each], calls=call, refused=(0, 1)), dynamic=True):
            assert found.error == "NotSupported" and text in found.text.splitlines()[0], found.text


def test_pythons_that_were_built_for_an_old_system(monkeypatch):
    for name in ("memfd_create", "pidfd_open"):
        monkeypatch.delattr(os, name)
    memory, fd = mapping.memfd("test", 4096)
    mapping.check_sealed(fd, 4096)
    os.close(fd)
    memory.close()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert runs(child.pid) and runs(os.getpid()) and runs(0)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not runs(child.pid)  # and nobody has asked for its status yet
    child.wait(30)
    child.stdin.close()
    assert not runs(child.pid)
