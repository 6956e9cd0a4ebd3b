"""A process that joins and leaves again and again is as large as after the first times."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from group import dismiss, results, run_group, until_dismissed

import rdmarpc as rpc
from rdmarpc import agent

_MORE_MIB = 64


def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def lives(meeting):
    seen = []
    for life in range(8):
        path = f"{meeting._place}-{life}"
        options = rpc.RpcBackendOptions(init_method=f"file://{path}", transport=meeting._options["transport"])
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        tensor = torch.rand(1 << 20)
        for _ in range(10):
            rpc.rpc_sync("alone", torch.add, (tensor, 1))
        rpc.shutdown()
        maps = Path("/proc/self/maps").read_text().count("rdmarpc-")
        seen.append((len(os.listdir("/proc/self/fd")), threading.active_count(), maps, resident_mib()))
    return seen


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_nothing_stays_of_a_life(device):
    ((*_, warm, _, _, _, last),) = results(run_group(lives, 1, transport=device, dynamic=True))
    assert last[:3] == warm[:3], "descriptors, threads, mappings"
    assert last[3] < warm[3] + _MORE_MIB, (warm, last)


def told_twice(rank):
    """An error that two threads raise at once would hold the frames of both: a future among these is a circle for ever."""
    if rank == 1:
        until_dismissed()
        rpc.shutdown(graceful=False)
        return 4
    ending = agent.current().termination
    report = ending.report(0, 1, 0, 0)
    ending.fail(rpc.PeerLost("worker1 is lost"))
    late = ending.report(0, 1, 0, 0)
    heard = []
    for wait in (report.value, late.value, report.value, lambda: ending.wait(None)):
        with pytest.raises(rpc.PeerLost, match="worker1 is lost") as error:
            wait()
        heard.append(error.value)
    dismiss("worker1")
    rpc.shutdown(graceful=False)
    return len({id(error) for error in heard})


def test_each_who_hears_of_a_loss_during_shutdown_gets_an_error_of_its_own():
    assert results(run_group(told_twice, 2)) == [4, 4]
