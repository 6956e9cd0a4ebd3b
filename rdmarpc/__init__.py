"""The API of ``torch.distributed.rpc``, over one-sided RDMA or shared-memory copies into destinations that are allocated
beforehand.

``init_rpc`` joins a group of workers. ``rpc_sync``, ``rpc_async`` and ``remote`` call functions there, ``wrap`` distributes one
model over workers, ``serve`` keeps a model's parameters at servers. The submodules ``autograd``, ``optim``, ``nn``,
``functions`` and ``internal`` stand in for those of torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import api, autograd, constants, functions, internal, nn, optim, profiling, timeline, transport
from .api import (
    _get_current_rpc_agent,
    _get_debug_info,
    _is_current_rpc_agent_set,
    _rref_context_get_debug_info,
    _set_rpc_timeout,
    get_rpc_timeout,
    get_worker_info,
    init_rpc,
    is_available,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from .ground.worker_info import WorkerInfo
from .message.permits import NotAllowed
from .observe.debug import counters, debug_info, explain
from .options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions
from .references.handle import RRef
from .transport import (
    ArenaFull,
    AuthenticationError,
    NotSupported,
    PeerLost,
    RdmaError,
    RegistrationError,
    RemoteAccessError,
    TlsOptions,
    TransferTimeout,
)

if TYPE_CHECKING:
    from .served.model import serve
    from .wrapped.balance import auto_placement
    from .wrapped.checkpoint import load_checkpoint, save_checkpoint
    from .wrapped.model import wrap

__all__ = [
    "ArenaFull",
    "AuthenticationError",
    "BackendType",
    "NotAllowed",
    "NotSupported",
    "PeerLost",
    "RRef",
    "RdmaError",
    "RegistrationError",
    "RemoteAccessError",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "TlsOptions",
    "TransferTimeout",
    "WorkerInfo",
    "_get_current_rpc_agent",
    "_get_debug_info",
    "_is_current_rpc_agent_set",
    "_rref_context_get_debug_info",
    "_set_rpc_timeout",
    "api",
    "auto_placement",
    "autograd",
    "constants",
    "counters",
    "debug_info",
    "explain",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "internal",
    "is_available",
    "load_checkpoint",
    "nn",
    "optim",
    "profiling",
    "remote",
    "rpc_async",
    "rpc_sync",
    "save_checkpoint",
    "serve",
    "shutdown",
    "timeline",
    "transport",
    "wrap",
]


_LATE = {
    "auto_placement": ".wrapped.balance",
    "load_checkpoint": ".wrapped.checkpoint",
    "save_checkpoint": ".wrapped.checkpoint",
    "serve": ".served.model",
    "wrap": ".wrapped.model",
}


def __getattr__(name: str) -> Any:
    # Wrapping and serving models needs all of ``graph``; a program that only calls need not wait for it.
    home = _LATE.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(home, __name__), name)
    return found
