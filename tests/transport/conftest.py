"""The devices under the contract, alone and in pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packages import install
from transport_peer import ENCRYPTED, Across, Pair, Peer, accept

from rdmarpc import transport
from rdmarpc.transport import Device
from rdmarpc.transport.kinds import GROUP

KINDS = ("shm", "tcp", pytest.param("verbs", marks=pytest.mark.rdma))

WHOLE = ("test_contract", "test_contract_memory", "test_end", "test_peers", "test_stress")
"""Modules whose tests are for encrypted streams, too."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if any("kind" in (names.replace(",", " ").split() if isinstance(names, str) else names) for names in given):
        return  # a test's own
    if "kind" in metafunc.fixturenames and not hasattr(metafunc.module, "kind"):
        slow = metafunc.function.__name__ == "test_more_than_a_gibibyte"  # all that it shows holds for shm and tcp
        outside = ["outside"] if metafunc.module.__name__ == "test_contract" and not slow else []
        encrypted = ["tcp+tls"] if metafunc.module.__name__ in WHOLE and not slow else []
        metafunc.parametrize("kind", [*KINDS, *outside, *encrypted], indirect=True)


@pytest.fixture(scope="session")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder where a package is installed that brings devices (``outside_device``), on ``sys.path``."""
    folder = tmp_path_factory.mktemp("outside")
    points = {"outside": "outside_device:open_outside", "broken": "no_such_module:open", "shm": "outside_device:open_outside"}
    install(folder, "outside-device", GROUP, points)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """That a test is run for; what it takes is there."""
    if request.param == "outside":
        request.getfixturevalue("outside")
    return request.param.partition("+")[0]


@pytest.fixture
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of every device that a test opens: those of a kind such as ``tcp+tls``."""
    given = getattr(request.node, "callspec", None)
    return ENCRYPTED if given is not None and str(given.params.get("kind", "")).endswith("+tls") else {}


@pytest.fixture
def open_device(
    request: pytest.FixtureRequest, options: dict[str, Any], record_property: Callable[[str, object], None]
) -> Iterator[Callable[..., Device]]:
    """``transport.open_device``; everything opened is closed after the test."""
    opened: list[Device] = []
    dying = request.module.__name__ in ("test_end", "test_peers")  # what is posted there may never be sent

    def open_one(*args: Any, **given: Any) -> Device:
        opened.append(transport.open_device(*args, **{**options, **given}))
        return opened[-1]

    yield open_one
    for device in opened:
        if device.name.startswith("verbs") and not dying:  # the packets of the device are compared with it (tests/vm/suite.py)
            record_property("bytes_direct", device.counters()["bytes_direct"])
        device.close()


@pytest.fixture
def start_peer(options: dict[str, Any]) -> Iterator[Callable[..., Peer]]:
    """``Peer``; everything started is ended after the test."""
    started: list[Peer] = []

    def start_one(*args: Any, **given: Any) -> Peer:
        started.append(Peer(*args, **{**options, **given}))
        return started[-1]

    yield start_one
    for peer in started:
        if peer.process.is_alive():
            peer.stop()


@pytest.fixture
def pair(kind: str, open_device: Callable[..., Device]) -> Pair:
    a, b = open_device(kind), open_device(kind)
    ab = a.connect(b.address, hello=b"from a")
    return Pair(a, b, ab, b.accept(timeout=30.0))


@pytest.fixture
def across(kind: str, open_device: Callable[..., Device], start_peer: Callable[..., Peer]) -> Across:
    peer = start_peer(kind)
    device = open_device(kind)
    peer.start(accept)
    channel = device.connect(peer.address, hello=b"hello")
    assert peer.finish() == b"hello"
    return Across(device, channel, peer)
