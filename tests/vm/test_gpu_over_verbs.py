"""``wrap`` with stages on GPUs over ``verbs``, as between hosts. Over Soft-RoCE with the software GPU."""

from __future__ import annotations

from collections.abc import Callable

import gpu
import packets
import pytest
from group import results, run_group
from trained import train

import rdmarpc as rpc

pytestmark = [pytest.mark.gpu, pytest.mark.rdma, pytest.mark.timeout(400)]


def at_driver(rank: int) -> int:
    nbytes = train(on=str(gpu.device())) if rank == 0 else 0
    rpc.shutdown()
    return nbytes


def test_training_is_equal_to_the_bit(record_property: Callable[[str, object], None]) -> None:
    before = packets.counters()
    nbytes = results(run_group(at_driver, 3, gpu=True, transport="verbs", timeout=300.0, rpc_timeout=60))[0]
    sent = packets.counters() - before
    record_property("bytes_direct", nbytes)
    assert nbytes > 0 and sent["sent_pkts"] >= packets.needed(nbytes)
