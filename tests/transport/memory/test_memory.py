"""Several devices on one memory: what is registered once is good for the peers of each of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from timing import eventually
from transport_peer import C, S, all_are, filled

from rdmarpc.transport import Device, DeviceOptions, RdmaError, RegistrationError, RemoteAccessError, RemoteRegion, TcpDevice
from rdmarpc.transport.memory.arena import SEGMENT_BYTES, Segment
from rdmarpc.transport.memory.memory import Memory

T = 30.0
KINDS = ("shm", "tcp")
Open = Callable[..., Device]


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory(shared=True)
    yield memory
    memory.close()


def test_one_descriptor_for_the_peers_of_both(memory: Memory, open_device: Open) -> None:
    devices = [open_device(kind, memory=memory) for kind in KINDS]
    peers = [open_device(kind) for kind in KINDS]
    early = [peers[0].connect(devices[0].address), peers[1].connect(devices[1].address)]
    place = filled(devices[0], 1000, 0)  # in a segment that is made now: one peer is told, the other finds out
    descriptor = devices[1].export(place)
    assert descriptor == devices[0].export(place)
    late = [peer.connect(device.address) for peer, device in zip(peers, devices, strict=True)]  # told as they come
    for at, (peer, channel) in enumerate(zip(peers * 2, early + late, strict=True)):
        channel.memcpy(RemoteRegion.load(descriptor), filled(peer, 1000, at + 1)).wait(T)
        assert all_are(place, at + 1)
    assert memory.counters()["registrations"] == 1
    assert [device.counters()["registrations"] for device in devices] == [1, 1]
    eventually(lambda: [device.counters()["channels"] for device in devices], [2, 2])  # who connects knows first
    assert [peer.counters()["posts"] for peer in peers] == [2, 2]


def test_memory_that_is_not_ours_is_announced_and_withdrawn_everywhere(memory: Memory, open_device: Open) -> None:
    devices = [open_device(kind, memory=memory) for kind in KINDS]
    peers = [open_device(kind) for kind in KINDS]
    channels = [peer.connect(device.address) for peer, device in zip(peers, devices, strict=True)]
    foreign = torch.zeros(5000, dtype=torch.uint8)
    region = devices[1].register(foreign)
    remote = RemoteRegion.load(region.export())
    for peer, channel, fill in zip(peers, channels, (C, S), strict=True):
        channel.memcpy(remote, filled(peer, 5000, fill)).wait(T)
        assert all_are(foreign, fill)
    region.close()
    for peer, channel in zip(peers, channels, strict=True):
        with pytest.raises(RemoteAccessError, match="not registered"):
            channel.memcpy(remote, filled(peer, 5000, 0)).wait(T)
    assert all_are(foreign, S)


def test_one_poller_is_woken_by_both(memory: Memory, open_device: Open) -> None:
    devices = [open_device(kind, memory=memory) for kind in KINDS]
    peers = [open_device(kind) for kind in KINDS]
    theirs = [peer.connect(device.address) for peer, device in zip(peers, devices, strict=True)]
    poller = devices[0].poller()
    rows = [poller.add(device.accept(timeout=T), 5) for device in devices]
    for channel, row in zip(theirs, rows, strict=True):
        timer = threading.Timer(0.1, channel.notify, (5,))  # by then the poller is asleep
        timer.start()
        assert poller.wait(T) == (row, 1)
        timer.join()
    poller.close()


class Refusing(TcpDevice):
    """A device that pins memory, and may pin no more."""

    def announce_segment(self, segment: Segment) -> None:
        raise RegistrationError("no more may be pinned", device=self.name)

    def announce(self, number: int, key: int, address: int, nbytes: int) -> None:
        if nbytes:
            raise RegistrationError("no more may be pinned", device=self.name)
        super().announce(number, key, address, nbytes)


def test_a_device_that_cannot_register_is_an_error_and_nothing_stays(memory: Memory, open_device: Open) -> None:
    shm, peer = open_device("shm", memory=memory), open_device("shm")
    before = filled(shm, 1000, 0)
    channel = peer.connect(shm.address)
    with Refusing("", DeviceOptions(memory=memory)) as refusing:
        with pytest.raises(RegistrationError, match="no more may be pinned"):
            shm.empty(SEGMENT_BYTES, dtype=torch.uint8)
        with pytest.raises(RegistrationError, match="no more may be pinned"):
            refusing.register(torch.zeros(1000))
        assert shm.counters()["segments"] == 1 and shm.counters()["registrations"] == 1
        channel.memcpy(RemoteRegion.load(shm.export(before)), filled(peer, 1000, C)).wait(T)  # the others go on
        assert all_are(before, C)
    place = filled(shm, SEGMENT_BYTES, 0)  # the device that refused is gone
    channel.memcpy(RemoteRegion.load(shm.export(place)), filled(peer, SEGMENT_BYTES, S)).wait(T)
    assert all_are(place, S)
    assert shm.counters()["segments"] == 2 and len(memory.regions) == 2


def test_the_files_of_a_memory_end_with_it(open_device: Open) -> None:
    memory = Memory(shared=True)
    with open_device("shm", memory=memory), open_device("tcp", memory=memory) as tcp:
        kept = filled(tcp, 1000, C)
        files = {memory.bells_fd, *(segment.fd for segment in memory.arena.segments)}
        assert len(files) == 2 and all(os.path.exists(f"/proc/self/fd/{fd}") for fd in files)
    still = memory.arena.writable.tensor((1000,), torch.uint8).fill_(S)  # the devices are closed, the memory is not
    assert files == {memory.bells_fd, *(segment.fd for segment in memory.arena.segments)}
    memory.close()
    memory.close()
    assert {memory.bells_fd, *(segment.fd for segment in memory.arena.segments)} == {-1}
    assert all_are(kept, C) and all_are(still, S)
    with pytest.raises(RdmaError, match="closed"):
        memory.arena.writable.tensor((1000,), torch.uint8)


def test_shm_needs_memory_that_can_be_shared(open_device: Open) -> None:
    with pytest.raises(ValueError, match="shared=True"):
        open_device("shm", memory=Memory(shared=False))
