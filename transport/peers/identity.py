"""Key pairs that tell one process from another that knows the same secret: X25519 (RFC 7748), in Python's integers.

One multiplication takes 0.8 ms. Python's integers do not compute in constant time; a key lives as long as the memory it belongs
to, and is never stored.
"""

from __future__ import annotations

import hashlib
import secrets

from ..errors import AuthenticationError

KEY_BYTES = 32
_PRIME = 2**255 - 19
_BASE_POINT = 9


class Identity:
    """A key pair. A peer that computes the same ``shared`` from its own key and ``public`` knows that it talks to the holder of
    the private half. Thread-safe."""

    def __init__(self) -> None:
        self._private = secrets.randbits(255) & ~7 | 1 << 254
        self.public = _multiply(self._private, _BASE_POINT).to_bytes(KEY_BYTES, "little")
        """The public half, which reveals nothing of the private one."""

    def shared(self, public: bytes) -> bytes:
        """The bytes that only the two holders of the private halves can compute. Raises ``AuthenticationError`` for a public
        key with which the result is the same for everybody."""
        number = _multiply(self._private, int.from_bytes(public, "little") & (1 << 255) - 1)
        if number == 0:
            raise AuthenticationError("the peer's key is none", status="PROTOCOL")
        return number.to_bytes(KEY_BYTES, "little")


def uid_of(public: bytes) -> int:
    """The 64 bits by which addresses and descriptors name the holder of a key. Another key with these bits is found in 2^64
    attempts; where all 256 bits count, compare the key."""
    return int.from_bytes(hashlib.sha256(b"uid" + public).digest()[:8], "little")


def _multiply(scalar: int, point: int) -> int:
    """The Montgomery ladder of RFC 7748, section 5."""
    p, x1 = _PRIME, point
    x2, z2, x3, z3, swapped = 1, 0, x1, 1, 0
    for at in range(254, -1, -1):
        bit = scalar >> at & 1
        if bit != swapped:
            x2, z2, x3, z3 = x3, z3, x2, z2
        swapped = bit
        a, b = x2 + z2, x2 - z2
        aa, bb = a * a % p, b * b % p
        e = aa - bb
        da, cb = (x3 - z3) * a % p, (x3 + z3) * b % p
        sum_, difference = da + cb, da - cb
        x3, z3 = sum_ * sum_ % p, x1 * (difference * difference % p) % p
        x2, z2 = aa * bb % p, e * (aa + 121665 * e) % p
    if swapped:
        x2, z2 = x3, z3
    return x2 * pow(z2, p - 2, p) % p
