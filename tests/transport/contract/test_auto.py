"""The ``auto`` device: the contract again, which device it takes for whom, and what it says when that is not the fastest."""

from __future__ import annotations

import ctypes
import logging
import queue
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import test_contract
import test_contract_memory
import torch
from test_verbs import deaf
from transport_peer import C, Peer, S, State, accept, all_are, filled, write

from rdmarpc import transport
from rdmarpc.tools import doctor
from rdmarpc.transport import Channel, Device, NotSupported, PeerLost, RemoteRegion
from rdmarpc.transport.kinds import AutoDevice
from rdmarpc.transport.nic import sysfs

T = 30.0
Open = Callable[..., Device]
globals().update(
    {
        name: test
        for name, test in {**vars(test_contract), **vars(test_contract_memory)}.items()
        if name.startswith("test_") and "gibibyte" not in name
    }
)


@pytest.fixture
def kind() -> str:
    return "auto"


@pytest.fixture
def broken_rdma(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """This host has an RDMA device, as far as the kernel says, that no driver opens."""
    (tmp_path / "broken0" / "ports" / "1").mkdir(parents=True)
    monkeypatch.setattr(sysfs, "ROOT", str(tmp_path))
    yield


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "rdmarpc" and record.levelno >= logging.WARNING]


def test_each_peer_by_its_device(open_device: Open, start_peer: Callable[..., Peer], caplog: pytest.LogCaptureFixture) -> None:
    peers = {kind: start_peer(kind) for kind in ("auto", "tcp")}
    auto = open_device("auto")
    place = filled(auto, 1 << 20, 0)
    foreign = torch.zeros(1000, dtype=torch.uint8)
    poller = auto.poller()
    channels = {}
    for kind, peer in peers.items():
        peer.start(accept)
        channels[kind] = auto.connect(peer.address)
        peer.finish()
    assert {kind: channel.device.name for kind, channel in channels.items()} == {"auto": "shm", "tcp": "tcp"}
    rows = {kind: poller.add(channel, 20) for kind, channel in channels.items()}
    with auto.register(foreign) as region:
        for kind, peer in peers.items():  # one descriptor for both, of the arena and of other memory
            peer.call(make_filled, 1 << 20, C)
            peer.call(write, "filled", RemoteRegion.load(auto.export(place)), 20)
            assert poller.wait(T) == (rows[kind], 1)
            assert all_are(place, C)
            place.fill_(0)
            peer.call(make_filled, 1000, S)
            peer.call(write, "filled", RemoteRegion.load(region.export()), 20)
            assert poller.wait(T) == (rows[kind], 1)
            assert all_are(foreign, S)
            foreign.fill_(0)
    assert auto.can_lend(place, channels["tcp"]) and auto.lend(place, channels["auto"]).dump() == auto.export(place)
    assert not auto.can_lend(foreign, channels["tcp"])
    assert channels["auto"].can_adopt and not channels["tcp"].can_adopt
    counters = auto.counters()
    assert counters["channels"] == 2 and counters["registrations"] == 2 and counters["fallbacks"] == 0
    assert not warnings(caplog)
    poller.close()
    lost: queue.SimpleQueue[Channel] = queue.SimpleQueue()
    auto.on_lost = lost.put
    for kind, peer in peers.items():
        peer.kill()
        assert lost.get(timeout=T) is channels[kind]


def make_filled(state: State, nbytes: int, fill: int) -> None:
    state.kept["filled"] = filled(state.device, nbytes, fill)


