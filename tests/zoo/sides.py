"""One training, three ways: in one process, wrapped, served. What is compared afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

import rdmarpc as rpc

SERVERS = ("worker1", "worker2")


class Alone:
    """The model as it is."""

    name = "alone"

    def __init__(self, net: nn.Module) -> None:
        self.model: Any = net

    def optimizer(self, kind: type[torch.optim.Optimizer], params: Iterable[Any] | None = None, **settings: Any) -> Any:
        return kind(self.model.parameters() if params is None else params, **settings)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}

    def close(self) -> None:
        """Nothing to do."""


class Wrapped(Alone):
    name = "wrap"

    def __init__(self, net: nn.Module, placement: Mapping[str, str], **options: Any) -> None:
        super().__init__(rpc.wrap(net, dict(placement), **options))

    def close(self) -> None:
        self.model.close()


class Served(Alone):
    name = "serve"

    def __init__(self, net: nn.Module) -> None:
        super().__init__(rpc.serve(net, SERVERS))

    def optimizer(self, kind: type[torch.optim.Optimizer], params: Iterable[Any] | None = None, **settings: Any) -> Any:
        return self.model.new_optimizer(kind, params, **settings)

    def close(self) -> None:
        self.model.close()


@contextlib.contextmanager
def closing(side: Alone) -> Iterator[Alone]:
    try:
        yield side
    finally:
        side.close()


def difference(ours: Any, theirs: Any, where: str = "") -> str:
    """Where two values are not the same, in type, structure or any bit; empty if they are."""
    if isinstance(theirs, torch.Tensor):
        return _tensors(ours, theirs, where)
    if type(ours) is not type(theirs):
        return f"{where}: {type(ours).__name__} for {type(theirs).__name__}"
    if isinstance(theirs, Mapping):
        if list(ours) != list(theirs):
            return f"{where}: keys {list(ours)} for {list(theirs)}"
        return _first(difference(ours[key], theirs[key], f"{where}[{key!r}]") for key in theirs)
    if isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            return f"{where}: {len(ours)} for {len(theirs)} items"
        return _first(difference(a, b, f"{where}[{at}]") for at, (a, b) in enumerate(zip(ours, theirs)))
    if dataclasses.is_dataclass(theirs) or hasattr(theirs, "__dict__"):
        return difference(vars(ours), vars(theirs), where)
    same = ours == theirs or (ours != ours and theirs != theirs)
    return "" if same else f"{where}: {ours!r} for {theirs!r}"


def _tensors(ours: Any, theirs: torch.Tensor, where: str) -> str:
    if not isinstance(ours, torch.Tensor):
        return f"{where}: {type(ours).__name__} for a tensor"
    if type(ours).__name__ == "FakeTensor":
        return f"{where}: a fake tensor"
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return f"{where}: {tuple(ours.shape)} {ours.dtype} for {tuple(theirs.shape)} {theirs.dtype}"
    if ours.requires_grad != theirs.requires_grad:
        return f"{where}: requires_grad {ours.requires_grad} for {theirs.requires_grad}"
    ours, theirs = ours.detach().cpu(), theirs.detach().cpu()
    if ours.is_sparse:
        ours, theirs = ours.to_dense(), theirs.to_dense()
    if torch.equal(ours, theirs):
        return ""
    apart = (ours != theirs) & ~((ours != ours) & (theirs != theirs))
    if not apart.any():
        return ""
    most = (ours - theirs).abs().max().item() if ours.is_floating_point() else ""
    return f"{where}: {int(apart.sum())} of {apart.numel()} elements differ, by at most {most}"


def _first(found: Iterable[str]) -> str:
    return next((text for text in found if text), "")
