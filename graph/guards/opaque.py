"""Calls that a trace cannot look into: TorchScript, control flow of torch's own, functions with a backward of their own.

What a TorchScript function computes depends on how often it has run in the process: the first run is profiled, later ones have
gradients by formulas of their own, whose last bits differ. The operations of one run, written down, would compute neither. So
a forward that calls one is not traced. A part that stays one operation may call any; its runs without data are not counted.

``torch.cond``, ``while_loop`` and the like compile what they call. Their first use within a dispatch mode, as in
a trace, makes every later one in the process fail. So they are refused before that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._higher_order_ops import utils as operators
from torch.utils.checkpoint import CheckpointFunction

from ...transport import NotSupported

_KINDS: Any = torch._C.ScriptFunction, torch._C.ScriptMethod
_COMPILE = "setup_compilation_env"
"""What ``torch.cond`` and its like look up when they compile; not in every version of torch."""


@contextlib.contextmanager
def no_opaque_calls(allowed: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """While this lasts, a TorchScript function or method that this thread calls raises ``NotSupported``, unless
    ``allowed()``; so does an operator like ``torch.cond``."""
    thread = threading.get_ident()

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(script: Any, /, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and not allowed():
                raise NotSupported(f"the forward calls {script.name!r}, a function of TorchScript, whose gradients are its own")
            return original(script, *args, **kwargs)

        return call

    compiles = getattr(operators, _COMPILE, None)

    def controlled() -> Any:
        if compiles is None or threading.get_ident() == thread:
            raise NotSupported("the forward calls torch.cond, or another operator that compiles what it is given")
        return compiles()

    originals = [(kind, kind.__call__) for kind in _KINDS]
    for kind, original in originals:
        kind.__call__ = refusing(original)
    if compiles is not None:
        setattr(operators, _COMPILE, controlled)
    try:
        yield
    finally:
        for kind, original in originals:
            kind.__call__ = original
        if compiles is not None:
            setattr(operators, _COMPILE, compiles)


@contextlib.contextmanager
def custom_functions(handle: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """While this lasts, ``SomeFunction.apply(...)`` in this thread goes to ``handle(apply, args, kwargs)``: a trace must see
    the function, not the operations of its forward. A program may have looked ``apply`` up before (``f =
    SomeFunction.apply``), so it is what that calls which is exchanged."""
    thread, base = threading.get_ident(), torch.autograd.function._SingleLevelFunction
    original = torch.autograd.Function.__dict__["apply"]
    handled = False

    @classmethod  # type: ignore[misc]
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal handled
        if threading.get_ident() != thread or handled:
            return super(base, cls).apply(*args, **kwargs)
        if cls is CheckpointFunction:
            raise NotSupported(
                "checkpoint(..., use_reentrant=True) calls a function once more in the backward, a trace does not"
            )
        if cls.__module__ == "torch.utils.checkpoint":  # in older versions all others had one that keeps their inputs
            return super(base, cls).apply(*args, **kwargs)
        handled = True
        try:
            return handle(original.__get__(None, cls), args, kwargs)
        finally:
            handled = False

    base.apply = apply  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del base.apply  # type: ignore[attr-defined]


def uncounted() -> contextlib.AbstractContextManager[Any]:
    """While this lasts, what TorchScript runs in this thread leaves its later runs as they are."""
    return torch.jit.optimized_execution(False)


def runs_again() -> bool:
    """Whether ``torch.utils.checkpoint`` runs what is called now once more in the backward."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


class ActsAgain(NotSupported):
    """What ``torch.utils.checkpoint`` runs twice changes something each time: no graph has that."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} changes what it keeps, and torch.utils.checkpoint runs it twice, which a trace does not",
            hint="use checkpoint inside of a part that lies at one worker",
        )
