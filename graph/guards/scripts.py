"""TorchScript in a forward that is traced.

What a TorchScript function computes depends on how often it has run in the process: the first run is profiled, later ones have
gradients by formulas of their own, whose last bits differ. The operations of one run, written down, would compute neither. So
a forward that calls one is not traced. A part that stays one operation may call any; its runs without data are not counted.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...transport import NotSupported

_KINDS: Any = torch._C.ScriptFunction, torch._C.ScriptMethod


@contextlib.contextmanager
def no_scripts(allowed: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """While this lasts, a TorchScript function or method that this thread calls raises ``NotSupported``, unless
    ``allowed()``."""
    thread = threading.get_ident()

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(script: Any, /, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and not allowed():
                raise NotSupported(f"the forward calls {script.name!r}, a function of TorchScript, whose gradients are its own")
            return original(script, *args, **kwargs)

        return call

    originals = [(kind, kind.__call__) for kind in _KINDS]
    for kind, original in originals:
        kind.__call__ = refusing(original)
    try:
        yield
    finally:
        for kind, original in originals:
            kind.__call__ = original


def uncounted() -> contextlib.AbstractContextManager[Any]:
    """While this lasts, what TorchScript runs in this thread leaves its later runs as they are."""
    return torch.jit.optimized_execution(False)
