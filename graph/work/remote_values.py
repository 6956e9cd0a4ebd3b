"""Operations on parameters and gradients where they live: what the caller asks for, as plain data, and how it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...transport import NotSupported
from ..servers.updates import copied

VALUE, DATA, GRAD = range(3)
"""Of a ``Place``: the parameter itself; the same without its version counter (``.data``); its gradient."""

WHOLE, NONFINITE, ASSIGN = "whole", "nonfinite", "assign"
"""Names of operations that are none of torch's: a copy of a tensor; whether it has an infinite element or a NaN; make the
second argument the parameter's gradient or data."""


class View(NamedTuple):
    """A view operation of torch; ``at``: which of its results, -1 if there is one only."""

    name: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    at: int


class Place(NamedTuple):
    """A tensor at its owner: of parameter ``position``, then seen through ``views``."""

    position: int
    kind: int
    views: tuple[View, ...] = ()


class Operation(NamedTuple):
    """``name`` is ``"mul_.Tensor"`` for ``torch.ops.aten.mul_.Tensor``. Arguments may contain ``Place`` in tuples. ``wanted``:
    its result is sent back; ``maybe``: where it fails that result is ``None``."""

    name: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    wanted: bool = False
    maybe: bool = False


def perform(parameters: Sequence[torch.nn.Parameter], operations: Sequence[Operation]) -> list[Any]:
    """Carry them out in their order. The results that are wanted, in host memory."""
    results = []
    with torch.no_grad():
        for operation in operations:
            try:
                made = _perform(parameters, operation)
            except Exception:
                if not operation.maybe:
                    raise
                made = None
            if operation.wanted:
                results.append(made)
    return results


def _perform(parameters: Sequence[torch.nn.Parameter], operation: Operation) -> Any:
    if operation.name == ASSIGN:
        return _assign(parameters, *operation.args)
    args = replace(operation.args, lambda place: _find(parameters, place))
    kwargs = {key: replace(value, lambda place: _find(parameters, place)) for key, value in operation.kwargs}
    if operation.name == WHOLE:
        return copied(args[0])
    if operation.name == NONFINITE:
        return bool((~torch.isfinite(args[0])).any())
    made = function(operation.name)(*args, **kwargs)
    return replace(made, None) if operation.wanted else None


def _assign(parameters: Sequence[torch.nn.Parameter], place: Place, tensor: torch.Tensor) -> None:
    parameter = parameters[place.position]
    tensor = tensor.to(parameter.device)
    if place.kind == GRAD:
        parameter.grad = tensor
    else:
        parameter.data = tensor


def replace(value: Any, find: Callable[[Place], torch.Tensor] | None) -> Any:
    """The same with tensors for places; without ``find`` with copies of tensors in host memory."""
    if isinstance(value, Place) and find is not None:
        return find(value)
    if isinstance(value, (tuple, list)):
        return type(value)([replace(item, find) for item in value])
    if find is None and isinstance(value, torch.Tensor):
        return copied(value.detach())
    return value


def function(name: str) -> Any:
    """The operation of torch."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def seen_through(tensor: torch.Tensor, views: Sequence[View]) -> torch.Tensor:
    for view in views:
        made = function(view.name)(tensor, *view.args, **dict(view.kwargs))
        tensor = made if view.at < 0 else made[view.at]
    return tensor


def _find(parameters: Sequence[torch.nn.Parameter], place: Place) -> torch.Tensor:
    parameter = parameters[place.position]
    if place.kind != GRAD:
        return seen_through(parameter.data if place.kind == DATA else parameter.detach(), place.views)
    if parameter.grad is None:
        raise NotSupported("a parameter has no gradient here")
    if parameter.grad.layout is not torch.strided:
        raise NotSupported(f"a gradient is {parameter.grad.layout}", hint="sparse gradients are for SparseAdam and SGD alone")
    return seen_through(parameter.grad, place.views)
