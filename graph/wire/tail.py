"""What stands behind the payload of a static edge, in its slot. Little-endian int64 words, 8-byte aligned.

| bytes | what | written by | read by |
|---|---|---|---|
| 0 | strides of the payload, in elements, where the header says so (``header.STRIDED``) | sender | consumer |
| 8 x rank | 1: the slots have moved to larger memory | consumer, before the credit | sender, after the credit |
| 8 x (rank + 1) | descriptor of each slot there, padded to 48 | consumer, before the credit | sender, after the credit |
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ...transport import RemoteRegion

_DESCRIPTOR = -(-RemoteRegion.WIRE_SIZE // 8) * 8


def tail_bytes(rank: int, depth: int) -> int:
    return 8 * (rank + 1) + depth * _DESCRIPTOR


def tail_at(nbytes: int) -> int:
    """Where the tail of a slot begins that has room for a payload of ``nbytes``, counted from the payload."""
    return -(-nbytes // 8) * 8


class Tail:
    """Over the tail of one slot of an edge of so many dimensions and slots."""

    __slots__ = ("_memory", "_moved", "_strides")

    def __init__(self, memory: memoryview, rank: int) -> None:
        self._memory, self._strides, self._moved = memory, struct.Struct(f"<{rank}q"), 8 * rank

    def clear(self) -> None:
        """Before the first use."""
        self._memory[self._moved : self._moved + 8] = bytes(8)

    def write_strides(self, strides: Sequence[int]) -> None:
        self._strides.pack_into(self._memory, 0, *strides)

    def strides(self) -> tuple[int, ...]:
        """As the sender wrote them: unchecked."""
        return self._strides.unpack_from(self._memory, 0)

    def move(self, slots: Sequence[bytes]) -> None:
        """Say where the slots are from now on (``RemoteRegion.dump``)."""
        at = self._moved + 8
        for number, blob in enumerate(slots):
            start = at + number * _DESCRIPTOR
            self._memory[start : start + len(blob)] = blob
        self._memory[self._moved : at] = (1).to_bytes(8, "little")

    def moved(self, depth: int) -> list[RemoteRegion]:
        """Where the slots are, if they have moved. ``RemoteAccessError`` for what is no descriptor."""
        at = self._moved + 8
        if not any(self._memory[self._moved : at]):
            return []
        starts = [at + number * _DESCRIPTOR for number in range(depth)]
        return [RemoteRegion.load(bytes(self._memory[start : start + RemoteRegion.WIRE_SIZE])) for start in starts]
