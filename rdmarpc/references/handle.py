"""Remote references: a value that stays on its owner, and handles to it that travel. ``context`` has the protocol."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from ..base import here
from ..base.futures import Awaitable, fail, mapped, settle
from ..base.here import WorkerInfo
from ..functions import MAY_DEFER, async_execution
from ..gradients import waves
from ..gradients.behind import Fetched
from ..gradients.context import current as current_context
from ..gradients.waves import check_types, referenced_scalar, scalars
from ..internal import run_called, taken_apart
from ..links.frames import CONTROL
from ..message import errors, permits, serialize
from ..message.incoming import landed_reference
from ..transport import PeerLost, TransferTimeout, bare, fresh
from .forks import Created, Fork
from .store import id_text

T = TypeVar("T")
_HINT = "type_hint should only be specified when the RRef being created contains a ScriptModule."
_NO_HINT = "The RRef being created contains a ScriptModule, must provide its ModuleInterface type hint."
_EXPIRED = "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node does not exist."


class _Proxy:
    """``rref.rpc_sync()``: each attribute is a method of the value. Kept and used as often as one likes, from any thread."""

    def __init__(self, form: Callable[[str, Any, Any], Any]) -> None:
        """``form(name, args, kwargs)`` calls the method of that name."""
        self._form = form

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._form(name, args, kwargs)


class RRef(Generic[T]):
    """``RRef(value)`` makes a reference to a value of this worker; ``rpc.remote`` makes one to a value elsewhere.

    Thread-safe. The value lives as long as a handle to it does, on any worker. Handles travel by RPC only. Equality is
    identity. ``type_hint`` is for TorchScript's modules, which need one: their interface. It says nothing here.
    """

    __slots__ = ("__weakref__", "_agent", "_asked", "_fork", "_type")
    _agent: Any
    _asked: torch.futures.Future[type] | None
    _fork: Fork
    _type: type | None

    def __init__(self, value: T, type_hint: Any = None) -> None:
        agent = here.current(here.NO_AGENT)
        if isinstance(value, torch.jit.ScriptModule) == (type_hint is None):
            raise RuntimeError(_NO_HINT if type_hint is None else _HINT)
        if agent.garbage:
            agent.rrefs.collect()
        self._agent, self._fork = agent, agent.rrefs.own(value)
        self._asked = self._type = None

    # -- who and what

    def owner(self) -> WorkerInfo:
        """The worker that holds the value. If it has left the group meanwhile, its last known ``WorkerInfo``. Raises
        ``PeerLost`` if it had left before this worker learned anything of it."""
        return self._agent.group.worker(self._fork.owner)

    def owner_name(self) -> str:
        return self.owner().name

    def is_owner(self) -> bool:
        return self._fork.owner == self._agent.number

    def confirmed_by_owner(self) -> bool:
        """Whether the owner has confirmed this reference. Always true on the owner, and for arguments of a running call."""
        fork = self._fork
        creation = fork.creation
        return fork.confirmed or (creation is not None and creation.done and not creation.expired and not creation.refused)

    def __repr__(self) -> str:
        fork = self._fork
        if self.is_owner():
            return f"OwnerRRef({id_text(fork.rref)})"
        return f"UserRRef(RRefId = {id_text(fork.rref)}, ForkId = {id_text(fork.number)})"

    # -- the value

    def to_here(self, timeout: float = -1.0) -> T:
        """The value: on the owner the object itself, elsewhere a copy that is fetched now. Waits until the value exists, for at
        most ``timeout`` seconds (-1 = the default, 0 = no limit). Raises the exception of the function that
        was to make the value, ``TransferTimeout``, ``PeerLost``, and ``RuntimeError`` if the call of ``remote`` was given
        up.

        A tensor that requires grad is part of the autograd context of this thread. Without one it is a leaf, and backward
        passes of torch over it also run at the owner, from the value into ``.grad``."""
        check(self, "call to_here() on it")
        if self.is_owner():
            limit = self._agent.limit(timeout)
            if not self._agent.rrefs.future(self._fork.rref).comes(limit or None):
                raise TransferTimeout(f"RPCErr:1:nobody has made the value of {self} within {limit:g} s", peer=self._agent.name)
            return self.local_value()
        pending = ask(self, _fetch, (self._fork.rref,), None, timeout, CONTROL)
        if pending.link is None:
            check(self, "call to_here() on it")  # that the owner has left may just have been found out
        value = pending.result()
        if self._fork.creation is not None:
            self._fork.confirmed = True  # the owner has made it
        if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf and torch.is_grad_enabled():
            Fetched(value, self._fork.rref, self, _bring)
        return value

    def local_value(self) -> T:
        """The value itself, on its owner. Waits until the value exists; raises the error of its creation. ``RuntimeError``
        elsewhere."""
        fork = self._fork
        if not self.is_owner():
            text = f"UserRRef(rref_id={id_text(fork.rref)}, fork_id={id_text(fork.number)})"
            raise RuntimeError(f"For {text}, can't call localValue() on user {self._agent.me}. Call it on owner {self.owner()}")
        check(self, "call local_value() on it")
        return self._agent.rrefs.future(fork.rref).wait()

    # -- calls on the value

    def rpc_sync(self, timeout: float = -1.0) -> Any:
        """A proxy: ``rref.rpc_sync().method(...)`` calls the value's method on the owner and returns its result. ``timeout`` in
        seconds limits the call, and the first time also the request for the value's type."""
        return _Proxy(partial(self._call, timeout))

    def rpc_async(self, timeout: float = -1.0) -> Any:
        """As ``rpc_sync``, but calls return a future at once, which raises all errors."""
        return _Proxy(partial(self._call_async, timeout))

    def remote(self, timeout: float = -1.0) -> Any:
        """As ``rpc_sync``; calls return an ``RRef`` to the result."""
        return _Proxy(partial(self._create, timeout))

    def _call(self, timeout: float, name: str, args: Any, kwargs: Any) -> Any:
        check(self, "call rpc_sync() on it")
        function = _call_of(self._get_type(timeout), name)
        return self._agent.call(self.owner(), *taken_apart(function, (self, name, args, kwargs), None), timeout)

    def _create(self, timeout: float, name: str, args: Any, kwargs: Any) -> RRef[Any]:
        check(self, "call remote() on it")
        call = taken_apart(_call_of(self._get_type(timeout), name), (self, name, args, kwargs), None)
        return over(self._agent, self._agent.create(self.owner(), *call, timeout))

    def _call_async(self, timeout: float, name: str, args: Any, kwargs: Any) -> torch.futures.Future[Any]:
        """Returns at once, and raises nothing. The arguments are taken now, whatever is known of the value."""
        try:
            check(self, "call rpc_async() on it")
            call = taken_apart(_run_made, (self, name, args, kwargs, self._agent.limit(timeout)), None)
            return self._agent.call_async(self.owner(), *call, timeout)
        except Exception as error:
            fail(result := Awaitable(), bare(error))
            return result

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run the backward pass of the value, a scalar, on its owner: in the autograd context with that id; or, without one
        (-1, only on the owner), as ``torch.autograd.backward`` does, into ``.grad``. Raises as ``autograd.backward`` does."""
        if not self.is_owner():
            if dist_autograd_ctx_id == -1:
                raise RuntimeError("User RRefs require 'dist_autograd_ctx_id' to be specified")
            check(self, "call backward() on it")
            args = (self._fork.rref, dist_autograd_ctx_id, retain_graph)
            packed = ask(self, _backward, args, flags=CONTROL).result()
            if packed:
                raise errors.load_located(packed)
            return
        value = referenced_scalar(self.local_value())
        if dist_autograd_ctx_id == -1:
            torch.autograd.backward([value], retain_graph=retain_graph)
        else:
            check_types(dist_autograd_ctx_id, [value])
            context = self._agent.contexts.find(dist_autograd_ctx_id)
            waves.backward(self._agent, context, scalars([value]), retain_graph)

    def _get_future(self) -> torch.futures.Future[Any]:
        """The future of the value's creation. It completes with ``None`` once the owner has made the value or failed to, and
        fails if the call is given up or lost."""
        creation = self._fork.creation
        if isinstance(creation, Created):
            future = Awaitable()
            future.set_result(None)
            return future
        if creation is None or creation.future is None:
            raise RuntimeError(f"{self} was not made by remote(): it has no future of its creation")
        creation.future.has_callbacks = True  # users' code may depend on its completion from now on
        return creation.future

    def _get_type(self, timeout: float = -1.0, blocking: bool = True) -> Any:
        """The type of the value, asked for once; ``blocking=False``: a future of it. Raises as ``to_here`` does."""
        if blocking:
            if self._type is None:
                self._type = self._ask_type(timeout, future=False).result()
            return self._type
        asked = self._asked
        if asked is not None:
            return asked
        if self._type is None:
            asked = self._asked = self._ask_type(timeout, future=True).future
            assert asked is not None
            asked.add_done_callback(self._learn)
        else:
            asked = self._asked = torch.futures.Future()
            asked.set_result(self._type)
        return asked

    def _ask_type(self, timeout: float, *, future: bool) -> here.Call:
        check(self, "call _get_type() on it")
        # A call as users make them: a proxy's call may follow, and shutdown must not come in between.
        pending = ask(self, _type_of, (self._fork.rref,), None, timeout, future=future)
        if pending.link is None:
            check(self, "call _get_type() on it")
        return pending

    def _learn(self, asked: torch.futures.Future[type]) -> None:
        try:
            self._type = asked.value()
        except Exception:
            self._asked = None  # the callers that asked have the error; the next call asks again

    # -- travelling

    def _serialize(self) -> tuple[int, int, int, int]:
        """Numbers of which ``_deserialize`` on another worker makes a handle, once. Until then the value is kept."""
        check(self, "call fork an UserRRef")
        return *self._agent.rrefs.forks.fork(self._fork, None), self._agent.number

    @classmethod
    def _deserialize(cls, data: tuple[int, int, int, int]) -> RRef[Any]:
        agent = here.current()
        return over(agent, agent.rrefs.claim(*data))

    def __reduce__(self) -> Any:
        raise RuntimeError("Can not pickle rref in python pickler, rref can only be pickled when using RPC")


def _call_of(kind: type, name: str) -> Callable[..., Any]:
    """The function that the owner has to run for the method ``name`` of ``kind``, looked up here, so that a missing one
    is an ``AttributeError`` of the caller's, and that ``async_execution`` is seen. Methods of TorchScript are of the object,
    and not asynchronous: the owner looks them up."""
    if issubclass(kind, torch.jit.ScriptModule | torch._C.ScriptModule):
        return _run
    return _run_async if hasattr(getattr(kind, name), "_wrapped_async_rpc_function") else _run


# For other parts of this package: they are no part of what users may do with a handle.


def over(agent: Any, fork: Fork) -> RRef[Any]:
    """The handle of a fork."""
    handle: RRef[Any] = RRef.__new__(RRef)
    handle._agent, handle._fork = agent, fork
    handle._asked = handle._type = None
    return handle


def fork_of(handle: RRef[Any]) -> Fork:
    """The fork that a handle keeps alive."""
    return handle._fork


def check(handle: RRef[Any], what: str) -> None:
    """Raise if a handle cannot be used any more. ``what`` names the intended use, for the error."""
    fork = handle._fork
    if handle._agent.rrefs.closed:
        raise RuntimeError(f"{handle} has been deleted. Cannot {what} after deletion. RPC was shut down.")
    error = fork.error or handle._agent.rrefs.forks.lost_owners.get(fork.owner)
    if error is not None:
        raise fresh(error)
    creation = fork.creation
    if creation is None or creation.future is None or not creation.future.done():
        return
    try:
        creation.future.value()
    except PeerLost:
        raise
    except Exception as error:
        raise RuntimeError(_EXPIRED) from error


def ask(
    handle: RRef[Any], function: Any, args: Any, kwargs: Any = None, timeout: float = -1.0, flags: int = 0, future: bool = False
) -> here.Call:
    """Start a call to the owner whose arguments have the number of the reference among them, and no fork of it. Ours is kept
    until the answer, however late: a fetch of a value that the owner may have dropped would wait for ever."""
    pending = handle._agent.start(handle.owner(), function, args, kwargs, timeout, flags, future)
    pending.keep = (pending.keep, handle._fork)
    return pending


class _Child:
    """A fork in a message that is being pickled."""

    __slots__ = ("_agent", "_to", "entry")

    def __init__(self, handle: RRef[Any], to: int) -> None:
        self._agent, self._to = handle._agent, to
        self.entry = self._agent.rrefs.forks.fork(handle._fork, to)

    def undo(self) -> None:
        self._agent.rrefs.forks.undo(self._to, [self.entry])


def _reduce(handle: RRef[Any], pickler: Any) -> Any:
    check(handle, "call fork an UserRRef")
    if pickler.to is None:
        return handle.__reduce__()
    pickler.enclosed.append(_Child(handle, pickler.to))
    return _receive, (len(pickler.enclosed) - 1,)


def _receive(index: int) -> RRef[Any]:
    return over(here.current(), landed_reference(index))


serialize.register_reducer(RRef, _reduce)


# What other workers call here.


def _run(rref: Any, name: str, args: Any, kwargs: Any) -> Any:
    return permits.method(rref.local_value(), name)(*args, **kwargs)


@async_execution
def _run_async(rref: Any, name: str, args: Any, kwargs: Any) -> Any:
    return permits.method(rref.local_value(), name)(*args, **kwargs)


def _run_made(rref: Any, name: str, args: Any, kwargs: Any, limit: float) -> Any:
    """``_run`` or ``_run_async``. If the value is still to be made, this worker calls itself then, unless the caller has given
    up by then (``limit``: seconds; 0: never): no thread waits. That call is one of the autograd context of this one."""
    agent, until = here.current(), time.monotonic() + (limit or threading.TIMEOUT_MAX)
    value = agent.rrefs.future(fork_of(rref).rref)
    if value.done():
        return run_called(_call_of(type(value.value()), name), (rref, name, args, kwargs), {})
    result, context = Awaitable(), current_context.context

    def issue(made: torch.futures.Future[Any]) -> None:
        before, current_context.context = current_context.context, context
        try:
            if time.monotonic() > until:
                raise TransferTimeout("its caller has given it up")
            call = taken_apart(_call_of(type(made.value()), name), (rref, name, args, kwargs), None)
            agent.call_async(rref.owner(), *call, 0).add_done_callback(lambda future: settle(result, future.value))
        except Exception as error:
            fail(result, bare(error))
        finally:
            current_context.context = before

    value.add_done_callback(issue)
    return result


_run_made._wrapped_async_rpc_function = MAY_DEFER  # type: ignore[attr-defined]
# Each method has landing places of its own.
_run._names_callee = _run_async._names_callee = _run_made._names_callee = 1  # type: ignore[attr-defined]
_run._method_of = _run_async._method_of = _run_made._method_of = "rref"  # type: ignore[attr-defined]


def _fetch(rref: int) -> Any:
    return here.current().rrefs.found(rref)


_fetch._wrapped_async_rpc_function = MAY_DEFER  # type: ignore[attr-defined]
_fetch._carries_context = True  # type: ignore[attr-defined]
_fetch._asked_by = "to_here"  # type: ignore[attr-defined]


def _backward(rref: int, context_id: int, retain_graph: bool) -> torch.futures.Future[bytes | None]:
    """Run the backward pass of a value here. The future's value is ``None`` or the packed error."""
    agent = here.current()
    done: torch.futures.Future[bytes | None] = torch.futures.Future()
    value = agent.rrefs.future(rref)

    def run() -> None:
        torch.get_num_threads()  # until a thread asks, it has OpenMP's own idea of that, by which sums differ
        try:
            root = referenced_scalar(value.value())
            # Not before: it is the call that made the value which may have brought the context.
            context = agent.contexts.find(context_id)
        except Exception as error:
            fail(done, bare(error))
            return
        try:
            waves.backward(agent, context, [root], retain_graph)
            packed = None
        except Exception as error:
            packed = errors.dump_located(error)
        done.set_result(packed)

    def begin(_: torch.futures.Future[Any]) -> None:
        # Not by the pool: it waits for answers, which on other workers may wait for the same.
        try:
            threading.Thread(target=run, name="rdmarpc-backward", daemon=True).start()
        except RuntimeError as error:  # no more threads
            fail(done, bare(error))

    value.add_done_callback(begin)
    return done


