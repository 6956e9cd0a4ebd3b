"""Mutual authentication of two ends of a fresh stream, before anything else is parsed.

Each end proves two things: that it knows the job secret, and that it holds the private half of its key (``identity``). The
proofs cover both keys and nonces of both ends, so none can be used a second time, elsewhere, or by somebody in between:

    both        magic, key, nonce (72 bytes)
    initiator   HMAC(secret, transcript), HMAC(X25519, transcript)
    acceptor    HMAC(X25519, HMAC(secret, transcript)), or a refusal

The initiator goes first: a stranger who connects gets nothing that was made with the secret, and costs us one HMAC. Somebody
who answers in place of the acceptor does get a proof, and anybody who reads the group's store does: both can try secrets
against it without asking us again. So a secret has to be random; ``check_secret`` refuses short ones, and no slow derivation
of keys is spent on guessable ones.

Everything has a fixed size. What follows on the stream is neither encrypted nor protected from changes by somebody in between,
but for ``tls``.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket

from ..errors import AuthenticationError, PeerLost, TransferTimeout
from .identity import KEY_BYTES, Identity, uid_of

_MAGIC = b"rdmarpc\x02"
_NONCE, _PROOF = 32, 32
_HELLO = len(_MAGIC) + KEY_BYTES + _NONCE
_TLS = (b"\x16\x03", b"\x15\x03")  # how a handshake of TLS begins, and an alert
_REFUSED = b"refused".ljust(_PROOF, b"\0")
MIN_SECRET_BYTES = 16
HOW_TO_SET = "export RDMARPC_SECRET=$(openssl rand -hex 32), the same for every worker, or RDMARPC_SECRET_FILE=FILE (mode 0600)"


def check_secret(secret: bytes) -> None:
    """Raise ``ValueError`` for a secret that is so short that it can be guessed."""
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(
            f"the job secret has {len(secret)} bytes, and {MIN_SECRET_BYTES} at least are needed: it is random text, such as "
            "`openssl rand -hex 32` prints, not a password"
        )


def receive_exactly(sock: socket.socket, nbytes: int) -> bytes:
    """Raises ``PeerLost`` if the stream ends first, ``TransferTimeout`` after the socket's timeout."""
    parts = bytearray()
    while len(parts) < nbytes:
        try:
            piece = sock.recv(nbytes - len(parts))
        except TimeoutError:
            raise TransferTimeout("the peer did not answer in time") from None
        except OSError as error:
            raise PeerLost(f"the connection broke: {error}") from None
        if not piece:
            raise PeerLost("the peer closed the connection")
        parts += piece
    return bytes(parts)


def _hmac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), hashlib.sha256)


def authenticate(
    sock: socket.socket, secret: bytes, identity: Identity, *, initiator: bool, expect: str = "", binding: bytes = b""
) -> bytes:
    """Authenticate both ends, which both run this under the socket's timeout. Returns the peer's key. The other end has proven
    that it holds the private half.

    ``expect``: the uid (``identity.uid_of``, 16 hexadecimal digits) that the other end must have; ``PeerLost`` with the status
    ``STALE_ADDRESS`` if it is another one. ``binding``: what the proofs cover besides, the same at both ends, so that they hold
    for this stream alone (of a TLS session: its channel binding). Raises ``AuthenticationError`` at both ends if secrets or
    bindings differ."""
    mine = identity.public + secrets.token_bytes(_NONCE)
    try:
        sock.sendall(_MAGIC + mine)
        hello = receive_exactly(sock, _HELLO)
        if hello[: len(_MAGIC)] != _MAGIC:
            raise _stranger(hello)
        theirs = hello[len(_MAGIC) :]
        peer = theirs[:KEY_BYTES]
        if expect and f"{uid_of(peer):016x}" != expect:
            raise PeerLost("another device listens there now", status="STALE_ADDRESS")
        transcript = (mine + theirs if initiator else theirs + mine) + hashlib.sha256(binding).digest()
        if initiator:
            _prove_first(sock, secret, identity.shared(peer), transcript)
        else:
            _prove_second(sock, secret, identity, peer, transcript)
    except OSError as error:
        raise PeerLost(f"the connection broke: {error}") from None
    return peer


def _stranger(hello: bytes) -> AuthenticationError:
    if hello[:2] in _TLS:
        why, hint = "the other end speaks TLS, and this one does not", "tls at every worker, or at none"
        return AuthenticationError(why, status="TLS", hint=hint)
    return AuthenticationError("the other end does not speak this protocol", hint="is this the right address?")


def _prove_first(sock: socket.socket, secret: bytes, shared: bytes, transcript: bytes) -> None:
    sock.sendall(_hmac(secret, b"initiator", transcript) + _hmac(shared, b"initiator", transcript))
    answer = receive_exactly(sock, _PROOF)
    if not hmac.compare_digest(answer, _answer(secret, shared, transcript)):
        raise _another_secret("the peer refused our proof" if answer == _REFUSED else "the peer's proof is wrong")


def _prove_second(sock: socket.socket, secret: bytes, identity: Identity, peer: bytes, transcript: bytes) -> None:
    proofs = receive_exactly(sock, 2 * _PROOF)
    if not hmac.compare_digest(proofs[:_PROOF], _hmac(secret, b"initiator", transcript)):
        sock.sendall(_REFUSED)
        raise _another_secret("its proof is wrong")
    shared = identity.shared(peer)
    if not hmac.compare_digest(proofs[_PROOF:], _hmac(shared, b"initiator", transcript)):
        sock.sendall(_REFUSED)
        raise AuthenticationError("the peer does not hold the key that it shows", status="PROTOCOL")
    sock.sendall(_answer(secret, shared, transcript))


def _answer(secret: bytes, shared: bytes, transcript: bytes) -> bytes:
    return _hmac(shared, b"acceptor", _hmac(secret, b"acceptor", transcript))


def _another_secret(how: str) -> AuthenticationError:
    return AuthenticationError(f"the peer does not hold the same job secret: {how}", hint=HOW_TO_SET)
