"""The contract between two processes: both directions, the end of a peer however it comes, abort, fork."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from halt import halt
from transport_peer import (
    Across,
    C,
    Peer,
    S,
    State,
    accept,
    altered,
    channel_error,
    close_channel,
    fetch,
    make,
    notify,
    read,
    wait_for,
    write,
)

from rdmarpc.transport import Device, NotSupported, PeerLost, RdmaError, RemoteAccessError, RemoteRegion, TransferTimeout

T = 30.0


def tensor_of(device: Device, nbytes: int, fill: int) -> torch.Tensor:
    return device.empty(nbytes, dtype=torch.uint8, writable=True).fill_(fill)


# -- copies


def test_both_ends_write_and_read(across: Across) -> None:
    size = 3_000_001
    ours = tensor_of(across.device, size, C)
    remote = RemoteRegion.load(across.peer.call(make, "theirs", size, S))
    mine = RemoteRegion.load(across.device.export(ours))

    into = tensor_of(across.device, size, 0)
    across.channel.memcpy(into, remote).wait(T)
    assert bool((into == S).all())
    across.channel.memcpy(remote, ours, notify=1).wait(T)
    across.peer.call(wait_for, 1, 1, T)
    assert across.peer.call(fetch, "theirs") == b"c" * size

    across.peer.call(make, "more", size, S)
    across.peer.call(write, "more", mine, 2)
    across.channel.expect(2).wait(T)
    assert bool((ours == S).all())
    ours.fill_(7)
    across.peer.call(read, "more", mine)
    assert across.peer.call(fetch, "more") == b"\7" * size


def test_a_notification_before_anybody_expects_it(across: Across) -> None:
    for _ in range(3):
        across.peer.call(notify, 77)
    across.channel.expect(77, 2).wait(T)
    across.channel.expect(77).wait(T)
    assert not across.channel.expect(77).done()


def test_a_refused_peer_may_go_on(across: Across) -> None:
    ours = tensor_of(across.device, 100, C)
    mine = RemoteRegion.load(across.device.export(ours))
    across.peer.call(make, "theirs", 100, S)
    with pytest.raises(RemoteAccessError):
        across.peer.call(write, "theirs", RemoteRegion(mine.owner, mine.epoch, mine.region, 1, 0, 100), 1)
    assert bool((ours == C).all())
    across.peer.call(write, "theirs", mine, 1)
    across.channel.expect(1).wait(T)
    assert bool((ours == S).all())


def test_foreign_memory_across_processes(across: Across) -> None:
    foreign = torch.full((100_000,), C, dtype=torch.uint8)
    with across.device.register(foreign) as region:
        across.peer.call(make, "theirs", 100_000, S)
        try:
            across.peer.call(read, "theirs", region.remote)
        except NotSupported as error:
            pytest.skip(f"this system does not allow it: {error}")
        assert across.peer.call(fetch, "theirs") == b"c" * 100_000
        across.peer.call(make, "theirs", 100_000, S)
        across.peer.call(write, "theirs", region.remote, 1)
        across.channel.expect(1).wait(T)
        assert bool((foreign == S).all())
    with pytest.raises(RemoteAccessError):
        across.peer.call(write, "theirs", region.remote, 1)


def test_foreign_memory_lives_as_long_as_peers_may_touch_it(across: Across) -> None:
    """Even if whoever registered it forgets everything: a peer must not write into freed memory."""
    foreign = torch.zeros(3 << 20, dtype=torch.uint8)
    alive = weakref.ref(foreign)
    remote = across.device.register(foreign).remote
    del foreign
    assert alive() is not None
    across.peer.call(make, "theirs", 3 << 20, S)
    try:
        across.peer.call(write, "theirs", remote, 1)
    except NotSupported as error:
        pytest.skip(f"this system does not allow it: {error}")
    tensor = alive()
    assert tensor is not None and bool((tensor == S).all())


# -- the end of a peer


def hang(state: State, seconds: float) -> None:
    time.sleep(seconds)


def test_a_killed_peer_is_lost_within_a_second(across: Across) -> None:
    remote = RemoteRegion.load(across.peer.call(make, "theirs", 1000, S))
    ours = tensor_of(across.device, 1000, C)
    transfer = across.channel.prepare([(remote, ours)], notify=1)
    heard = threading.Event()
    across.device.on_lost = lambda channel: heard.set()
    expectation = across.channel.expect(5)
    killed = threading.Timer(0.2, across.peer.kill)
    killed.start()
    started = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        expectation.wait(20.0)
    assert time.monotonic() - started < 10.0  # 0.2 s to the kill, 1 s at most to know; the rest is for a busy machine
    assert across.channel.peer in str(caught.value)
    assert heard.wait(T)
    for use in (lambda: transfer.post().wait(T), lambda: across.channel.notify(1), lambda: expectation.wait(T)):
        with pytest.raises(PeerLost):
            use()
    across.channel.close()
    across.channel.abort()
    killed.join(T)  # it closes what the end of the test closes, too


def test_work_under_way_fails_when_the_peer_is_killed(across: Across) -> None:
    """The peer is stopped first, so that the copy can be under way on devices where it is not done by this process."""
    size = 200 << 20
    remote = RemoteRegion.load(across.peer.call(make, "theirs", size, S))
    ours = tensor_of(across.device, size, C)
    assert across.peer.process.pid
    halt(across.peer.process.pid)
    works = [across.channel.memcpy(remote, ours), across.channel.memcpy(remote, ours)]
    killed = threading.Timer(0.2, across.peer.kill)
    killed.start()
    # The kernel may take a dying process' regions before its queue pair: the adapter then still answers, and refuses.
    ended = (PeerLost, RemoteAccessError) if across.device.name.startswith("verbs") else PeerLost
    for work in works:
        try:
            work.wait(20.0)
        except ended as error:
            assert isinstance(work.exception(), type(error))
        assert work.done()
    with pytest.raises(ended):
        across.channel.expect(1).wait(T)
    killed.join(T)  # it closes what the end of the test closes, too


def test_a_peer_that_is_stopped_is_not_lost_but_late(across: Across) -> None:
    assert across.peer.process.pid
    halt(across.peer.process.pid)
    across.channel.notify(1)
    with pytest.raises(TransferTimeout):
        across.channel.expect(1).wait(0.2)
    os.kill(across.peer.process.pid, signal.SIGCONT)
    across.peer.call(wait_for, 1, 1, T)
    across.peer.call(notify, 1)
    across.channel.expect(1).wait(T)


@pytest.mark.parametrize("kind", ["shm", pytest.param("verbs", marks=pytest.mark.rdma)], indirect=True)
def test_memory_that_was_announced_is_reached_while_its_owner_is_stopped(across: Across, kind: str) -> None:
    """Although the announcement has not been heard yet: nobody waits for the peer to confirm it."""
    channel, heard = across.channel, threading.Event()
    name = "receive" if kind == "shm" else "hear"
    hear = getattr(channel, name)

    def hear_late(*message: object) -> object:
        heard.wait(T)
        return hear(*message)

    setattr(channel, name, hear_late)
    # A segment of its own; little of it is READ, for adapters in software.
    remote = altered(RemoteRegion.load(across.peer.call(make, "theirs", 80 << 20, S)), nbytes=1 << 16)
    assert across.peer.process.pid
    halt(across.peer.process.pid)
    try:
        threading.Timer(0.3, heard.set).start()
        start, into = time.monotonic(), tensor_of(across.device, remote.nbytes, 0)
        channel.memcpy(into, remote).wait(T)
        assert time.monotonic() - start < T / 2 and bool((into == S).all())
    finally:
        os.kill(across.peer.process.pid, signal.SIGCONT)


def hold_the_gil(state: State, seconds: float) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def test_a_peer_that_runs_and_does_not_read_is_not_lost(
    kind: str, open_device: Callable[..., Device], start_peer: Callable[..., Peer]
) -> None:
    """For longer than ``peer_timeout``, and with all buffers between the two full."""
    peer, device = start_peer(kind), open_device(kind, peer_timeout=3.0)
    peer.start(accept)
    channel = device.connect(peer.address)
    peer.finish()
    size = 96 << 20
    theirs = RemoteRegion.load(peer.call(make, "theirs", size, S))
    ours = tensor_of(device, size, C)
    peer.start(hold_the_gil, 4.0)
    time.sleep(0.2)
    channel.memcpy(theirs, ours, notify=1).wait(20.0)
    peer.finish()
    assert channel.error is None
    peer.call(wait_for, 1, 1, T)
    peer.call(close_channel)


def test_a_peer_that_closes_its_channel_is_lost(across: Across) -> None:
    across.peer.call(notify, 3)
    across.peer.call(close_channel)
    across.channel.expect(3).wait(T)
    with pytest.raises(PeerLost):
        across.channel.expect(3).wait(T)
    with pytest.raises(PeerLost):
        across.channel.notify(1)


def test_a_peer_that_ends_normally_is_lost(across: Across) -> None:
    across.peer.stop()
    with pytest.raises(PeerLost):
        across.channel.expect(3).wait(T)


def test_our_close_is_seen_by_the_peer(across: Across) -> None:
    across.peer.start(wait_for, 1, 1, T)
    across.channel.close()
    with pytest.raises(PeerLost):
        across.peer.finish()
    assert across.peer.call(channel_error) == "PeerLost"


def test_the_loss_of_one_peer_leaves_the_others(across: Across, kind: str, start_peer: Callable[..., Peer]) -> None:
    other = start_peer(kind)
    other.start(accept)
    channel = across.device.connect(other.address)
    other.finish()
    across.peer.kill()
    with pytest.raises(PeerLost):
        across.channel.expect(1).wait(T)
    other.call(notify, 1)
    channel.expect(1).wait(T)
    with pytest.raises(PeerLost):
        across.device.connect(across.peer.address, timeout=2.0)


# -- abort


def write_until_told(state: State, remote: RemoteRegion) -> int:
    """Write the same tensor into ``remote`` as fast as possible until the channel ends: how often."""
    transfer = state.channel.prepare([(remote, state.kept["source"])], notify=1)
    for turn in range(1 << 30):
        try:
            transfer.post().wait(20.0)
        except PeerLost:
            return turn
    raise AssertionError


@pytest.mark.parametrize("nbytes", [100, 8 << 20])
def test_no_byte_lands_after_abort(across: Across, nbytes: int) -> None:
    ours = tensor_of(across.device, nbytes, 0)
    across.peer.call(make, "source", nbytes, S)
    across.peer.start(write_until_told, RemoteRegion.load(across.device.export(ours)))
    across.channel.expect(1, 6).wait(T)  # it has waited for all of these but the last
    across.channel.abort(T)
    ours.fill_(C)
    assert across.peer.finish() >= 5
    time.sleep(0.05)
    assert bool((ours == C).all())


def test_abort_with_a_stopped_peer_returns(across: Across) -> None:
    assert across.peer.process.pid
    halt(across.peer.process.pid)
    started = time.monotonic()
    try:
        across.channel.abort(0.3)
    except TransferTimeout:
        pass
    assert time.monotonic() - started < 15.0
    os.kill(across.peer.process.pid, signal.SIGCONT)
    with pytest.raises(PeerLost):
        across.peer.call(wait_for, 1, 1, T)


# -- fork


def in_child(act: Callable[[], object]) -> bytes:
    """Run this in a forked child and return what it reported."""
    into, out = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            report = repr(act()).encode()
        except RdmaError as error:
            report = b"RdmaError: " + str(error).encode()
        except BaseException as error:
            report = b"other: " + repr(error).encode()
        os.write(out, report)
        os._exit(0)
    os.close(out)
    with os.fdopen(into, "rb") as pipe:
        report = pipe.read()
    os.waitpid(pid, 0)
    return report


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_cannot_use_the_device_nor_harm_it(across: Across) -> None:
    foreign = torch.zeros(10)
    region = across.device.register(foreign)
    poller = across.device.poller()
    row = poller.add(across.channel, 2)
    for act in (
        lambda: across.device.empty(10),
        lambda: across.device.register(torch.zeros(3)),
        lambda: across.device.connect(across.peer.address),
    ):
        assert b"forked" in in_child(act)
    for act in (across.channel.close, across.channel.abort, across.device.close, region.close, lambda: poller.table.fill(0)):
        assert in_child(act) == b"None"
    across.peer.call(notify, 2)
    assert poller.wait(T) == (row, 1)
    poller.close()
    across.peer.call(notify, 1)
    across.channel.expect(1).wait(T)
    across.channel.notify(1)
    across.peer.call(wait_for, 1, 1, T)


def fork_and_hold(state: State) -> int:
    """Leave a child that outlives this process for a while, with every file descriptor it inherited."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60.0)
        os._exit(0)
    return pid


def test_a_forked_child_does_not_keep_a_dead_peer_alive(across: Across) -> None:
    child = across.peer.call(fork_and_hold)
    try:
        across.peer.kill()
        with pytest.raises(PeerLost):
            across.channel.expect(1).wait(T)
    finally:
        os.kill(child, signal.SIGKILL)
