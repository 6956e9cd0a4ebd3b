"""The 64 bytes in front of every payload: eight little-endian int64 words, written together with the payload."""

from __future__ import annotations

import struct
from typing import NamedTuple

HEADER_BYTES = 64
_WIRE = struct.Struct("<8q")

GRAD = 1
"""The forward runs with gradients: the slot's storage lives until the backward, and a gradient comes back."""
NONE = 2
"""No payload: there is no gradient for this value, or the message is its header alone."""
ERROR = 4
"""A report: the payload is a pickled ``WorkerError``."""
DONE = 8
"""A report: this worker has finished the backward of ``sequence``."""
SHARED = 16
"""The sender still reads the payload where it landed (for its backward): nobody may write into it."""
STAGED = 32
"""Gradient bundles: the sender copied all of it aside first, and asks for weights that are copied aside too (the ablation)."""
CLEAR = 64
"""A gradient: before this backward the gradients of all parameters that are trainable in ``mode`` become ``None``. Rides in
every gradient of a backward, so that each worker learns of it before its first segment runs."""


class MicroBatch(NamedTuple):
    """Which part of a batch a forward is: ``number`` (from 0) of ``total``, with consecutive sequences; ``window``: so many of
    them may be between forward and backward at level 0. Each below 2**16; a forward of its own has total 0."""

    number: int
    total: int
    window: int

    def pack(self) -> int:
        return self.number | self.total << 16 | self.window << 32

    @staticmethod
    def unpack(word: int) -> MicroBatch:
        return MicroBatch(word & 0xFFFF, word >> 16 & 0xFFFF, word >> 32)

    @property
    def last(self) -> bool:
        return self.number + 1 >= self.total


class Header(NamedTuple):
    edge: int
    """Number of the edge, unique in the model. The receiver compares it: a stray write is an error, never data."""
    sequence: int
    """Number of the forward this belongs to (from 1, one counter a model); for commands, number of the command."""
    flags: int = 0
    mode: int = 0
    """Which table of training and requires_grad flags the parts run under; commands: their kind; gradient bundles: how many
    bytes their note has."""
    commands: int = 0
    """How many commands must have been applied before this may be used."""
    order: int = 0
    """Memory order of the payload, see ``layout``."""
    backward: int = 0
    """Commands: sequence of the last backward that the receiver took part in and the caller saw finished."""
    argument: int = 0
    """Commands: what they are about (an optimizer, a forward). Activations: a packed ``MicroBatch``, or 0. Gradient bundles:
    the optimizer. Reports of an error: 1 = the executor has ended."""

    def write(self, memory: memoryview) -> None:
        _WIRE.pack_into(memory, 0, *self)

    @staticmethod
    def read(memory: memoryview) -> Header:
        return Header._make(_WIRE.unpack_from(memory))
