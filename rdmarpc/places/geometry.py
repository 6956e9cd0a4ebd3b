"""How a tensor lies over its storage, and tensors made over bytes. Both ends of a command stream use it."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch

from ..message.layout import physical, span

STRIDED = torch.strided
_ALIGN = 64


class Geometry(NamedTuple):
    """Shape, strides (elements), dtype and layout of a tensor, and whether it is to be read conjugated or negated. ``strides``
    of a layout that is not strided are empty."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    layout: torch.layout = STRIDED
    conj: bool = False
    neg: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def span(self) -> int:
        """Elements from the first to the last."""
        return span(self.shape, self.strides)

    def plain(self) -> tuple[Any, ...]:
        """As numbers and texts."""
        return (self.shape, self.strides, str(self.dtype)[6:], str(self.layout)[6:], self.conj, self.neg)

    @staticmethod
    def of_plain(told: tuple[Any, ...]) -> Geometry:
        shape, strides, dtype, layout, conj, neg = told
        return Geometry(tuple(shape), tuple(strides), getattr(torch, dtype), getattr(torch, layout), conj, neg)


def geometry(tensor: torch.Tensor) -> Geometry:
    """That of a tensor of any layout."""
    layout = tensor.layout
    if layout is not STRIDED:
        return Geometry(tuple(tensor.shape), (), tensor.dtype, layout)
    return Geometry(tuple(tensor.shape), tensor.stride(), tensor.dtype, layout, tensor.is_conj(), tensor.is_neg())


def lies_anywhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a kind that can lie at a worker."""
    return tensor.layout in (STRIDED, torch.sparse_coo) and not (tensor.is_quantized or tensor.is_nested)


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers as they lie in memory: neither conjugated nor negated, apart from autograd."""
    return physical(tensor)[0]


def over(buffer: Any, offset: int, geometry: Geometry) -> torch.Tensor:
    """A tensor over writable bytes of a buffer, which it keeps: bare numbers at ``offset`` bytes."""
    if (elements := geometry.span) == 0:
        return torch.empty_strided(geometry.shape, geometry.strides, dtype=geometry.dtype, device="cpu")
    flat = torch.frombuffer(buffer, dtype=geometry.dtype, count=elements, offset=offset)
    return flat.as_strided(geometry.shape, geometry.strides)


def at_bytes(storage: Any, offset: int, geometry: Geometry) -> torch.Tensor:
    """A tensor over a storage of this process: bare numbers at ``offset`` bytes."""
    found = torch.empty(0, dtype=geometry.dtype, device="cpu")
    return found.set_(storage, offset // geometry.dtype.itemsize, geometry.shape, geometry.strides)


def dressed(tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The inverse of ``bare``."""
    if geometry.conj:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if geometry.neg else tensor


def view(base: torch.Tensor, geometry: Geometry, offset: int) -> torch.Tensor:
    """The view of a strided tensor's storage with this geometry, at ``offset`` elements of its dtype."""
    if base.is_conj() or base.is_neg():
        base = bare(base)
    if base.dtype != geometry.dtype:
        found = torch.empty(0, dtype=geometry.dtype, device=base.device)
        found.set_(base.untyped_storage(), offset, geometry.shape, geometry.strides)
    else:
        found = base.as_strided(geometry.shape, geometry.strides, offset)
    return dressed(found, geometry) if geometry.conj or geometry.neg else found


def room(geometry: Geometry, address: int) -> tuple[int, int]:
    """(bytes that a copy needs in memory aligned to 64 bytes, where in them its first element lies): the copy keeps the
    address modulo 64, because kernels choose by it in which order they add up."""
    shift = address % _ALIGN
    if shift % geometry.dtype.itemsize:
        shift = 0
    return max(_ALIGN, -(-(shift + geometry.span * geometry.dtype.itemsize) // _ALIGN) * _ALIGN), shift
