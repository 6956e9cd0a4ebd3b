"""The functions of ``torch.distributed.rpc``, with its names, arguments and errors."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from numbers import Integral
from types import ModuleType
from typing import Any

import torch

from . import autograd, internal, timeline
from .base import here
from .base.here import WorkerInfo
from .calls import agent as _agent
from .calls.agent import Agent
from .calls.pending import Future
from .constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from .internal import PythonUDF as PythonUDF
from .internal import _internal_rpc_pickler
from .links import losses
from .options import BackendType, RpcBackendOptions
from .references.handle import RRef, over
from .tools import debug
from .transport import PeerLost, RdmaError, have_standard_streams, hint_for, need_descriptors, timeouts

_DESCRIPTORS = 32
"""The file descriptors that a worker of a small group needs: for its store, its device, and one or two connections."""


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Join the group as worker ``name``. Returns when all ``world_size`` workers have joined and can be called. Without
    ``world_size`` the group is dynamic: workers may join and leave later.

    Raises ``RuntimeError`` (RPC is initialised already, or the name is not unique), ``AuthenticationError`` (another worker has
    another secret), ``NotSupported`` (no device, or not what ``require`` wants), ``RdmaError`` (this process may open too few
    files), ``TransferTimeout`` (a worker did not join within ``rpc_timeout``; the text names it), and the errors of torch's
    rendezvous.
    """
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    for value, kind in ((name, str), (rank, Integral), (world_size, Integral | None)):
        if not isinstance(value, kind):
            raise RuntimeError(f"Argument {value!r} must be of type {kind} but got type {type(value)}")
    if not _joining.acquire(blocking=False):
        raise RuntimeError("RPC is already initialized, by another thread at this moment")
    try:
        if _agent.found() is not None:
            raise RuntimeError("RPC is already initialized")
        agent = _joined(name, int(rank), world_size, rpc_backend_options or RpcBackendOptions())
        here.set_current(agent)
    finally:
        _joining.release()
    agent.ready.set()
    debug.listen_to_signal()
    losses.when_a_child_ends(partial(_say_goodbye, weakref.ref(agent)), agent)


_joining = threading.Lock()
os.register_at_fork(after_in_child=_joining._at_fork_reinit)  # type: ignore[attr-defined]


def _joined(name: str, rank: int, world_size: int | None, options: RpcBackendOptions) -> Agent:
    WorkerInfo(name, 0)
    options.validate()
    try:
        have_standard_streams()
        need_descriptors(_DESCRIPTORS)
        with contextlib.ExitStack() as undo:
            agent = Agent(name, rank, world_size, options, undo)
            agent.timeline, agent.get_debug_info = timeline.for_run(agent), debug.debug_info
            undo.pop_all()
        return agent
    except (OSError, RuntimeError, ImportError) as error:
        if not (hint := hint_for(error)):
            raise
        # What the error's frames hold (the store, the device) would live as long as the error.
        traceback.clear_frames(error.__traceback__)
        raise RdmaError(f"init_rpc failed for want of what the system gives: {error}", hint=hint) from error


def end_with_the_interpreter() -> None:
    """Close the agent of a program that ends without ``shutdown``: a thread of ours that is inside torch when the interpreter
    ends would abort the process. It takes a bounded time, as ``shutdown(graceful=False)`` does."""
    if (agent := _agent.found()) is not None:
        here.set_current(None)
        agent.say_goodbye()
        agent.close()


def _say_goodbye(agent: weakref.ref[Agent]) -> None:
    """If an exception ends this process. Otherwise it may still shut down, in a callback of ``atexit``."""
    if (found := agent()) is not None and found is _agent.found() and losses.own_end()[0]:
        found.say_goodbye()


