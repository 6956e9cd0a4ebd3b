"""Who may be whom: a worker's number is for the holder of the key that stands in its record."""

from __future__ import annotations

import pytest
from called import identity
from group import results, run_group

import rdmarpc as rpc
from rdmarpc.calls import agent
from rdmarpc.links.connecting import _HELLO, _HELLO_MAGIC
from rdmarpc.transport import PeerLost, TransferTimeout

DEVICES = ["shm", "tcp", pytest.param("verbs", marks=pytest.mark.rdma)]


def takes_the_number_of_another(meeting):
    """Worker 2 connects to worker 0 as if it were worker 1, before worker 1 has called."""
    meeting.join(world_size=3)
    if meeting.rank == 2:
        links = agent.current().links
        address = agent.current().group.record(0).address.encode()
        with pytest.raises((PeerLost, TransferTimeout)):
            channel = agent.current().device.connect(address, hello=_HELLO.pack(_HELLO_MAGIC, 1) + bytes(64), timeout=3.0)
            channel.expect(20).wait(5.0)
        assert 0 not in links.by_worker
        meeting.say("tried")
    meeting.hear("tried")
    if meeting.rank == 1:
        assert rpc.rpc_sync("worker0", identity, ("it is me",), timeout=10) == "it is me"
        meeting.say("heard")
    meeting.hear("heard")
    rpc.rpc_sync("worker0", identity, (1,))
    rpc.shutdown()
    return "fine"


@pytest.mark.parametrize("device", DEVICES)
def test_a_member_cannot_take_the_number_of_another(device):
    assert results(run_group(takes_the_number_of_another, 3, dynamic=True, transport=device)) == ["fine"] * 3
