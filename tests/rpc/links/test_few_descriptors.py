"""A process that may open few files: init_rpc says so, by name and with what helps, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys

import ports
import pytest
import torch
from group import results, run_group

import rdmarpc as rpc

PROGRAM = """
import gc, os, resource, sys, tempfile, threading, time
import torch
import ports
import rdmarpc as rpc

transport, static, few = sys.argv[1], sys.argv[2] == "static", [int(text) for text in sys.argv[3].split(",")]
threads = {thread.name for thread in threading.enumerate()}

def count():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))

def join(address):
    options = rpc.RpcBackendOptions(init_method=address, transport=transport, rpc_timeout=10)
    rpc.init_rpc("alone", rank=0, world_size=1 if static else None, rpc_backend_options=options)

def address():
    return f"tcp://127.0.0.1:{ports.free_port()}"

def settle(more):
    deadline = time.monotonic() + 10
    while count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    open_now = [os.readlink(path) for path in map("/proc/self/fd/{}".format, range(64)) if os.path.lexists(path)]
    assert count() == before, (more, count(), before, open_now)
    left = {thread.name for thread in threading.enumerate()} - threads
    assert not left, (more, left)

join(address())  # what is loaded once
rpc.shutdown()
before = count()
gc.freeze()  # every count looks for garbage
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
failed = 0
for more in few:
    where = address()
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + more, hard))
    try:
        join(where)
    except rpc.RdmaError as error:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        text = str(error)
        assert "files open" in text and "ulimit -n" in text, text
        failed += 1
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        rpc.shutdown()
    settle(more)
    assert rpc._is_current_rpc_agent_set() is False
# As if the want came later, at any step: what torch says of a store it cannot open tells nothing, so not over one of tcp.
rpc.api.need_descriptors = lambda count: None
for more in few:
    with tempfile.TemporaryDirectory() as folder:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + more, hard))
        try:
            join(f"file://{folder}/store")
        except rpc.RdmaError as error:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert "ulimit -n" in str(error), error
            failed += 1
        else:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            rpc.shutdown()
        settle(more)
print(failed)
join(address())
assert rpc.rpc_sync("alone", torch.add, (torch.ones(2), 1)).sum() == 4
rpc.shutdown()
"""


@pytest.mark.parametrize(("transport", "group"), [("shm", "static"), ("tcp", "static"), ("auto", "dynamic")])
def test_too_few_descriptors_are_a_named_error_at_every_step(transport: str, group: str) -> None:
    command = [sys.executable, "-c", PROGRAM, transport, group, ",".join(map(str, range(0, 24, 4)))]
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": os.path.dirname(ports.__file__)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.split()[-1]) >= 7


def without_streams(meeting):
    os.closerange(0, 3)
    meeting.join(world_size=2)
    for fd in range(3):
        assert os.write(fd, b"what a library prints") and os.stat(fd).st_rdev == os.stat(os.devnull).st_rdev
    assert rpc.rpc_sync(f"worker{1 - meeting.rank}", torch.add, (torch.ones(3), 1)).tolist() == [2, 2, 2]
    rpc.shutdown()


def test_what_is_printed_without_standard_streams_goes_nowhere() -> None:
    results(run_group(without_streams, 2, dynamic=True))