def is_available() -> bool:
    return True


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Leave the group.

    ``graceful``: first serve calls until every worker has called ``shutdown`` and no call is under way anywhere, for at most
    ``timeout`` seconds (0: no limit). Raises ``PeerLost``, ``TransferTimeout``; RPC is shut down here in any case. A worker
    that was interrupted (Ctrl-C) is not waited for. That is logged as a warning and raises nothing. While another thread does
    this, it is waited for; a signal handler in the midst of it returns at once. Raises ``NotSupported`` in functions and
    callbacks, which would be waited for.
    """
    timeout = timeouts.limit(timeout, "the timeout of shutdown")
    agent = _agent.current()
    if graceful and not agent.termination.begin(timeout):
        return
    try:
        agent.shutdown(graceful, timeout)
    except PeerLost as error:
        if error.status != "INTERRUPTED":
            raise
        logging.getLogger("rdmarpc").warning("shutdown did not wait for everybody: %s", error.message)
    finally:
        here.set_current(None)


def rpc_sync(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = -1.0) -> Any:
    """Call ``func(*args, **kwargs)`` on worker ``to`` (name, rank or ``WorkerInfo``) and return its result.

    ``timeout`` in seconds: -1 = the default (``rpc_timeout``), 0 = none. Raises the function's exception, ``PeerLost``,
    ``TransferTimeout``. Tensors arrive as copies that the callee owns. The caller leaves its tensors unchanged until the call
    is done. Any thread.
    """
    agent = _agent.current()
    if internal.current is not _internal_rpc_pickler:
        func, args, kwargs = internal.taken_apart(func, args, kwargs)
    return agent.start(agent.resolve(to), func, args, kwargs, timeout).result()


def rpc_async(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = -1.0) -> Future:
    """As ``rpc_sync``, but returns a ``torch.futures.Future`` at once. Errors of pickling are raised here, all others by the
    future. The caller leaves tensors among the arguments unchanged until the future is done."""
    agent = _agent.current()
    if internal.current is not _internal_rpc_pickler:
        func, args, kwargs = internal.taken_apart(func, args, kwargs)
    future = agent.call_async(agent.resolve(to), func, args, kwargs, timeout)
    if "future_list" in _thread_local_var.__dict__:  # ten times as quick as an attribute that is not there
        _thread_local_var.future_list.append(future)
    return future


def remote(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = -1.0) -> RRef[Any]:
    """Call ``func(*args, **kwargs)`` on worker ``to``, leave the result there, and return a reference to it at once. The
    reference's ``to_here`` raises the function's exception."""
    agent = _agent.current()
    if internal.current is not _internal_rpc_pickler:
        func, args, kwargs = internal.taken_apart(func, args, kwargs)
    return over(agent, agent.create(agent.resolve(to), func, args, kwargs, timeout))


def get_worker_info(worker_name: Any = None) -> WorkerInfo:
    """The name and id of worker ``worker_name`` (or its rank); without one, of this worker. Raises ``RuntimeError`` for an
    unknown one, ``TypeError`` for what is neither, as a ``WorkerInfo``."""
    return _agent.current().get_worker_info(worker_name)


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Collect the futures of every ``rpc_async`` of this thread, and wait for them at the end of the block."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        collected = _thread_local_var.future_list
        del _thread_local_var.future_list
        torch.futures.wait_all(collected)


_thread_local_var = threading.local()


# -- meetings of workers by RPC: everybody's object to everybody, and barriers

# The first worker by name leads. The others bring it their objects; when the last has come, it hands all of them out. A meeting
# is known by its members and by how often these have met before, so every member has to call in the same order.

_Key = tuple[tuple[str, ...], int]


class AllGatherStates:
    """One meeting, with the names that torch's class has."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()


_held: weakref.WeakKeyDictionary[Any, dict[_Key, AllGatherStates]] = weakref.WeakKeyDictionary()
"""The meetings of each agent that are not over."""
_met: weakref.WeakKeyDictionary[Any, Counter[tuple[str, ...]]] = weakref.WeakKeyDictionary()
_gathering = threading.Lock()


def _meeting(agent: Any, key: _Key) -> AllGatherStates:
    """The meeting of a key. The first that needs it makes it: a member here, or the news of another one."""
    with _gathering:
        return _held.setdefault(agent, {}).setdefault(key, AllGatherStates())


