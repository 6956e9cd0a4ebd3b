"""What users call: the functions of ``torch.distributed.rpc``, with its names, arguments and errors."""

from __future__ import annotations

from typing import Any

from . import agent as _agent
from . import debug
from .agent import Agent
from .future import Future
from .options import BackendType, RpcBackendOptions, WorkerInfo
from .rref import RRef


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Join the group as ``name``. Returns when all ``world_size`` workers have joined and can be called.

    Raises ``RuntimeError`` (already initialised, name not unique), ``AuthenticationError`` (another secret),
    ``TransferTimeout`` (somebody did not join within ``rpc_timeout``; the text names who), what torch's rendezvous raises.
    """
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if _agent._current is not None:
        raise RuntimeError("RPC is already initialized")
    WorkerInfo(name, 0)
    agent = Agent(name, rank, world_size, rpc_backend_options or RpcBackendOptions())
    _agent.set_current(agent)
    agent._ready.set()
    debug.listen_to_signal()


def is_available() -> bool:
    return True


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Leave the group. ``graceful``: first serve until every worker has come here and no call is under way anywhere, at most
    ``timeout`` seconds (0: no limit). Whatever it raises (``PeerLost``, ``TransferTimeout``), RPC is down here afterwards."""
    agent = _agent.current()
    try:
        agent.shutdown(graceful, timeout)
    finally:
        _agent.set_current(None)


def rpc_sync(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = -1.0) -> Any:
    """Call ``func(*args, **kwargs)`` on worker ``to`` (name, rank or ``WorkerInfo``) and return its result.

    ``timeout`` in seconds: -1 = the default, 0 = none. Raises the function's exception, ``PeerLost``, ``TransferTimeout``.
    Tensors arrive as copies that the callee owns; the caller leaves them unchanged until the call is done."""
    agent = _agent.current()
    return agent.call(agent.resolve(to), func, args, kwargs, timeout)


def rpc_async(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = -1.0) -> Future:
    """As ``rpc_sync``, but returns a ``torch.futures.Future`` at once. Errors of pickling are raised here, all others by
    the future. Tensors among the arguments are left unchanged until it is done."""
    agent = _agent.current()
    return agent.call_async(agent.resolve(to), func, args, kwargs, timeout)


def remote(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = -1.0) -> RRef[Any]:
    """Call ``func`` on worker ``to``, leave the result there, and return a reference to it at once."""
    agent = _agent.current()
    return agent.create(agent.resolve(to), func, args, kwargs, timeout)


def get_worker_info(worker_name: Any = None) -> WorkerInfo:
    """Who ``worker_name`` is; without a name, who we are."""
    agent = _agent.current()
    return agent.me if worker_name is None else agent.resolve(worker_name)


def get_rpc_timeout() -> float:
    """The default timeout of calls, in seconds."""
    return _agent.require(_NO_AGENT).rpc_timeout


def _set_rpc_timeout(seconds: float) -> None:
    _agent.require(_NO_AGENT).rpc_timeout = float(seconds)


_NO_AGENT = "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"
