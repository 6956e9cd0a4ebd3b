"""The 64 bytes in front of every bundle: five little-endian int64 words, written together with the payload, and padding."""

from __future__ import annotations

import struct
from typing import NamedTuple

HEADER_BYTES = 64
_WIRE = struct.Struct("<5q")

STAGED = 1
"""Gradients: the sender copied all of it aside first, and asks for weights that are copied aside too (the ablation)."""
CHANGED = 2
"""Weights: the step that made them has dropped, replaced or written into gradients."""


class Header(NamedTuple):
    bundle: int
    """Its number, unique in the model. The receiver compares it: a stray write is an error, never data."""
    step: int
    flags: int = 0
    note_bytes: int = 0
    """Gradients: how long the note is."""
    optimizer: int = 0
    """Gradients: the number of the optimizer that is to step."""

    def write(self, memory: memoryview) -> None:
        _WIRE.pack_into(memory, 0, *self)

    @staticmethod
    def read(memory: memoryview) -> Header:
        return Header._make(_WIRE.unpack_from(memory))
