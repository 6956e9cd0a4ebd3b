"""The device of each tensor of a model, before anything is moved, and the device on which each part computes.

A model is captured on *its own* devices: those that its parameters had when it was wrapped. Where a placement gives a part
another device (``"worker1/cuda:1"``), that part's stage computes there; ``plan/located`` works out what this means for each
value. A device that is another worker's is never touched here, only named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from ...transport import NotSupported
from ...transport.gpu.driver import count, kind

CPU = torch.device("cpu")


def named(device: torch.device) -> str:
    """How a device travels: its name, empty for the CPU. A worker that has no such device can still read it."""
    return "" if device.type == "cpu" else str(device)


def find(name: str) -> torch.device:
    """The device of this process that was ``named`` so. ``NotSupported`` where there is none."""
    if not name:
        return CPU
    type_, _, index = name.partition(":")
    have = count() if kind() == type_ else 0
    if int(index or 0) >= have:
        raise NotSupported(f"this worker has no device {name}: it has {have} of type {type_!r}")
    return torch.device(name)


def forked_generators(gpu: torch.device | None) -> AbstractContextManager[None]:
    """While it lasts, random numbers are drawn from copies of the generators of the CPU and of this accelerator."""
    if gpu is None:
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[gpu.index], device_type=gpu.type)


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and tensor attributes of this very module."""
    tables = {**module._parameters, **module._buffers, **vars(module)}
    return {name: tensor for name, tensor in tables.items() if isinstance(tensor, torch.Tensor)}


class Devices:
    """Of one model, looked at when it is wrapped. ``given(path)``: what device a module or a tensor has got since, if any."""

    def __init__(self, model: nn.Module, given: Callable[[str], torch.device | None]) -> None:
        self.given = given
        self._own = {
            f"{path}.{name}" if path else name: tensor.device
            for path, module in model.named_modules(remove_duplicate=False)
            for name, tensor in tensors_of(module).items()
        }
        self._modules = [path for path, _ in model.named_modules(remove_duplicate=False)]

    def involved(self) -> bool:
        """Whether any part of it lies, or is to compute, elsewhere than on the CPU."""
        everywhere = {*self._own.values(), *map(self.given, self._modules)}
        return bool(everywhere - {CPU, None})

    def own(self, path: str) -> torch.device | None:
        """Where a tensor, or the first tensor of a module, lay. ``None``: the module has none."""
        below = path + "." if path else ""
        return self._own.get(path) or next((at for name, at in self._own.items() if name.startswith(below)), None)

    def single(self, path: str = "") -> torch.device | None:
        """The device of all tensors of a module, if they have one; the CPU if there are none."""
        below = path + "." if path else ""
        found = {at for name, at in self._own.items() if name == path or name.startswith(below)}
        return None if len(found) > 1 else next(iter(found), CPU)

    def taken(self, inputs: Sequence[torch.Tensor], path: str = "") -> list[torch.device]:
        """On which devices a module, in its capture, takes these inputs to be. A model that lies on one device does not ask
        where its caller's tensors are: they are on its own. But where some of them are on an accelerator, as the model is,
        those that are on the CPU are so on purpose (the lengths of a packed sequence)."""
        own = self.single(path)
        if own is None:
            return [tensor.device for tensor in inputs]
        if own.type == "cpu" or all(tensor.is_cpu for tensor in inputs):
            return [own] * len(inputs)
        return [tensor.device if tensor.is_cpu else own for tensor in inputs]