def test_a_fallback_is_told_once_a_peer_and_counted(
    open_device: Open, broken_rdma: None, caplog: pytest.LogCaptureFixture
) -> None:
    auto, tcp = open_device("auto"), open_device("tcp")
    assert isinstance(auto, AutoDevice)
    reason = auto.refused["verbs"].why
    assert reason and reason in auto.explain()
    channels = [auto.connect(tcp.address) for _ in range(2)]
    assert auto.counters()["fallbacks"] == 2 and channels[0].device.name == "tcp"
    assert warnings(caplog) == [f"{tcp.address.decode()} is reached over tcp, not verbs: {auto.refused['verbs']}"]
    assert f"over tcp       {channels[0].peer}: {reason}" in auto.explain()
    caplog.clear()
    own = auto.address.split(b",")
    tcp.connect(own[1])  # now the other way round
    auto.accept(timeout=T)
    assert auto.counters()["fallbacks"] == 3 and reason in warnings(caplog)[0]
    for channel in channels:
        channel.close()
    assert channels[0].peer not in auto.explain()


def test_the_peer_is_told_why_we_cannot(open_device: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        (tmp_path / "broken0" / "ports" / "1").mkdir(parents=True)
        patch.setattr(sysfs, "ROOT", str(tmp_path))
        theirs = open_device("auto")
    assert isinstance(theirs, AutoDevice)
    ours = open_device("auto")
    assert isinstance(ours, AutoDevice)
    assert theirs.address.startswith(b"auto:shm:") and theirs.address.isascii() and theirs.address.count(b",") == 2
    ours.refused.clear()  # as if we had a usable port
    refusal = ours.weigh(theirs.address)["verbs"]
    assert refusal is not None and refusal.why == f"at the peer: {theirs.refused['verbs'].why}"


def test_rdma_is_required(open_device: Open, broken_rdma: None, caplog: pytest.LogCaptureFixture) -> None:
    auto, other, tcp = open_device("auto", require="rdma"), open_device("auto"), open_device("tcp")
    assert isinstance(auto, AutoDevice)
    assert auto.connect(other.address).device.name == "shm"  # allowed: it is as one-sided
    assert b"tcp:" not in auto.address
    with pytest.raises(NotSupported, match="no device reaches this peer") as raised:
        auto.connect(tcp.address)
    for text in ("shm: the peer has no shm", auto.refused["verbs"].why, "require='rdma' forbids it", "rdmarpc doctor"):
        assert text in str(raised.value)
    with pytest.raises(NotSupported, match="tcp: the peer has no tcp"):
        other.connect(b"auto:shm:elsewhere:0")
    with pytest.raises(NotSupported, match="tcp is none"):
        open_device("tcp", require="rdma")
    with pytest.raises(ValueError, match="require is"):
        open_device("auto", require="verbs")
    assert auto.counters()["fallbacks"] == 0 and not warnings(caplog)


def test_what_cannot_be_reached_is_said(open_device: Open) -> None:
    auto = open_device("auto")
    assert isinstance(auto, AutoDevice)
    weighed = auto.weigh(b"auto:shm:0123456789abcdef:1,tcp:127.0.0.1:9:1")
    assert {kind: refusal and refusal.why for kind, refusal in weighed.items()} == {
        "shm": "the peer is on another host, or in another network namespace",
        "verbs": "this host has no RDMA device",
        "tcp": "the peer listens on loopback only",
    }
    with pytest.raises(NotSupported, match="same secret"):
        auto.connect(b"auto:shm:0123456789abcdef:1,tcp:[::1]:9:1")
    for nonsense in (b"", b"auto:", b"\xff\xfe", b"shm", b"tcp:x", b"auto:tcp:host:port:1,shm:::", b"auto:shm,tcp:[::1]:9:1"):
        with pytest.raises(NotSupported, match="no device reaches"):
            auto.connect(nonsense)
    with pytest.raises(NotSupported, match="nosuch0"):
        open_device("auto://nosuch0")
    assert open_device("auto://localhost").address.count(b"tcp:127.0.0.1:") == 1


def test_a_peer_that_has_ended_is_not_looked_for_elsewhere(open_device: Open) -> None:
    auto, gone = open_device("auto"), open_device("auto")
    gone.close()
    with pytest.raises(PeerLost, match="NOBODY"):
        auto.connect(gone.address)


# -- with an RDMA device


def beyond(address: bytes) -> bytes:
    """The address as another host has it: without shm."""
    return b",".join(part for part in address.split(b",") if b"shm:" not in part)


@pytest.mark.rdma
def test_verbs_where_both_ends_have_a_port(
    open_device: Open, caplog: pytest.LogCaptureFixture, record_property: Callable[[str, object], None]
) -> None:
    a, b = open_device("auto"), open_device("auto", require="rdma")
    near, far = a.connect(b.address), a.connect(beyond(b.address))
    assert (near.device.name, far.device.name) == ("shm", "verbs")
    ends = {channel.device.name: channel for channel in (b.accept(timeout=T), b.accept(timeout=T))}
    place, source = filled(b, 3 << 20, 0), filled(a, 3 << 20, C)
    remote = RemoteRegion.load(b.export(place))
    poller = b.poller()
    rows = {kind: poller.add(channel, 20) for kind, channel in ends.items()}
    for channel in (near, far, near, far):
        source.fill_(C)
        channel.memcpy(remote, source, notify=20).wait(T)
        assert poller.wait(T) == (rows[channel.device.name], 1)
        assert all_are(place, C)
        place.fill_(S)
        channel.memcpy(source, remote).wait(T)
        assert all_are(source, S)
    poller.close()
    # New segments are registered with the device, and everybody told.
    large, mine = filled(b, 70 << 20, 0), filled(a, 1000, C)
    far.memcpy(RemoteRegion.load(b.export(large))[1000:2000], mine).wait(T)
    assert all_are(large[1000:2000], C) and not large[:1000].any()
    assert a.counters()["fallbacks"] == b.counters()["fallbacks"] == 0 and not warnings(caplog)
    assert "verbs: reliable connected queue pairs" in a.explain()
    record_property("bytes_direct", 4 * (3 << 20))


@pytest.mark.rdma
def test_a_peer_without_a_port_is_a_fallback(open_device: Open, caplog: pytest.LogCaptureFixture) -> None:
    auto, tcp = open_device("auto"), open_device("tcp")
    assert auto.connect(tcp.address).device.name == "tcp"
    assert auto.counters()["fallbacks"] == 1 and "verbs: the peer has no verbs" in warnings(caplog)[0]
    with pytest.raises(NotSupported, match="verbs: the peer has no verbs"):
        open_device("auto", require="rdma").connect(tcp.address)


@pytest.mark.rdma
def test_a_path_without_rdma_packets_is_a_fallback(
    open_device: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = open_device("auto"), open_device("auto")
    deaf(b.devices["verbs"], monkeypatch)
    channel = a.connect(beyond(b.address), timeout=T)
    assert channel.device.name == "tcp" and a.counters()["fallbacks"] == 1
    assert any("verbs: no RDMA packet comes back" in text for text in warnings(caplog))
    channel.notify(3)
    b.accept(timeout=T).expect(3).wait(T)
    with pytest.raises(NotSupported, match="no RDMA packet comes back"):
        open_device("auto", require="rdma").connect(beyond(b.address), timeout=T)


@pytest.mark.rdma
def test_a_memlock_limit_is_named(start_peer: Callable[..., Peer]) -> None:
    why, address, page = start_peer("tcp").call(open_with_little_memlock)
    assert "memlock" in why and b"no-verbs:" in address and b",tcp:" in address
    assert "too little for one segment" in page and "ulimit -l unlimited" in page


def open_with_little_memlock(state: State) -> tuple[str, bytes, str]:
    """In a process that may not lock more than its limit, whoever it belongs to."""
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, data) == 0
    data[0] &= ~(1 << 14)  # CAP_IPC_LOCK
    assert libc.capset(header, data) == 0
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
    with transport.open_device("auto") as auto:
        return auto.refused["verbs"].why, auto.address, "\n".join(f"{found.text} {found.hint}" for found in doctor.host())
