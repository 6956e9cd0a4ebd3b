"""Whether the parameters of a model can move into the memory where servers write, and what has to move with them."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import nn

from ..message.layout import span
from ..places.tensor import RemoteTensor
from ..transport import NotSupported, sole
from .layout import dense
from .parameter import ServedParameter

Shown = tuple[torch.Tensor, nn.Parameter, int]
"""A buffer, or a tensor that is an attribute of a module; the parameter in whose memory it lies; at which element."""


def check(net: nn.Module) -> list[Shown]:
    """What shows the memory of parameters within the model. Raises ``NotSupported`` for parameters that are served or elsewhere
    already, and for memory that could not be shared any more. Warns of tensors outside of the model that show it."""
    for name, parameter in net.named_parameters():
        if isinstance(parameter, RemoteTensor):
            raise NotSupported(f"{name!r} lies at a worker", hint="wrap a model, or serve it")
        if isinstance(parameter, ServedParameter):
            raise NotSupported(f"{name!r} is served already", hint="close() that served model first, also after an error")
    parameters = sorted(_spans(net.named_parameters()))
    for (_, end, first, _), (start, _, second, _) in pairwise(parameters):
        if start < end:
            why = f"{first!r} and {second!r} lie in the same memory, and servers step each by itself"
            raise NotSupported(why, hint="let the modules have one parameter: a.weight = b.weight")
    others = [*net.named_buffers(), *_attributes(net)]
    shown = [
        _within(this, that) for this in _spans(iter(others)) for that in parameters if this[0] < that[1] and that[0] < this[1]
    ]
    _look_outside(net, shown)
    return shown


_Span = tuple[int, int, str, torch.Tensor]
"""Where a tensor begins and ends in memory, its name, itself."""


def _spans(named: Iterator[tuple[str, torch.Tensor]]) -> Iterator[_Span]:
    for name, tensor in named:
        if tensor.numel() and tensor.is_cpu and tensor.layout is torch.strided:
            nbytes = span(tensor.shape, tensor.stride()) * tensor.element_size()
            yield tensor.data_ptr(), tensor.data_ptr() + nbytes, name, tensor


def _attributes(net: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in net.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                yield f"{path}.{name}" if path else name, value


def _within(this: _Span, that: _Span) -> Shown:
    start, end, name, tensor = this
    first, last, holder, parameter = that
    assert isinstance(parameter, nn.Parameter)
    whole = tensor.dtype == parameter.dtype and first <= start and end <= last
    if not whole or dense(parameter.detach()) is None:
        why = f"{name!r} shares memory with {holder!r}, and would not when a server writes that"
        raise NotSupported(why, hint="clone() it")
    return tensor, parameter, (start - first) // parameter.element_size()


def _look_outside(net: nn.Module, shown: list[Shown]) -> None:
    views = [tensor for tensor, _, _ in shown]
    known = {
        id(tensor): tensor for tensor in [*net.parameters(), *views, *(view._base for view in views)] if tensor is not None
    }
    here = Counter(tensor.untyped_storage()._cdata for tensor in known.values())
    for name, parameter in net.named_parameters() if sole.STORAGE_USES >= 0 else ():
        storage = parameter.untyped_storage()
        if sole.storage_uses(storage) > sole.STORAGE_USES + here[storage._cdata] - 1:
            _warn(
                f"a tensor outside of the model shares the memory of {name!r} (a state_dict(), .data or .detach() of it): it "
                "keeps the values of now, and others may do so, too"
            )
            return


def _warn(text: str) -> None:
    """A ``UserWarning`` at the line of the user's program, however deep in this package and in torch its reason is found."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ("rdmarpc", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
