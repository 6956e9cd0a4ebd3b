"""Mutual authentication of two ends of a fresh stream, before anything else is parsed.

Challenge and response over the job secret (HMAC-SHA-256): each end proves that it knows the secret, for nonces that both
chose, under a role label, so that a proof cannot be reflected. Everything has a fixed size. What follows on the stream is
not encrypted: this keeps strangers out, it does not hide data from who can read the wire.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket

from .errors import AuthenticationError, PeerLost, TransferTimeout

_MAGIC = b"rdmarpc\x01"
_NONCE, _PROOF = 32, 32


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


def _proof(secret: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret, role + first + second, hashlib.sha256)


def authenticate(sock: socket.socket, secret: bytes, *, initiator: bool) -> None:
    """Run by both ends, under the socket's timeout. Raises ``AuthenticationError`` at both if the secrets differ."""
    mine = secrets.token_bytes(_NONCE)
    try:
        sock.sendall(_MAGIC + mine)
        hello = receive_exactly(sock, len(_MAGIC) + _NONCE)
        if hello[: len(_MAGIC)] != _MAGIC:
            raise AuthenticationError("the other end does not speak this protocol", hint="is this the right address?")
        theirs = hello[len(_MAGIC) :]
        nonces = (mine, theirs) if initiator else (theirs, mine)
        roles = (b"initiator", b"acceptor") if initiator else (b"acceptor", b"initiator")
        sock.sendall(_proof(secret, roles[0], *nonces))
        answer = receive_exactly(sock, _PROOF)
    except OSError as error:
        raise PeerLost(f"the connection broke: {error}") from None
    if not hmac.compare_digest(answer, _proof(secret, roles[1], *nonces)):
        raise AuthenticationError(
            "the peer does not know the job secret", hint="give every worker the same secret (option secret, or RDMARPC_SECRET)"
        )
