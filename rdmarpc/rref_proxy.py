"""Calls of a method of a referenced value: ``rref.rpc_sync().method(...)``.

The type of the value is asked for once. The method is looked up in it here, so that a missing one is an ``AttributeError`` of
the caller's, and that ``async_execution`` is seen; then the method of the value itself is called on its owner.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from . import permits
from .functions import async_execution
from .futures import fail
from .grad_context import current
from .transport import bare

if TYPE_CHECKING:
    from .rref import RRef


class Proxy:
    """Each attribute is a method of the value. Kept and used as often as one likes, from any thread."""

    def __init__(self, rref: RRef[Any], form: Callable[..., Any], timeout: float) -> None:
        self._rref, self._form, self._timeout = rref, form, timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(_invoke, self._form, self._rref, name, self._timeout)


def _invoke(form: Callable[..., Any], rref: RRef[Any], name: str, timeout: float, *args: Any, **kwargs: Any) -> Any:
    return form(rref, name, timeout, args, kwargs)


def call(rref: RRef[Any], name: str, timeout: float, args: Any, kwargs: Any) -> Any:
    rref._check("call rpc_sync() on it")
    function = _function(rref._get_type(timeout), name)
    return rref._agent.call(rref.owner(), function, (rref, name, args, kwargs), None, timeout)


def create(rref: RRef[Any], name: str, timeout: float, args: Any, kwargs: Any) -> RRef[Any]:
    rref._check("call remote() on it")
    function = _function(rref._get_type(timeout), name)
    fork = rref._agent.create(rref.owner(), function, (rref, name, args, kwargs), None, timeout)
    return rref.over(rref._agent, fork)


def call_async(rref: RRef[Any], name: str, timeout: float, args: Any, kwargs: Any) -> torch.futures.Future[Any]:
    """Returns at once, and raises nothing: the type may still have to be asked for, and the value to be made. Whichever thread
    issues the call then, it is one of the autograd context, and of the grad mode, of this one."""
    result: torch.futures.Future[Any] = torch.futures.Future()
    context, recorded = current.context, torch.is_grad_enabled()

    def issue(found: torch.futures.Future[type]) -> None:
        before, current.context = current.context, context
        try:
            function = _function(found.value(), name)
            with torch.set_grad_enabled(recorded):
                future = rref._agent.call_async(rref.owner(), function, (rref, name, args, kwargs), None, timeout)
        except Exception as error:
            fail(result, bare(error))
            return
        finally:
            current.context = before
        future.add_done_callback(finish)

    def finish(future: torch.futures.Future[Any]) -> None:
        try:
            result.set_result(future.value())
        except Exception as error:
            fail(result, bare(error))

    try:
        rref._check("call rpc_async() on it")
        rref._get_type(timeout, blocking=False).add_done_callback(issue)
    except Exception as error:
        fail(result, bare(error))
    return result


def _function(kind: type, name: str) -> Callable[..., Any]:
    """What the owner has to run for ``kind``'s method ``name``. ``AttributeError`` if there is none."""
    return _run_async if hasattr(getattr(kind, name), "_wrapped_async_rpc_function") else _run


# What other workers call here.


def _run(rref: RRef[Any], name: str, args: Any, kwargs: Any) -> Any:
    return permits.method(rref.local_value(), name)(*args, **kwargs)


@async_execution
def _run_async(rref: RRef[Any], name: str, args: Any, kwargs: Any) -> Any:
    return permits.method(rref.local_value(), name)(*args, **kwargs)


# Each method has landing places of its own.
_run._names_callee = _run_async._names_callee = 1  # type: ignore[attr-defined]
_run._method_of = _run_async._method_of = "rref"  # type: ignore[attr-defined]
