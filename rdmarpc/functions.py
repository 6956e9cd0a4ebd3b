"""``torch.distributed.rpc.functions``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

MAY_DEFER = object()
"""For functions of our own, as ``_wrapped_async_rpc_function``: a result that is no future is the answer itself."""
TOLD_WHO = object()
"""As ``MAY_DEFER``; besides, the callee puts the number of the worker that calls in front of the arguments: who it is, is
known by the link that the call came by, and no word of the message says so."""


def async_execution(function: F) -> F:
    """Mark a function that returns a ``torch.futures.Future``: the reply is sent when that future completes, and no thread
    waits for it. A plain call returns the future."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    wrapper._wrapped_async_rpc_function = function  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]