_backward._wrapped_async_rpc_function = MAY_DEFER  # type: ignore[attr-defined]


def _bring(handles: list[RRef[Any]], retain_graph: bool, gradients: list[torch.Tensor]) -> None:
    """Have the owners of fetched values run backward from them, all at once. Raises the first error when all have ended."""
    by_owner: dict[int, list[int]] = {}
    for at, handle in enumerate(handles):
        check(handle, "run a backward pass over it")
        by_owner.setdefault(handle._fork.owner, []).append(at)
    pending = []
    for places in by_owner.values():
        numbers = tuple([handles[at]._fork.rref for at in places])
        pending.append(ask(handles[places[0]], _accumulate, (numbers, retain_graph, *[gradients[at] for at in places])))
    errors = []
    for call in pending:
        try:
            call.result()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _accumulate(rrefs: tuple[int, ...], retain_graph: bool, *gradients: torch.Tensor) -> None:
    """A backward pass from values here into ``.grad``."""
    values = [here.current().rrefs.future(rref).wait() for rref in rrefs]
    torch.autograd.backward(values, list(gradients), retain_graph=retain_graph)


@async_execution
def _type_of(rref: int) -> torch.futures.Future[type]:
    return mapped(here.current().rrefs.future(rref), lambda value: value.__class__)  # a wrapped model tells its own
