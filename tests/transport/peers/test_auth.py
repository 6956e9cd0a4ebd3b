"""The handshake: who proves first, what a proof covers, and that it takes the private half of a key to make one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from test_strangers import raw_socket
from transport_peer import works

from rdmarpc.transport import AuthenticationError, Device, PeerLost, RdmaError, TransferTimeout
from rdmarpc.transport.peers import auth
from rdmarpc.transport.peers.auth import Identity, uid_of

T = 30.0
SECRET = b"what all of them know"
Open = Callable[..., Device]


@pytest.mark.parametrize(
    ("scalar", "point", "product"),
    [  # RFC 7748, section 5.2
        (
            "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
            "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
            "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
        ),
        (
            "4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d",
            "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493",
            "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957",
        ),
    ],
)
def test_the_key_agreement_is_that_of_the_standard(scalar: str, point: str, product: str) -> None:
    identity = Identity()
    identity._private = X25519PrivateKey.from_private_bytes(bytes.fromhex(scalar))
    assert identity.shared(bytes.fromhex(point)).hex() == product


def test_two_keys_agree_and_a_third_does_not() -> None:
    a, b, c = Identity(), Identity(), Identity()
    assert a.shared(b.public) == b.shared(a.public) != c.shared(b.public)
    for low in (0, 1):  # points of small order: the product is known to everybody
        with pytest.raises(AuthenticationError):
            a.shared(low.to_bytes(32, "little"))


def meet(*ends: dict[str, Any]) -> list[bytes | RdmaError]:
    """What both ends of a handshake over one socket return or raise: first the initiator."""
    socks, outcomes = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET), [b"", b""]

    def run(which: int) -> None:
        options = {"secret": SECRET, "identity": Identity(), **ends[which]}
        try:
            outcomes[which] = auth.authenticate(socks[which], initiator=which == 0, **options)
        except RdmaError as error:
            outcomes[which] = error
        finally:
            socks[which].close()

    for sock in socks:
        sock.settimeout(T)
    threads = [threading.Thread(target=run, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(T)
    return outcomes


def test_both_learn_the_key_of_the_other() -> None:
    a, b = Identity(), Identity()
    assert meet({"identity": a, "expect": f"{uid_of(b.public):016x}"}, {"identity": b}) == [b.public, a.public]


@pytest.mark.parametrize("differs", ["secret", "binding"])
def test_both_are_told_that_secret_or_stream_differ(differs: str) -> None:
    assert [type(end) for end in meet({differs: b"one thing, 16 bytes"}, {differs: b"another, 16 bytes"})] == [
        AuthenticationError,
        AuthenticationError,
    ]
    assert all(isinstance(end, bytes) for end in meet({differs: b"one thing, 16 bytes"}, {differs: b"one thing, 16 bytes"}))


@pytest.mark.parametrize("liar", [0, 1])
def test_who_knows_the_secret_cannot_use_the_key_of_another(liar: int) -> None:
    """At whichever end: it would take the private half."""
    false = Identity()
    false.public = Identity().public
    ends: list[dict[str, Any]] = [{}, {}]
    ends[liar] = {"identity": false}
    honest = meet(*ends)[1 - liar]
    assert isinstance(honest, AuthenticationError), honest


def test_another_one_than_was_meant_gets_no_proof() -> None:
    initiator, acceptor = meet({"expect": "0" * 16}, {})
    assert isinstance(initiator, PeerLost) and initiator.status == "STALE_ADDRESS"
    assert isinstance(acceptor, PeerLost), "the initiator left before it proved anything"


def test_a_stranger_gets_nothing_that_was_made_with_the_secret(kind: str, open_device: Open) -> None:
    """All that comes is a key and a nonce, and, after a wrong proof, one fixed text: nothing to try secrets against."""
    device = open_device(kind, secret=SECRET)
    hello = auth._MAGIC + Identity().public + bytes(32)
    with raw_socket(device.address) as sock:
        sock.sendall(hello)
        came = auth.receive_exactly(sock, len(hello))
        assert came.startswith(auth._MAGIC + device.memory.identity.public)
        sock.settimeout(0.3)
        with pytest.raises(TransferTimeout):
            auth.receive_exactly(sock, 1)
        sock.settimeout(T)
        sock.sendall(bytes(64))
        assert auth.receive_exactly(sock, 32) == auth._REFUSED
        assert sock.recv(100) == b""
    works(open_device(kind, secret=SECRET), device)


def test_the_uid_of_another_device_is_refused(kind: str, open_device: Open) -> None:
    """Descriptors name memory by uid: whoever could choose one could pass for the owner of another's memory."""
    a, b, other = open_device(kind), open_device(kind), open_device(kind)
    a.uid = other.uid
    with pytest.raises(PeerLost):
        a.connect(b.address, timeout=2.0)
    with pytest.raises(TransferTimeout):
        b.accept(timeout=0.05)
    works(other, b)
