"""TorchScript, and control flow of torch's own.

What a TorchScript function computes depends on how often it has run in the process: the first run is profiled, later ones have
gradients by formulas of their own, whose last bits differ. The operations of one run, written down, would compute neither. So
a forward that calls one is not traced. A part that stays one operation may call any; its runs without data are not counted.

``torch.cond``, ``while_loop`` and the like compile what they call. Their first use within a dispatch mode, as in a trace, makes
every later one in the process fail. So they are refused before that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._higher_order_ops import utils as operators

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


def uncounted() -> contextlib.AbstractContextManager[Any]:
    """While this lasts, what TorchScript runs in this thread leaves its later runs as they are."""
    return torch.jit.optimized_execution(False)