def _all_gather(value: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    """``{name: value}`` of all workers, or of ``worker_names`` if there are any: each has to call. ``timeout`` in seconds
    limits the wait for the others and each message; unset: only messages, by the default; 0: nothing. Raises
    ``RuntimeError``."""
    agent = here.current()
    names = tuple(sorted(set(worker_names or ()) or set(agent.worker_names())))
    unset = timeout == UNSET_RPC_TIMEOUT
    limit = agent.rpc_timeout if unset else timeouts.limit(timeout, "the timeout of _all_gather")
    with _gathering:
        met = _met.setdefault(agent, Counter())
        met[names] += 1
        key = names, met[names]
    meeting, leader = _meeting(agent, key), names[0]
    try:
        if agent.name == leader:
            _bring(key, agent.name, value)
        else:
            agent.call(agent.resolve(leader), *internal.taken_apart(_bring, (key, agent.name, value), None), limit)
        if not meeting.proceed_signal.wait(None if unset or not limit else limit):
            missing = sorted(set(names) - set(meeting.gathered_objects))
            raise RuntimeError(f"{agent.name} timed out in _all_gather after {limit:.2f} seconds: no sign of {missing}")
        if agent.name == leader:
            _hand_out_all(agent, key, meeting, limit)
        return meeting.gathered_objects
    finally:
        with _gathering:
            _held[agent].pop(key, None)


def _hand_out_all(agent: Any, key: _Key, meeting: AllGatherStates, limit: float) -> None:
    call = internal.taken_apart(_hand_out, (key, meeting.gathered_objects), None)
    sent = {name: agent.call_async(agent.resolve(name), *call, limit) for name in key[0][1:]}
    errors: dict[str, Exception] = {}
    for name, future in sent.items():
        try:
            future.wait()
        except Exception as error:
            errors[name] = error
    if errors:
        first = next(iter(errors.values()))
        why = f"Followers {list(errors)} timed out in _all_gather after {limit:.2f} seconds. The first exception is {first}"
        raise RuntimeError(why) from first


def _barrier(worker_names: Iterable[str]) -> None:
    """Wait until all of ``worker_names`` (we are one of them; empty: all workers) have come here."""
    _all_gather(None, worker_names)


def _bring(key: _Key, name: str, value: Any) -> None:
    meeting = _meeting(here.current(), key)
    with _gathering:
        meeting.gathered_objects[name] = value
        complete = len(meeting.gathered_objects) == len(key[0])
    if complete:
        meeting.proceed_signal.set()


def _hand_out(key: _Key, objects: dict[str, Any]) -> None:
    meeting = _meeting(here.current(), key)
    meeting.gathered_objects = objects
    meeting.proceed_signal.set()


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Return when every worker has come here. ``timeout`` in seconds, 0: none."""
    _all_gather(None, timeout=timeout)


# -- what is known here


def _is_current_rpc_agent_set() -> bool:
    return _agent.found() is not None


def _get_current_rpc_agent() -> Agent:
    return _agent.current(here.NO_AGENT)


def _rref_context_get_debug_info() -> dict[str, int]:
    """``num_owner_rrefs``, ``num_forks``: values of this worker that others (or ``remote``) refer to, and their references;
    ``num_pending_users``, ``num_pending_children``: references here, and passed on from here, not confirmed yet;
    ``num_pending_futures``: values whose creation has not been answered."""
    agent = _agent.current()
    creations = sum(pending.rref is not None for pending in list(agent.caller.pending.values()))
    return agent.rrefs.debug_info() | {"num_pending_futures": creations}


def _get_debug_info() -> dict[str, int]:
    """The debug information of references, calls and autograd, in one dictionary."""
    _get_current_rpc_agent()
    return {**_rref_context_get_debug_info(), **debug.debug_info(), **autograd._get_debug_info()}


def get_rpc_timeout() -> float:
    """The default timeout of calls, in seconds."""
    return _agent.current(here.NO_AGENT).rpc_timeout


def _set_rpc_timeout(seconds: float) -> None:
    _agent.current(here.NO_AGENT).rpc_timeout = timeouts.limit(seconds, "rpc_timeout")


# Names that libraries written for torch take from it.

PyRRef = RRef
RpcAgent = TensorPipeAgent = Agent


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """In the block, calls of this process are taken apart by ``rpc_pickler.serialize`` (torch's hook; all threads). The bytes
    that it makes are put together by pickle at the callee, whatever they are."""
    internal.current = rpc_pickler
    try:
        yield
    finally:
        internal.current = _internal_rpc_pickler


def _require_initialized(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func``, which raises ``RuntimeError`` outside of a group."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _agent.current()
        return func(*args, **kwargs)

    return wrapper


def _delete_all_user_and_unforked_owner_rrefs(timeout: float = 0) -> None:
    """Tell owners of the references that this process has dropped. Those it still holds go with ``shutdown``."""
    _agent.current().rrefs.collect()


def enable_gil_profiling(flag: bool) -> None:
    """Taken, and without effect: waits for the interpreter's lock are not measured here. A warning says so."""
    if flag:
        logging.getLogger("rdmarpc").warning("enable_gil_profiling: rdmarpc does not measure waits for the GIL")


class _Module(ModuleType):
    @property
    def _default_pickler(self) -> Any:
        return internal.current

    @_default_pickler.setter
    def _default_pickler(self, pickler: Any) -> None:
        internal.current = pickler


sys.modules[__name__].__class__ = _Module
