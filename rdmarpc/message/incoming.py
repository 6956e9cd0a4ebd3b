"""The parts of a message that came beside its pickle, while this thread unpickles it.

``serialize.loads`` sets ``beside`` around each unpickling; the functions here stand in pickles in place of what was taken out
of band, and look it up there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Came(NamedTuple):
    """What came beside one pickle."""

    tensors: list[torch.Tensor]
    references: list[Any]
    parts: list[torch.Tensor]
    """Gets tensors that require grad and came in parts, in the order in which they are made."""
    on_gpu: list[torch.Tensor]
    arrays: list[Any] | None
    """Gets the arrays of cupy (``reducers.Arrived``), if somebody asks."""


class _Beside(threading.local):
    now = Came([], [], [], [], None)


beside = _Beside()


def landed(index: int) -> torch.Tensor:
    """Number ``index`` of the dense tensors."""
    return beside.now.tensors[index]


def landed_on_gpu(index: int, requires_grad: bool) -> torch.Tensor:
    """Number ``index`` of the tensors that came from GPU to GPU."""
    tensor = beside.now.on_gpu[index]
    return tensor.requires_grad_() if requires_grad else tensor


def landed_reference(index: int) -> Any:
    """Number ``index`` of what ``serialize.loads`` was given as references."""
    return beside.now.references[index]


def in_parts(rebuild: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> torch.Tensor:
    """A tensor that travels in parts and requires grad. Where its class made it of others that require grad, gradients go by
    those."""
    made = rebuild(*args)
    beside.now.parts.append(made if made.is_leaf and made.requires_grad else torch.empty(0, device="cpu", requires_grad=True))
    return made
