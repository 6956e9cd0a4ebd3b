"""Several RDMA ports side by side: the contract again, and what is parted over them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import test_contract
import test_contract_memory
import torch
from transport_peer import C, S, all_are, filled

from rdmarpc.transport import Channel, Device, NotSupported, PeerLost, RemoteRegion

T = 20.0
KIND = "verbs://rxe0,rxe1"
Open = Callable[..., Device]
pytestmark = [
    pytest.mark.rdma,
    pytest.mark.skipif(not Path("/sys/class/infiniband/rxe1").exists(), reason="no second RDMA port named rxe1"),
]
# Of the contract what passes through the parting; the rest is the verbs device's own.
test_both_directions = test_contract.test_both_directions_at_once_with_more_than_any_buffer_holds
test_local_side = test_contract.test_local_side_may_lie_anywhere
test_lists = test_contract.test_a_list_with_reads_and_writes_and_one_notification
test_rebind = test_contract.test_rebind
test_unbound = test_contract.test_an_unbound_tensor_is_let_go
test_notifications = test_contract.test_notifications_count_and_do_not_depend_on_order
test_data_before_notification = test_contract.test_the_data_is_there_before_its_notification
test_poller = test_contract.test_poller
test_window = test_contract.test_window
test_foreign_memory = test_contract_memory.test_foreign_memory_is_written_and_read_until_it_is_closed
test_growth = test_contract_memory.test_growth_is_reachable_at_once
test_counters = test_contract.test_counters
test_fence = test_contract.test_what_was_posted_before_a_fence_is_counted_after_it
test_threads = test_contract.test_threads_share_a_channel


@pytest.fixture
def kind() -> str:
    return KIND


def ends(open_device: Open) -> tuple[Device, Device, Channel, Channel]:
    a, b = open_device(KIND, arena_limit=128 << 20), open_device(KIND, arena_limit=128 << 20)
    ab = a.connect(b.address, timeout=T)
    return a, b, ab, b.accept(timeout=T)


def carried(device: Device) -> list[int]:
    return [rail.counters()["bytes_direct"] for rail in device.rails]


def test_large_copies_are_parted_and_announced_when_all_of_them_is_there(open_device: Open) -> None:
    a, b, ab, ba = ends(open_device)
    nbytes = (5 << 20) + 4097
    ours, theirs = filled(a, nbytes, 0), filled(b, nbytes, 0)
    remote = RemoteRegion.load(b.export(theirs))
    transfer = ab.prepare([(remote, ours)], notify=7)
    arrived = ba.expect(7)
    for fill in range(1, 9):
        ours.fill_(fill)
        work = transfer.post()
        arrived.wait(T)
        assert all_are(theirs, fill)
        work.wait(T)
    first, second = carried(a)
    assert first + second == 8 * nbytes and 0.4 < second / (8 * nbytes) < 0.6
    other = filled(a, nbytes, 99)
    transfer.rebind(0, other)
    transfer.post()
    arrived.wait(T)
    assert all_are(theirs, 99)
    ours.fill_(0)
    ab.memcpy(ours, remote, notify=8).wait(T)  # a READ
    ba.expect(8).wait(T)
    assert all_are(ours, 99)
    ab.memcpy(remote, torch.full((nbytes,), 55, dtype=torch.uint8), notify=7).wait(T)  # memory of no arena
    ab.notify(9)
    ab.fence(T)
    arrived.wait(T)
    ba.expect(9).wait(T)
    assert all_are(theirs, 55)


def test_small_copies_go_by_the_first_port(open_device: Open) -> None:
    a, b, ab, ba = ends(open_device)
    ours, theirs = filled(a, 1 << 20, C), filled(b, 1 << 20, S)
    ab.memcpy(RemoteRegion.load(b.export(theirs)), ours, notify=3).wait(T)
    ba.expect(3).wait(T)
    assert all_are(theirs, C) and carried(a) == [1 << 20, 0]


@pytest.mark.parametrize("broken", [0, 1])
def test_who_loses_one_port_loses_the_peer(open_device: Open, broken: int) -> None:
    a, b, ab, ba = ends(open_device)
    lost: list[Channel] = []
    a.on_lost = b.on_lost = lost.append
    rail = ab.rails[broken]
    rail.device.lost(rail, PeerLost("pulled", peer=rail.peer, device="verbs", status="TEST"))
    with pytest.raises(PeerLost):
        ba.expect(3).wait(T)
    limit = time.monotonic() + T
    while len(lost) < 2 and time.monotonic() < limit:
        time.sleep(0.01)
    assert sorted(map(id, lost)) == sorted(map(id, (ab, ba)))
    for channel in (ab, ba):
        with pytest.raises(PeerLost):
            channel.notify(3)
        assert all(each.error is not None for each in channel.rails)
    again = a.connect(b.address, timeout=T)
    again.notify(4)
    b.accept(timeout=T).expect(4).wait(T)


def test_both_ends_name_as_many_ports(open_device: Open) -> None:
    a, b = open_device(KIND, arena_limit=32 << 20), open_device("verbs://rxe0", arena_limit=32 << 20)
    with pytest.raises(NotSupported, match="not 2 ports side by side"):
        a.connect(b.address)
    with pytest.raises(NotSupported, match="an address looks like verbs:"):
        b.connect(a.address)
