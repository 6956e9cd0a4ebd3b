"""Calls as ``torch.profiler`` shows them.

On the calling side ``rpc_sync#module.function(worker0 -> worker1)``, and the same with ``rpc_async``, ``remote``, ``to_here``
and, for a message of our own, ``control``; on the called side ``rpc#module.function(worker0 -> worker1)`` around the user's
function. The event of a call with a future ends when that future completes.

torch profiles the thread that started the profiler, and with ``profile_all_threads`` every thread. Functions called by others
run in threads of the pool, so the called side needs the latter: ``profile(experimental_config=profiling.all_threads())``.

Whether any profiler runs in this process is one attribute of torch, ``torch.autograd.profiler._is_profiler_enabled`` (its C++
twin, ``torch.autograd._profiler_enabled()``, knows the thread-local one only). It is looked at once a call on each side, and
all that is here runs only if it is set.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.autograd.profiler import record_function

from ..links.frames import CONTROL, REMOTE
from ..links.ring import Link
from .pending import Pending


def name_of(function: Any, args: Any = ()) -> str:
    """The name of a function: ``module.function``; for a callable object, that of its class. A function that calls the method
    which its second argument names has ``_method_of``; its name is that and the method: ``rref.method``."""
    if len(args) > 1 and (owner := getattr(function, "_method_of", None)):
        return f"{owner}.{args[1]}"
    named = function if hasattr(function, "__qualname__") else type(function)
    module = getattr(named, "__module__", None)
    return f"{module}.{named.__qualname__}" if module else str(named.__qualname__)


def kind_of(function: Any, flags: int, future: bool) -> str:
    """The name of a call's kind, as its user knows it; ``control`` for a message of our own. If users ask for such a message,
    the function's ``_asked_by`` has the name."""
    if flags & CONTROL:
        return str(getattr(function, "_asked_by", "control"))
    if flags & REMOTE:
        return "remote"
    return "rpc_async" if future else "rpc_sync"


def sending(
    request: Callable[..., Pending], me: str, link: Link, function: Any, args: Any, kwargs: Any, limit: float, *more: Any
) -> Pending:
    """``Caller.request`` inside an event that ends with the call, or at the latest when it dies (nothing was sent)."""
    flags, future, *_ = more
    event = record_function(_text(kind_of(function, flags, future), function, args, me, link.name))
    event.__enter__()
    pending = request(link, function, args, kwargs, limit, *more)
    if pending.future is None:
        pending.event = event  # ended by ``Pending.result``
    else:
        # Ending it ourselves would not do: the thread that completes the future need not be one that is profiled, and there
        # torch leaves the event open. This way it takes the profiler of this thread along.
        event._call_end_callbacks_on_future(pending.future)
    return pending


def serving(function: Callable[..., Any], args: Any, caller: str, me: str) -> Callable[..., Any]:
    """A function that calls ``function`` inside the profiler's event of the called side."""
    text = _text("rpc", function, args, caller, me)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(text):
            return function(*args, **kwargs)

    return run


def _text(kind: str, function: Any, args: Any, source: str, target: str) -> str:
    return f"{kind}#{name_of(function, args)}({source} -> {target})"
