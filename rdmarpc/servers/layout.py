"""What lies where: the header of a bundle, and the memory order of dense tensors.

A header is the 64 bytes in front of a bundle: five little-endian int64 words, written together with the payload, and padding.

What crosses of a tensor is the storage as it lies, so channels-last stays channels-last. Its order is one integer: 0 for
row-major, else 4 bits a dimension, outermost in memory first, holding dimension + 1.
"""

from __future__ import annotations

import functools
import struct
from typing import NamedTuple

import torch

MAX_DIMS = 15
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


def dense(tensor: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """A contiguous view of all of the tensor's storage and its order, or ``None`` if there are gaps or overlaps (then only
    a copy can be sent)."""
    if tensor.is_conj() or tensor.is_neg():
        return None
    shape, given = tuple(tensor.shape), tensor.stride()
    if given == strides(shape, 0):
        return tensor, 0
    if tensor.dim() <= MAX_DIMS:
        # Among equal strides a dimension of size 1 comes last: its stride decides which kernels torch chooses, so it must
        # come out as it was.
        dims = sorted(range(tensor.dim()), key=lambda dim: (-given[dim], shape[dim] == 1))
        view = tensor.permute(dims)
        if view.is_contiguous():
            return view, sum(dim + 1 << 4 * at for at, dim in enumerate(dims))
    return (tensor, 0) if tensor.is_contiguous() else None


@functools.lru_cache(4096)
def strides(shape: tuple[int, ...], order: int) -> tuple[int, ...]:
    """Strides, in elements, of a tensor of this shape in that memory order."""
    dims = [(order >> 4 * at & 15) - 1 for at in range(len(shape))] if order else list(range(len(shape)))
    if sorted(dims) != list(range(len(shape))):
        raise ValueError(f"{order:#x} is no memory order of {len(shape)} dimensions")
    result = [0] * len(shape)
    step = 1
    for dim in reversed(dims):
        result[dim] = step
        step *= max(1, shape[dim])
    return tuple(result)
