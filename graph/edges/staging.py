"""Copies between an accelerator and host memory, for tensors that cross between devices without a direct path.

A copy waits for what this thread's current stream was given before, and is complete when the function returns. So a
notification or credit that is sent afterwards needs no event. Whoever asks for one counts it (``bytes_staged``).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from ...transport import ArenaFull
from ...transport.gpu.driver import driver

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
