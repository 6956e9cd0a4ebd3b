"""Calls of a method of a referenced value: ``rref.rpc_sync().method(...)``.

The type of the value is asked for once. The method is looked up in it here, so that a missing one is an ``AttributeError`` of
the caller's, and that ``async_execution`` is seen; then the method of the value itself is called on its owner.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..functions import async_execution
from ..message import permits


class Proxy:
    """Each attribute is a method of the value. Kept and used as often as one likes, from any thread."""

    def __init__(self, form: Callable[[str, Any, Any], Any]) -> None:
        """``form(name, args, kwargs)`` calls the method of that name."""
        self._form = form

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(_invoke, self._form, name)


def _invoke(form: Callable[[str, Any, Any], Any], name: str, /, *args: Any, **kwargs: Any) -> Any:
    return form(name, args, kwargs)


def call_of(kind: type, name: str) -> Callable[..., Any]:
    """The function that the owner has to run for the method ``name`` of ``kind``. ``AttributeError`` if there is none. Methods
    of TorchScript are of the object, and not asynchronous: the owner looks them up."""
    if issubclass(kind, torch.jit.ScriptModule | torch._C.ScriptModule):
        return _run
    return _run_async if hasattr(getattr(kind, name), "_wrapped_async_rpc_function") else _run


# The functions that other workers call here.


def _run(rref: Any, name: str, args: Any, kwargs: Any) -> Any:
    return permits.method(rref.local_value(), name)(*args, **kwargs)


@async_execution
def _run_async(rref: Any, name: str, args: Any, kwargs: Any) -> Any:
    return permits.method(rref.local_value(), name)(*args, **kwargs)


# Each method has landing places of its own.
_run._names_callee = _run_async._names_callee = 1  # type: ignore[attr-defined]
_run._method_of = _run_async._method_of = "rref"  # type: ignore[attr-defined]
