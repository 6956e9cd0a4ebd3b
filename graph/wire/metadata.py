"""The message that crosses first on a dynamic edge: the shape of a tensor and where it may be read.
Little-endian, of one size for all tensors of a rank.

| bytes | what |
|---|---|
| 0 | descriptor of the source (``RemoteRegion``), padded to 48; its size is that of the payload |
| 48 | the dimensions, int64 each |
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ...transport import RemoteRegion

_DESCRIPTOR = RemoteRegion.WIRE_SIZE
_DIMS_AT = -(-_DESCRIPTOR // 8) * 8


def metadata_bytes(rank: int) -> int:
    return _DIMS_AT + 8 * rank


class Metadata(NamedTuple):
    source: RemoteRegion
    shape: tuple[int, ...]

    def write(self, memory: memoryview) -> None:
        memory[:_DESCRIPTOR] = self.source.dump()
        struct.pack_into(f"<{len(self.shape)}q", memory, _DIMS_AT, *self.shape)

    @staticmethod
    def read(memory: memoryview, rank: int) -> Metadata:
        """Raises ``RemoteAccessError`` where there is no descriptor."""
        source = RemoteRegion.load(memory[:_DESCRIPTOR])
        return Metadata(source, struct.unpack_from(f"<{rank}q", memory, _DIMS_AT))
