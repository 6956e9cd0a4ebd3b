"""The parts of a message that came beside its pickle, while this thread unpickles it.

``serialize.loads`` sets ``beside`` around each unpickling; the functions here stand in pickles in place of what was taken out
of band, and look it up there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class _Beside(threading.local):
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.references: list[Any] = []
        self.parts: list[torch.Tensor] = []
        """Tensors that require grad and came in parts, in the order in which they are made."""
        self.on_gpu: list[torch.Tensor] = []
        self.arrays: list[Any] | None = None
        """Gets the arrays of cupy (``arrays.Arrived``), if somebody asks."""


beside = _Beside()


def landed(index: int) -> torch.Tensor:
    """Number ``index`` of the dense tensors."""
    return beside.tensors[index]


def landed_on_gpu(index: int, requires_grad: bool) -> torch.Tensor:
    """Number ``index`` of the tensors that came from GPU to GPU."""
    tensor = beside.on_gpu[index]
    return tensor.requires_grad_() if requires_grad else tensor


def landed_reference(index: int) -> Any:
    """Number ``index`` of what ``serialize.loads`` was given as references."""
    return beside.references[index]


def in_parts(rebuild: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> torch.Tensor:
    """A tensor that travels in parts and requires grad. Where its class made it of others that require grad, gradients go by
    those."""
    made = rebuild(*args)
    beside.parts.append(made if made.is_leaf and made.requires_grad else torch.empty(0, device="cpu", requires_grad=True))
    return made
