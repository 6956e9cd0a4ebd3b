"""A process that joins and leaves again and again is as large as after the first times."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from group import results, run_group

import rdmarpc as rpc

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
