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
"""A report: this worker has finished the backward of ``sequence``; before the last micro-batch of a batch, all but the second
halves of it."""
SHARED = 16
"""The sender still reads the payload where it landed (for its backward): nobody may write into it."""
STAGED = 32
"""Gradient bundles: the sender copied all of it aside first, and asks for weights that are copied aside too (the ablation)."""
CLEAR = 64
"""A gradient: before this backward the gradients of all parameters that are trainable in ``mode`` become ``None``. Rides in
every gradient of a backward, so that each worker learns of it before its first segment runs."""
STRIDED = 128
"""No memory order describes the payload: its strides stand behind it (``tail``)."""
GATHERED = 256
"""With ``STRIDED``: the payload came without its gaps, in row-major order, and is to be laid out with those strides."""
SEEN = 512
"""With ``GATHERED``: the sender sees what the consumer writes behind the payload, so the slots may move."""
LEAVE = 1024
"""A gradient: parameters keep the gradients they have, this backward is about inputs alone. Rides as ``CLEAR`` does."""
DREW = 2048
"""A report, for the first time of each part: it has drawn from torch's generator. The payload is its path."""
GIVEN = 8192
"""An activation: it has the memory of a tensor that the part was given. From bit ``GIVEN_AT`` on the flags say of which of the
call's inputs."""
GIVEN_AT = 32
VIEW = 16384
"""With ``GIVEN``: it is another tensor than that input."""
RECORDS = 4096
"""The forward runs in grad mode. Without ``GRAD`` no gradient comes back, but what parts keep of it has a graph."""
CHANGED = 16384
"""Weights: the step that made them has dropped, replaced or written into gradients."""


class MicroBatch(NamedTuple):
    """The place of a forward in its batch: micro-batch ``number`` (from 0) of ``total``, with consecutive sequences.
    ``window``: how many of them may be between forward and backward at level 0. Each is below 2**16. ``interleaved``: see
    ``schedules/rounds``; ``split``: see ``schedules/halves``. A forward that is no micro-batch has ``total`` 0."""

    number: int
    total: int
    window: int
    interleaved: bool = False
    split: bool = False

    def pack(self) -> int:
        return self.number | self.total << 16 | self.window << 32 | self.interleaved << 48 | self.split << 49

    @staticmethod
    def unpack(word: int) -> MicroBatch:
        interleaved, split = bool(word >> 48 & 1), bool(word >> 49 & 1)
        return MicroBatch(word & 0xFFFF, word >> 16 & 0xFFFF, word >> 32 & 0xFFFF, interleaved, split)

    @property
    def last(self) -> bool:
        return self.number + 1 >= self.total


class Header(NamedTuple):
    """Made by the constructors below, one for each kind of message; ``Outlet.send`` fills in ``edge``, ``order`` and the flags
    that are about the payload. Two words mean something else in each kind: read them by the properties."""

    edge: int
    """Number of the edge, unique in the model. The receiver compares it: a stray write is an error, never data."""
    sequence: int
    """Number of the forward this belongs to (from 1, one counter a model); for commands, number of the command; for bundles,
    number of the step."""
    flags: int = 0
    mode: int = 0
    """Activations and gradients: which table of training and requires_grad flags the parts run under. Commands: ``kind``.
    Gradient bundles: ``note_bytes``."""
    commands: int = 0
    """How many commands must have been applied before this may be used."""
    order: int = 0
    """Memory order of the payload, see ``layout``."""
    backward: int = 0
    """Commands: sequence of the last backward that the receiver took part in and the caller saw finished."""
    argument: int = 0
    """Activations: ``place``. Commands: what they are about (an optimizer, a forward). Reports: ``fatal``. Gradient bundles:
    ``optimizer``."""

    @classmethod
    def activation(cls, sequence: int, grad: bool, records: bool, mode: int, commands: int, place: int = 0) -> Header:
        """``grad``, ``records``: see ``GRAD``, ``RECORDS``; ``place``: a packed ``MicroBatch``; 0: a forward of its own."""
        return cls(0, sequence, GRAD * grad | RECORDS * records, mode, commands, 0, 0, place)

    @classmethod
    def gradient(cls, sequence: int, clear: bool, mode: int, commands: int, leave: bool = False) -> Header:
        """``clear``, ``leave``: see ``CLEAR``, ``LEAVE``."""
        return cls(0, sequence, CLEAR * clear | LEAVE * leave, mode, commands)

    @classmethod
    def command(cls, number: int, kind: int, argument: int, backward: int) -> Header:
        """``kind``, ``argument``: see ``command.Command``."""
        return cls(0, number, 0, kind, 0, 0, backward, argument)

    @classmethod
    def done(cls, sequence: int) -> Header:
        """A report: see ``DONE``."""
        return cls(0, sequence, DONE)

    @classmethod
    def drew(cls) -> Header:
        """A report: see ``DREW``."""
        return cls(0, 0, DREW)

    @classmethod
    def error(cls, sequence: int, fatal: bool) -> Header:
        """A report: see ``ERROR``. Forward 0 stands for all; ``fatal``: for all to come, the executor has ended."""
        return cls(0, sequence, ERROR, argument=int(fatal))

    @classmethod
    def gradients(cls, step: int, staged: bool, note_bytes: int, optimizer: int) -> Header:
        """A bundle of gradients. ``staged``: see ``STAGED``; ``note_bytes``: how long its note is."""
        return cls(0, step, STAGED if staged else 0, note_bytes, argument=optimizer)

    @classmethod
    def weights(cls, step: int, changed: bool = False) -> Header:
        """A bundle of weights. ``changed``: see ``CHANGED``."""
        return cls(0, step, CHANGED if changed else 0)

    @property
    def place(self) -> int:
        return self.argument

    @property
    def kind(self) -> int:
        return self.mode

    @property
    def fatal(self) -> bool:
        return bool(self.argument)

    @property
    def note_bytes(self) -> int:
        return self.mode

    @property
    def optimizer(self) -> int:
        return self.argument

    def write(self, memory: memoryview) -> None:
        _WIRE.pack_into(memory, 0, *self)

    @staticmethod
    def read(memory: memoryview) -> Header:
        return Header._make(_WIRE.unpack_from(memory))
