"""What lies where: the header of a bundle, and the memory order of dense tensors.

A header is the 64 bytes in front of a bundle: five little-endian int64 words, written together with the payload, and padding.

What crosses of a tensor is the storage as it lies, so channels-last stays channels-last.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

from ..message.layout import dense as row_major

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


def dense(tensor: torch.Tensor) -> torch.Tensor | None:
    """A contiguous view of all of the tensor's storage, or ``None`` if there are gaps or overlaps (then only a copy can be
    sent)."""
    if tensor.is_conj() or tensor.is_neg():
        return None
    if tensor.is_contiguous():
        return tensor
    stride = tensor.stride()
    view = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -stride[dim]))
    return view if view.is_contiguous() else None


def strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its own strides, in elements, if it is dense; else those of a contiguous tensor of its shape. They decide which kernels
    torch chooses, also those of dimensions of size 1."""
    return tensor.stride() if dense(tensor) is not None else row_major(tensor.shape)
