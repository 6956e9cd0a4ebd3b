"""Copies between an accelerator and host memory, and into registered memory, for what has no direct path.

A copy waits for what this thread's current stream was given before, and is complete when the function returns. So a
notification or credit that is sent afterwards needs no event. Each one is counted (``bytes_staged``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from ...transport import ArenaFull
from ...transport.gpu.driver import driver
from ..plan.place import Edge
from ..wire.strided import lay_out

if TYPE_CHECKING:
    from ...transport import Device


def to_gpu(tensor: torch.Tensor, gpu: torch.device, device: Device) -> torch.Tensor:
    """A copy of a host tensor on an accelerator, in the same memory order. ``ArenaFull`` where it has no memory left."""
    try:
        with driver().relaxed():
            return tensor.to(gpu)
    except torch.OutOfMemoryError as error:
        raise ArenaFull(str(error), device=device.name) from error


def to_host(payload: torch.Tensor, memory: memoryview) -> None:
    """Copy a contiguous tensor, from an accelerator or not, into writable host memory of as many bytes."""
    with nullcontext() if payload.is_cpu else driver().relaxed():
        torch.frombuffer(memory, dtype=payload.dtype).copy_(payload.reshape(-1))


class Stage:
    """Registered memory of one slot's sender, for payloads that cannot be written from where they lie. Each copy is good until
    the next one.

    ``always``: the edge stages every payload, and has counted it; otherwise ``count(why)`` hears of each copy.
    """

    __slots__ = ("_count", "_device", "_edge", "_memory", "_spread", "always")

    def __init__(self, device: Device, edge: Edge, always: bool, count: Callable[[str], None]) -> None:
        self._device, self._edge, self._count = device, edge, count
        self.always = always and bool(edge.nbytes)
        self._memory: torch.Tensor | None = device.empty(edge.nbytes, dtype=torch.uint8) if self.always else None
        self._spread: torch.Tensor | None = None
        """For payloads with gaps, laid out as they are to land."""

    def _room(self, why: str) -> torch.Tensor:
        if not self.always:
            self._count(why)
        if self._memory is None:
            self._memory = self._device.empty(self._edge.nbytes, dtype=torch.uint8)
        return self._memory

    def copy(self, payload: torch.Tensor, why: str) -> torch.Tensor:
        """The bytes of a contiguous payload, which may lie on an accelerator."""
        room = self._room(why)
        to_host(payload, memoryview(room.numpy()))
        return room

    def gathered(self, payload: torch.Tensor, why: str) -> torch.Tensor:
        """A payload without its gaps, in row-major order."""
        return self._room(why).view(payload.dtype).view(payload.shape).copy_(payload)

    def overlapping(self, payload: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Where the edge stages ``always``: a payload whose elements are read more than once. ``whole``: all of its memory
        (``strided.flat``)."""
        assert self._memory is not None
        room = self._memory[: whole.numel() * whole.element_size()].view(payload.dtype)
        return room.copy_(whole).as_strided(payload.shape, payload.stride())

    def spread(self, payload: torch.Tensor, strides: tuple[int, ...], count: int, why: str) -> torch.Tensor:
        """A payload with these strides, which span ``count`` elements."""
        self._count(why)
        nbytes = count * payload.element_size()
        if self._spread is None or self._spread.numel() < nbytes:
            self._spread = self._device.empty(nbytes, dtype=torch.uint8)
        room = self._spread[:nbytes].view(payload.dtype)
        lay_out(payload, room, strides)
        return room.as_strided(payload.shape, strides)
