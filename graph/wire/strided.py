"""Payloads that no memory order describes: with gaps between their elements, or with elements that are read more than once.

They land with the strides that they have at the sender, because kernels choose by strides how they compute, and in which order
they add up: other strides give other bits. What lies between the elements is not copied and never read. Where there is much
of that, it is narrowed (``landing``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ...transport import RdmaError

MOST = 16
"""A slot grows for gaps to at most so many times the bytes of the payload."""
_WIDE = 4
"""Gaps of more than so many times the payload are narrowed."""
_ALIGN, _ALIGN_INNER = 64, 8
"""Narrowed strides keep their remainder by this many elements, and so the alignment of every row."""


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one; 0 for an empty tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides))


@functools.lru_cache(4096)
def landing(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides with which a payload lands: its own, or where most of its span is gaps (``x[:, 0]`` of many tokens),
    narrower ones that no kernel can tell from them by what kernels ask of strides. The dimensions have the same order, those
    that continue each other still do and the others do not, and every row has the same alignment."""
    numel = functools.reduce(lambda a, b: a * b, shape, 1)
    if span(shape, strides) <= _WIDE * numel:
        return strides
    found = list(strides)
    extent, before = 1, (1, 1)  # elements up to here; where the dimension before would continue: as it was, as it is
    for dim in sorted((dim for dim, step in enumerate(strides) if step), key=lambda dim: (strides[dim], shape[dim] > 1)):
        step, inner = strides[dim], extent == 1
        if step == before[0]:
            found[dim] = before[1]
        elif step < extent:
            return strides  # elements overlap
        else:
            align = _ALIGN_INNER if inner else _ALIGN
            new = extent + (step - extent) % align
            found[dim] = min(step, new + align if new == before[1] else new)
        extent += (shape[dim] - 1) * found[dim]
        before = step * shape[dim], found[dim] * shape[dim]
    return tuple(found)


def flat(payload: torch.Tensor) -> torch.Tensor | None:
    """All memory from the first to the last element, where that is no more than the payload has elements: an expanded tensor,
    windows that overlap. ``None`` for gaps."""
    count = span(payload.shape, payload.stride())
    return payload.as_strided((count,), (1,)) if count <= payload.numel() else None


def lay_out(payload: torch.Tensor, room: torch.Tensor, strides: Sequence[int]) -> None:
    """Copy a payload into ``room`` (one dimension, as large as the span at least), to lie there with ``strides``."""
    # What is read several times is written once: torch refuses to write over itself.
    sizes = [1 if step == 0 else size for size, step in zip(payload.shape, strides)]
    for dim, size in enumerate(sizes):
        if size != payload.shape[dim]:
            payload = payload.narrow(dim, 0, 1)
    room.as_strided(sizes, tuple(strides)).copy_(payload)


def checked(shape: Sequence[int], strides: tuple[int, ...], limit: int) -> int:
    """The span of strides that came from a peer, which must not be more than ``limit`` elements."""
    count = span(shape, strides)
    if any(step < 0 for step in strides) or count > limit:
        raise RdmaError(f"strides {strides} do not fit a slot of {limit} elements of shape {tuple(shape)}")
    return count
