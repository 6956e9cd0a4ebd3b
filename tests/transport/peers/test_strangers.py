"""Who does not belong here: wrong secrets, garbage, silence, wrong addresses."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable

import pytest
from transport_peer import works

from rdmarpc.transport import (
    AuthenticationError,
    Channel,
    Device,
    NotSupported,
    PeerLost,
    RdmaError,
    TransferTimeout,
)

T = 30.0
SESAME = b"open sesame, open"
Open = Callable[..., Device]


def raw_socket(address: bytes) -> socket.socket:
    """A plain connection to where this device listens."""
    kind, *rest = address.decode().split(":")
    if kind == "shm":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        limit = time.monotonic() + T
        while True:
            try:
                sock.connect(f"\0rdmarpc-{rest[1]}")
                break
            except BlockingIOError:  # of a socket with a timeout: too many wait to be accepted
                assert time.monotonic() < limit
                time.sleep(0.005)
        sock.settimeout(T)
    else:
        sock = socket.create_connection((rest[0], int(rest[1])), T)
    return sock


PATIENCE_S = 600.0


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No handshake of a device of this process is given up for its length, until the test ends."""
    monkeypatch.setattr("rdmarpc.transport.listening.HANDSHAKE_S", PATIENCE_S)


# -- authentication


def test_the_same_secret_works(kind: str, open_device: Open) -> None:
    works(open_device(f"{kind}", secret=SESAME), open_device(kind, secret=SESAME))


@pytest.mark.parametrize("secret", [b"", SESAME.title(), SESAME + b" "])
def test_a_wrong_secret_is_refused_and_the_acceptor_lives_on(kind: str, open_device: Open, secret: bytes) -> None:
    called: list[Channel] = []
    good = open_device(kind, secret=SESAME)
    b = open_device(kind, secret=SESAME)
    b.door.greet = lambda channel: called.append(channel) or b""  # type: ignore[func-returns-value]
    a = open_device(kind, secret=secret)
    for _ in range(3):
        with pytest.raises(AuthenticationError, match="secret"):
            a.connect(b.address)
    assert not called
    works(good, b)
    assert len(called) == 1


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n" + b"x" * 60, b"rdmarpc\x02", random.Random(1).randbytes(500)])
def test_garbage_and_silence_disturb_nobody(kind: str, open_device: Open, noise: bytes) -> None:
    a, b = open_device(kind), open_device(kind)
    strangers = [raw_socket(b.address) for _ in range(5)]
    for stranger in strangers:
        if noise:
            stranger.sendall(noise)
    works(a, b)
    with pytest.raises(TransferTimeout):
        b.accept(timeout=0.05)
    for stranger in strangers:
        stranger.close()
    works(a, b)


def test_a_device_closes_while_strangers_are_silent(kind: str, open_device: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    patient(monkeypatch)
    b = open_device(kind)
    with raw_socket(b.address):
        started = time.monotonic()
        b.close()
        assert time.monotonic() - started < PATIENCE_S / 10


# -- nobody, or somebody else


def test_nobody_is_there(kind: str, open_device: Open) -> None:
    a, b = open_device(kind), open_device(kind)
    address = b.address
    b.close()
    with pytest.raises(PeerLost):
        a.connect(address, timeout=2.0)


def test_addresses_of_other_kinds(kind: str, open_device: Open) -> None:
    a = open_device(kind)
    for address in (b"", b"junk", b"verbs:1:2:3", b"shm:elsewhere:00", b"tcp:nowhere", b"tcp:host:port:uid", b"\xff\xfe"):
        with pytest.raises(NotSupported):
            a.connect(address, timeout=1.0)


# -- hello, on_connect


def test_hello_and_its_answer(kind: str, open_device: Open) -> None:
    seen: list[bytes] = []

    def answer(channel: Channel) -> bytes:
        seen.append(channel.peer_hello)
        return channel.peer_hello[::-1]

    b = open_device(kind, on_connect=answer)
    a = open_device(kind)
    for hello in (b"", b"abc", os.urandom(60_000)):
        channel = a.connect(b.address, hello=hello)
        assert channel.peer_hello == hello[::-1] and seen.pop() == hello
    with pytest.raises(ValueError, match="65536"):
        a.connect(b.address, hello=b"x" * 65537)
    works_after = a.connect(b.address, hello=b"again")
    assert works_after.error is None


def test_an_on_connect_that_refuses(kind: str, open_device: Open) -> None:
    def refuse(channel: Channel) -> bytes:
        raise RdmaError("no second worker of this name")

    b = open_device(kind, on_connect=refuse)
    a = open_device(kind)
    for _ in range(2):
        with pytest.raises((PeerLost, TransferTimeout)):
            a.connect(b.address, timeout=2.0)


@pytest.mark.parametrize("whose", ["the one that connects", "the other"])
def test_a_device_that_is_closed_while_a_connection_is_made(kind: str, open_device: Open, whose: str) -> None:
    made: list[Channel] = []

    def answer(channel: Channel) -> bytes:
        made.append(channel)
        (a if whose == "the one that connects" else b).close()
        return b""

    b = open_device(kind, on_connect=answer)
    a = open_device(kind)
    with pytest.raises((PeerLost, TransferTimeout)):
        a.connect(b.address, timeout=2.0).expect(1).wait(T)
    assert a.counters()["channels"] == 0
    comes(lambda: bool(made) and made[0].error is not None)


def test_a_peer_that_gives_up_while_it_is_welcomed(kind: str, open_device: Open) -> None:
    """What ``on_connect`` has published ends, and is told to be lost."""
    made: list[Channel] = []
    lost: list[Channel] = []
    given_up = threading.Event()

    def answer(channel: Channel) -> bytes:
        made.append(channel)
        assert given_up.wait(T)
        return b""

    b = open_device(kind, on_connect=answer)
    b.on_lost = lost.append
    a = open_device(kind)
    with pytest.raises(TransferTimeout):
        a.connect(b.address, timeout=2.0)
    comes(lambda: bool(made))
    given_up.set()
    comes(lambda: lost == made)
    assert isinstance(made[0].error, PeerLost)


def comes(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + T
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_many_peers_connect_at_once(kind: str, open_device: Open) -> None:
    hub = open_device(kind)
    others = [open_device(kind) for _ in range(12)]
    channels: list[Channel] = []
    threads = [threading.Thread(target=lambda d=other: channels.append(d.connect(hub.address))) for other in others]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(T)
    accepted = [hub.accept(timeout=T) for _ in others]
    for channel in channels:
        channel.notify(1)
    for channel in accepted:
        channel.expect(1).wait(T)
    assert hub.counters()["channels"] == 12


def test_a_device_connects_to_itself(kind: str, open_device: Open) -> None:
    device = open_device(kind)
    out = device.connect(device.address)
    into = device.accept(timeout=T)
    out.notify(4)
    into.expect(4).wait(T)
