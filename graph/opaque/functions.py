"""Functions with a backward of their own (``torch.autograd.Function``)."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from ...transport import NotSupported

Handle = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextlib.contextmanager
def custom_functions(handle: Handle) -> Iterator[None]:
    """While this lasts, ``SomeFunction.apply(...)`` in this thread goes to ``handle(apply, args, kwargs)``: a trace must see
    the function, not the operations of its forward, whose backward is another. Raises ``NotSupported`` where that cannot be
    had, in a torch that calls functions otherwise than those that were tried."""
    if not followed():
        raise NotSupported(f"torch {torch.__version__} calls autograd functions in a way that a trace does not see")
    with _exchanged(handle):
        yield


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: int) -> int:
        return x


_looked_up = _Probe.apply


@functools.cache
def followed() -> bool:
    """Whether both ways to call a function are seen in this process."""
    seen: list[Any] = []
    with _exchanged(lambda apply, args, kwargs: seen.append(apply)):
        _Probe.apply(1)
        _looked_up(1)
    return len(seen) == 2


@contextlib.contextmanager
def _exchanged(handle: Handle) -> Iterator[None]:
    """A program may have looked ``apply`` up before (``f = SomeFunction.apply``), so it is what that calls which is exchanged:
    before torch 2.14 the ``apply`` of a base class, since then, where it is in C, ``forward`` (``_looked_up_before``)."""
    thread, function = threading.get_ident(), torch.autograd.Function
    original, beneath = function.__dict__["apply"], torch._C._FunctionBase.__dict__["apply"]
    in_python = isinstance(original, classmethod)
    exchanged: Any = torch.autograd.function._SingleLevelFunction if in_python else function
    handled = False

    def left_alone(cls: Any) -> bool:
        # In older versions all others of torch.utils.checkpoint had one that keeps their inputs.
        own = cls.__module__ == "torch.utils.checkpoint" and cls is not CheckpointFunction
        return threading.get_ident() != thread or handled or own

    def give(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal handled
        if cls is CheckpointFunction:
            raise NotSupported(
                "checkpoint(..., use_reentrant=True) calls a function once more in the backward, a trace does not"
            )
        handled = True
        try:
            return handle(original.__get__(None, cls), args, kwargs)
        finally:
            handled = False

    @classmethod  # type: ignore[misc]
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return beneath.__get__(None, cls)(*args, **kwargs) if left_alone(cls) else give(cls, args, kwargs)

    exchanged.apply = apply
    try:
        with contextlib.nullcontext() if in_python else _looked_up_before(left_alone, give):
            yield
    finally:
        if in_python:
            del exchanged.apply
        else:
            exchanged.apply = original


@contextlib.contextmanager
def _looked_up_before(left_alone: Callable[[Any], bool], give: Callable[..., Any]) -> Iterator[None]:
    """An ``apply`` in C that was looked up before asks its class for ``_backward_cls``, which nobody else does, and then for
    ``forward``. While this lasts, that calls ``give``, and C makes one more node of autograd around what comes of it. Refused
    is what C would change by that: results that are not objects of their own, or that have no gradient."""
    kind: Any = type(torch.autograd.Function)
    unset = torch.autograd.function._SingleLevelFunction.setup_context
    entered: tuple[Any, bool] | None = None  # the class, and whether gradients were on

    def find(cls: Any, name: str) -> Any:
        nonlocal entered
        found = type.__getattribute__(cls, name)
        if name not in ("_backward_cls", "forward") or left_alone(cls):
            return found
        if name == "_backward_cls":
            entered = cls, torch.is_grad_enabled()
            return found
        known, entered = entered, None
        return functools.partial(forward, *known) if known is not None and known[0] is cls else found

    def forward(cls: Any, grad: bool, *args: Any, **kwargs: Any) -> Any:
        apart = cls.setup_context is not unset
        given = args if apart else args[1:]  # the first one is the context
        with torch.set_grad_enabled(grad):
            result = give(cls, given, kwargs)
        before, after = pytree.tree_leaves((given, kwargs)), pytree.tree_leaves(result)
        proxies = any(isinstance(leaf, fx.Proxy) for leaf in after)
        if (apart and proxies) or (not proxies and _changed_by_c(before, after, grad)):
            raise NotSupported(
                f"the forward calls an apply of {cls.__name__} that was looked up before the trace",
                hint=f"call {cls.__name__}.apply(...) in the forward",
            )
        return result

    kind.__getattribute__ = find
    try:
        yield
    finally:
        del kind.__getattribute__


def _changed_by_c(given: list[Any], made: list[Any], grad: bool) -> bool:
    """Whether an ``apply`` around one changes its results: C makes views of what was ``given``, and gives gradients to all."""
    tensors = [leaf for leaf in made if isinstance(leaf, torch.Tensor)]
    without = any(leaf.is_floating_point() or leaf.is_complex() for leaf in tensors if not leaf.requires_grad)
    needs = grad and any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in given)
    return (needs and without) or any(leaf is other for leaf in tensors for other in given)
