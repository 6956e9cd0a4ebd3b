"""What ``torch.profiler`` shows of calls.

On the calling side ``rpc_sync#module.function(worker0 -> worker1)``, and the same with ``rpc_async``, ``remote``, ``to_here``
and, for a message of our own, ``control``; on the called side ``rpc#module.function(worker0 -> worker1)`` around the user's
function. The event of a call with a future ends when that future completes.

torch profiles the thread that started the profiler, and with ``profile_all_threads`` every thread. Functions called by others
run in threads of the pool, so the called side needs the latter: ``profile(experimental_config=all_threads())``.

Whether any profiler runs in this process is one attribute of torch, ``torch.autograd.profiler._is_profiler_enabled`` (its C++
twin, ``torch.autograd._profiler_enabled()``, knows the thread-local one only). It is looked at once a call on each side, and
all that is here runs only if it is set.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.profiler import record_function

from .caller import REMOTE
from .link import CONTROL

if TYPE_CHECKING:
    from .agent import Agent
    from .future import Pending
    from .options import WorkerInfo


def all_threads() -> Any:
    """``torch.profiler.profile(experimental_config=all_threads())`` records the threads that run functions for others too."""
    return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


def name_of(function: Any) -> str:
    """``module.function``; of a callable object, its class."""
    named = function if hasattr(function, "__qualname__") else type(function)
    module = getattr(named, "__module__", None)
    return f"{module}.{named.__qualname__}" if module else str(named.__qualname__)


def kind_of(function: Any, flags: int, future: bool) -> str:
    """What a call is for its user; ``control``: a message of our own, but for the fetch of a reference's value."""
    if flags & CONTROL:
        return "to_here" if function.__name__ == "_fetch" else "control"
    if flags & REMOTE:
        return "remote"
    return "rpc_async" if future else "rpc_sync"


def call(agent: Agent, to: WorkerInfo, function: Any, args: Any, kwargs: Any, timeout: float, flags: int) -> Any:
    """``Agent.call`` inside its event."""
    with record_function(_text(kind_of(function, flags, False), function, agent.name, to.name)):
        return agent.caller.result(agent._start(to, function, args, kwargs, timeout, flags))


def start(
    agent: Agent, to: WorkerInfo, function: Any, args: Any, kwargs: Any, timeout: float, flags: int, *rest: Any
) -> Pending:
    """``Agent._start`` of a call with a future, in an event that ends with that future."""
    event = record_function(_text(kind_of(function, flags, True), function, agent.name, to.name))
    event.__enter__()
    try:
        pending = agent._start(to, function, args, kwargs, timeout, flags, *rest)
    except BaseException:
        event.__exit__(None, None, None)
        raise
    # Ending it ourselves would not do: the thread that completes the future need not be one that is profiled, and there
    # torch leaves the event open. This way it takes the profiler of this thread along.
    assert pending.future is not None
    event._call_end_callbacks_on_future(pending.future)
    return pending


def serving(function: Callable[..., Any], caller: str, me: str) -> Callable[..., Any]:
    """``function`` inside the event of the called side."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(_text("rpc", function, caller, me)):
            return function(*args, **kwargs)

    return run


def _text(kind: str, function: Any, source: str, target: str) -> str:
    return f"{kind}#{name_of(function)}({source} -> {target})"
