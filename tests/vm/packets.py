"""What the RDMA devices of this machine have counted themselves: the proof that bytes went through them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

DEVICES = Path("/sys/class/infiniband")
MTU = 4096
"""Bytes of payload in a packet, at most."""


def counters() -> Counter[str]:
    """The counters of all ports of all devices, summed."""
    found: Counter[str] = Counter()
    for place in DEVICES.glob("*/ports/*/hw_counters/*"):
        if place.name != "lifespan":
            found[place.name] += int(place.read_text())
    return found


def needed(nbytes: int) -> int:
    """Packets that this many bytes fill at the least."""
    return -(-nbytes // MTU)
