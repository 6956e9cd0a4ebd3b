"""``torch.distributed.rpc.functions``: how a function says that its result is a future."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

_SCRIPT = "__torch__."
F = TypeVar("F", bound=Callable[..., Any])

MAY_DEFER = object()
"""A value of ``_wrapped_async_rpc_function`` for functions of our own: a result that is no future is the answer itself."""
TOLD_WHO = object()
"""As ``MAY_DEFER``; besides, the callee puts the caller's number in front of the arguments. It takes the number from the link
by which the call came, not from the message, so it cannot be forged."""


NO_FUTURE = "Functions decorated with @rpc.async_function must return a torch.futures.Future object,"


def async_execution(function: F) -> F:
    """Mark a function that returns a ``torch.futures.Future``. A call of it by RPC is answered when that future completes, and
    no thread of the callee waits meanwhile. A plain call returns the future."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    if (scripted := getattr(function, "qualified_name", "")).startswith(_SCRIPT):  # it has the name of its class
        wrapper.__module__, _, wrapper.__qualname__ = scripted.removeprefix(_SCRIPT).rpartition(".")
    wrapper._wrapped_async_rpc_function = function  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]
