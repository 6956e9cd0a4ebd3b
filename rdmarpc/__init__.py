"""rdmarpc: ``torch.distributed.rpc`` over one-sided copies into places chosen beforehand."""

from __future__ import annotations

from . import api, constants, functions, internal, transport
from .api import (
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
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
from .options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions, WorkerInfo
from .rref import RRef
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
    "TensorPipeRpcBackendOptions",
    "TransferTimeout",
    "WorkerInfo",
    "_get_current_rpc_agent",
    "_is_current_rpc_agent_set",
    "_set_rpc_timeout",
    "api",
    "constants",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "internal",
    "is_available",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "transport",
    "wrap",
]
