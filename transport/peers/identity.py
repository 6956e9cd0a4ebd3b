"""Key pairs that tell one process from another that knows the same secret: X25519 (RFC 7748)."""

from __future__ import annotations

import hashlib
import os

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from ..errors import AuthenticationError

KEY_BYTES = 32


class Identity:
    """A key pair. A peer that computes the same ``shared`` from its own key and ``public`` knows that it talks to the holder of
    the private half. It lives as long as the memory it belongs to, and is never stored. Thread-safe."""

    def __init__(self) -> None:
        # Not ``generate``: OpenSSL's generator needs getrandom, which some sandboxes forbid.
        self._private = X25519PrivateKey.from_private_bytes(os.urandom(KEY_BYTES))
        self.public = self._private.public_key().public_bytes_raw()
        """The public half, which reveals nothing of the private one."""

    def shared(self, public: bytes) -> bytes:
        """The bytes that only the two holders of the private halves can compute. Raises ``AuthenticationError`` for a public
        key with which the result is the same for everybody."""
        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            raise AuthenticationError("the peer's key is none", status="PROTOCOL") from None


def uid_of(public: bytes) -> int:
    """The 64 bits by which addresses and descriptors name the holder of a key. Another key with these bits is found in 2^64
    attempts; where all 256 bits count, compare the key."""
    return int.from_bytes(hashlib.sha256(b"uid" + public).digest()[:8], "little")
