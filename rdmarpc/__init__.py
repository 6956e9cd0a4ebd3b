"""rdmarpc: ``torch.distributed.rpc`` over one-sided copies into places chosen beforehand."""

from __future__ import annotations

from . import constants, functions, profiling, timeline, transport
from .api import (
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
from .debug import counters, debug_info, explain
from .options import BackendType, RpcBackendOptions, WorkerInfo
from .rref import RRef, _rref_context_get_debug_info
from .transport import (
    ArenaFull,
    AuthenticationError,
    NotSupported,
    PeerLost,
    RdmaError,
    RegistrationError,
    RemoteAccessError,
    TransferTimeout,
)
from .wrap import wrap

__all__ = [
    "ArenaFull",
    "AuthenticationError",
    "BackendType",
    "NotSupported",
    "PeerLost",
    "RRef",
    "RdmaError",
    "RegistrationError",
    "RemoteAccessError",
    "RpcBackendOptions",
    "TransferTimeout",
    "WorkerInfo",
    "_rref_context_get_debug_info",
    "_set_rpc_timeout",
    "constants",
    "counters",
    "debug_info",
    "explain",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "profiling",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "timeline",
    "transport",
    "wrap",
]
