"""What peers hand each other over a Unix socket: memory that cannot be cut short, and descriptors that can be lost."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import limits
import pytest
from timing import eventually
from transport_peer import Peer, State, accept, make, works

from rdmarpc.transport import Channel, Device, NotSupported, PeerLost, RdmaError, RemoteRegion
from rdmarpc.transport.memory.arena import Segment
from rdmarpc.transport.memory.mapping import mapped, memfd
from rdmarpc.transport.shm.memory import received

T = 30.0
Open = Callable[..., Device]


def test_shared_memory_keeps_its_size_for_good() -> None:
    memory, fd = memfd("test", 8192)
    for size in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.posix_fallocate(fd, 0, 8192)  # its pages can still be had at once
    memory[8191] = 7
    assert mapped(fd, 8192)[8191] == 7
    os.close(fd)


def test_a_kernel_that_cannot_seal_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> int:
        raise OSError(22, "Invalid argument")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(NotSupported, match=r"seal(?s:.*)tcp"):
        memfd("test", 8192)
    assert set(os.listdir("/proc/self/fd")) <= before


def unsealed(nbytes: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    return fd


def sealed(nbytes: int) -> int:
    return memfd("test", nbytes)[1]


@pytest.mark.parametrize(
    ("fd", "why"),
    [
        (lambda: unsealed(8192), "not sealed"),
        (lambda: sealed(4096), "8192 bytes and handed over 4096"),
        (lambda: sealed(16384), "8192 bytes and handed over 16384"),
        (lambda: os.open("/dev/zero", os.O_RDWR), "no memfd"),
        (lambda: socket.socket().detach(), "no memfd"),
    ],
)
def test_what_could_be_cut_short_is_not_mapped(fd: Callable[[], int], why: str) -> None:
    found = fd()
    try:
        with pytest.raises(PeerLost, match=why):
            mapped(found, 8192)
    finally:
        os.close(found)


# -- a peer that announces what is not there


class Bad:
    """What a peer tells of a segment that it does not have: see ``announce_bad``."""

    UNSEALED, SHORT, NO_MEMORY, NONE = "unsealed", "short", "no memory", "none"


def announce_bad(state: State, how: str) -> None:
    channel = state.channel
    nbytes = 1 << 62 if how == Bad.NO_MEMORY else 8192
    fd = -1
    if how == Bad.UNSEALED:
        fd = unsealed(8192)
    elif how == Bad.SHORT:
        fd = sealed(4096)
    elif how == Bad.NO_MEMORY:
        fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    channel.send(1, 77, 1, 0, nbytes, fd)  # type: ignore[attr-defined]


@contextmanager
def told_of_losses(device: Device) -> Iterator[list[Channel]]:
    lost: list[Channel] = []
    device.on_lost = lost.append
    yield lost


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (Bad.UNSEALED, "not sealed"),
        (Bad.SHORT, "handed over 4096"),
        (Bad.NO_MEMORY, "Cannot allocate memory|ENOMEM"),
        (Bad.NONE, "without handing it over"),
    ],
)
def test_memory_that_cannot_be_mapped_ends_that_peers_channel_alone(
    open_device: Open, start_peer: Callable[..., Peer], how: str, why: str
) -> None:
    """Before, an error of the system ended the thread that serves all peers."""
    device = open_device("shm")
    bad, good, later = start_peer("shm"), start_peer("shm"), start_peer("shm")
    channels = []
    for peer in (bad, good):
        peer.start(accept)
        channels.append(device.connect(peer.address))
        peer.finish()
    with told_of_losses(device) as lost:
        bad.call(announce_bad, how)
        with pytest.raises(RdmaError, match=why) as caught:
            channels[0].expect(1).wait(T)
        assert isinstance(caught.value, PeerLost) and caught.value.peer == channels[0].peer and caught.value.device
        good.kill()  # a death is noticed all the same
        with pytest.raises(PeerLost, match="ended"):
            channels[1].expect(1).wait(T)
        eventually(lambda: lost, channels)  # told a moment after those who wait
    later.start(accept)
    assert device.connect(later.address).error is None
    later.finish()
    works(open_device("shm"), device)


def test_a_descriptor_that_is_lost_ends_that_peers_channel_with_the_limit_named(
    open_device: Open, start_peer: Callable[..., Peer]
) -> None:
    device = open_device("shm")
    peer, other = start_peer("shm"), start_peer("shm")
    for each in (peer, other):
        each.start(accept)
    channel, good = device.connect(peer.address), device.connect(other.address)
    for each in (peer, other):
        each.finish()
    with limits.no_descriptors() as take:
        take()
        remote = RemoteRegion.load(peer.call(make, "much", 80 << 20, 1))  # a segment of its own
        with pytest.raises(PeerLost, match=r"descriptor(?s:.*)EMFILE(?s:.*)ulimit -n"):
            channel.expect(1).wait(T)
    assert remote.nbytes and good.error is None
    good.notify(1)
    works(open_device("shm"), device)


def test_descriptors_are_closed_however_it_ends() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fd = sealed(4096)
    before = set(os.listdir("/proc/self/fd"))
    with ours, theirs:
        socket.send_fds(ours, [b"x"], [fd])
        with pytest.raises(ZeroDivisionError), received(theirs, 10, 1) as (data, fds):
            assert data == b"x" and len(fds) == 1 and not os.get_inheritable(fds[0])
            raise ZeroDivisionError
        socket.send_fds(ours, [b"x"], [fd, fd, fd])  # more than asked for
        with pytest.raises(PeerLost, match="more than 1"), received(theirs, 10, 1):
            raise AssertionError
        assert set(os.listdir("/proc/self/fd")) <= before
    os.close(fd)


def test_an_arena_segment_can_be_had_with_huge_pages_asked_for() -> None:
    memory, fd = memfd("test", 4 << 20)
    segment = Segment(1, 2, memory, fd)
    segment.reserve(4 << 20)
    assert segment.nbytes == 4 << 20 and not segment.view.readonly
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped(fd, 4 << 20)
    segment.close()
