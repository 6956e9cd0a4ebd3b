"""Functions that call other workers and wait there, more of them than there are threads."""

from __future__ import annotations

import pytest
from group import results, run_group

import rdmarpc as rpc
from rdmarpc.transport import TransferTimeout


def hop(left: int, here: str, there: str) -> int:
    return 0 if left == 0 else 1 + rpc.rpc_sync(there, hop, (left - 1, there, here), timeout=60)


def nested(rank: int) -> None:
    if rank == 0:
        assert rpc.rpc_sync("worker1", hop, (30, "worker1", "worker2"), timeout=60) == 30
        assert rpc.rpc_sync("worker0", hop, (12, "worker0", "worker0"), timeout=60) == 12
        calls = [rpc.rpc_async("worker1", hop, (3, "worker1", "worker2"), timeout=60) for _ in range(24)]
        assert [call.wait() for call in calls] == [3] * 24
        assert relieved() + rpc.rpc_sync("worker1", relieved) > 0
    rpc.shutdown()


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_more_calls_wait_for_each_other_than_there_are_threads(device: str) -> None:
    results(run_group(nested, 3, transport=device, num_worker_threads=4))


def of_itself(name: str) -> str:
    with pytest.raises(TransferTimeout):
        rpc.rpc_sync(name, hop, (0, "", ""), timeout=3)
    return "nobody had a thread for it"


def in_turn(rank: int) -> None:
    if rank == 0:
        assert rpc.rpc_sync("worker1", of_itself, ("worker1",), timeout=30) == "nobody had a thread for it"
        assert rpc.rpc_sync("worker1", relieved) == 0
    rpc.shutdown()


def relieved() -> int:
    return rpc.debug_info()["agent.num_relieved"]


def test_functions_of_a_single_thread_run_one_after_the_other() -> None:
    results(run_group(in_turn, num_worker_threads=1))
