"""Tensors that lie at workers, as arguments and results of calls."""

from __future__ import annotations

from typing import Any

import torch

from ..message.serialize import Message, register_reducer
from .geometry import Geometry, view
from .runners import running
from .tensor import RemoteTensor, at_place


def _reduce(value: RemoteTensor, message: Message) -> Any:
    """What lies at the receiver does not cross: it arrives there as a copy of what it is there. Anything else comes here
    first."""
    stream = value._handle.stream
    if message.to != stream.info.number or value._meta.geometry.layout is not torch.strided:
        found = at_place(value.detach(), None).clone().requires_grad_(value.requires_grad)
        return message.in_parts(value, message.reduce(found))
    stream.synchronize()
    where = stream.key, *value._words, value._meta.geometry.plain(), value.requires_grad
    return message.in_parts(value, (lying, where))


def lying(key: str, name: int, at: int, geometry: tuple[Any, ...], requires_grad: bool) -> torch.Tensor:
    """A copy of a tensor that lies here, in the memory that the stream ``key`` of the sender has names for."""
    found = running(key).values[name]
    return (found if at == -1 else view(found, Geometry.of_plain(geometry), at)).clone().requires_grad_(requires_grad)


register_reducer(RemoteTensor, _reduce)
