"""The devices under the contract, alone and in pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transport_peer import Across, Pair, Peer, accept

from rdmarpc import transport
from rdmarpc.transport import Device

KINDS = ("shm", "tcp", pytest.param("verbs", marks=pytest.mark.rdma))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def open_device(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Iterator[Callable[..., Device]]:
    """``transport.open_device``; everything opened is closed after the test."""
    opened: list[Device] = []
    dying = request.module.__name__ in ("test_end", "test_peers")  # what is posted there may never be sent

    def open_one(*args: Any, **options: Any) -> Device:
        opened.append(transport.open_device(*args, **options))
        return opened[-1]

    yield open_one
    for device in opened:
        if device.name.startswith("verbs") and not dying:  # the packets of the device are compared with it (tests/vm/suite.py)
            record_property("bytes_direct", device.counters()["bytes_direct"])
        device.close()


@pytest.fixture
def start_peer() -> Iterator[Callable[..., Peer]]:
    """``Peer``; everything started is ended after the test."""
    started: list[Peer] = []

    def start_one(*args: Any, **options: Any) -> Peer:
        started.append(Peer(*args, **options))
        return started[-1]

    yield start_one
    for peer in started:
        if peer.process.is_alive():
            peer.stop()


@pytest.fixture
def pair(kind: str, open_device: Callable[..., Device]) -> Pair:
    a, b = open_device(kind), open_device(kind)
    ab = a.connect(b.address, hello=b"from a")
    return Pair(a, b, ab, b.accept(timeout=5.0))


@pytest.fixture
def across(kind: str, open_device: Callable[..., Device], start_peer: Callable[..., Peer]) -> Across:
    peer = start_peer(kind)
    device = open_device(kind)
    peer.start(accept)
    channel = device.connect(peer.address, hello=b"hello")
    assert peer.finish() == b"hello"
    return Across(device, channel, peer)
