"""The API of ``torch.distributed.rpc``, over one-sided RDMA or shared-memory copies into destinations that are allocated
beforehand.

``init_rpc`` joins a group of workers. ``rpc_sync``, ``rpc_async`` and ``remote`` call functions there, ``wrap`` distributes one
model over workers, ``serve`` keeps a model's parameters at servers. The submodules ``autograd``, ``optim``, ``nn``,
``functions`` and ``internal`` stand in for those of torch.
"""

from __future__ import annotations

import gc
import importlib
import sys
from typing import TYPE_CHECKING, Any

from .collectives.register import register as _register_backend

_HOMES = {
    "api": (
        "_get_current_rpc_agent",
        "_get_debug_info",
        "_is_current_rpc_agent_set",
        "_rref_context_get_debug_info",
        "_set_rpc_timeout",
        "get_rpc_timeout",
        "get_worker_info",
        "init_rpc",
        "is_available",
        "remote",
        "rpc_async",
        "rpc_sync",
        "shutdown",
    ),
    "base.worker_info": ("WorkerInfo",),
    "message.permits": ("NotAllowed",),
    "tools.debug": ("counters", "debug_info", "explain"),
    "options": ("BackendType", "RpcBackendOptions", "TensorPipeRpcBackendOptions"),
    "places.balance": ("auto_placement",),
    "places.checkpoint": ("load_checkpoint", "save_checkpoint"),
    "places.devices": ("device",),
    "places.graphed": ("graphed",),
    "places.recording": ("recording",),
    "places.tensor": ("RemoteTensor",),
    "places.wrap": ("wrap",),
    "references.handle": ("RRef",),
    "servers.model": ("serve",),
    "tools.hook": ("install",),
    "transport": (
        "ArenaFull",
        "AuthenticationError",
        "NotSupported",
        "PeerLost",
        "RdmaError",
        "RegistrationError",
        "RemoteAccessError",
        "TlsOptions",
        "TransferTimeout",
    ),
    **dict.fromkeys(("autograd", "constants", "functions", "internal", "nn", "optim", "profiling", "timeline"), ()),
}
"""Modules, and the names that are theirs. A module is a name itself."""
_LATE = (
    "servers.model",
    "places.balance",
    "places.checkpoint",
    "places.devices",
    "places.graphed",
    "places.recording",
    "places.tensor",
    "places.wrap",
)
"""A program that only calls need not wait for what wraps and serves models."""

if TYPE_CHECKING:
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
    from .base.worker_info import WorkerInfo
    from .message.permits import NotAllowed
    from .options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions
    from .places.balance import auto_placement
    from .places.checkpoint import load_checkpoint, save_checkpoint
    from .places.devices import device
    from .places.graphed import graphed
    from .places.recording import recording
    from .places.tensor import RemoteTensor
    from .places.wrap import wrap
    from .references.handle import RRef
    from .servers.model import serve
    from .tools.debug import counters, debug_info, explain
    from .tools.hook import install
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
    "RemoteTensor",
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
    "device",
    "explain",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "graphed",
    "init_rpc",
    "install",
    "internal",
    "is_available",
    "load_checkpoint",
    "nn",
    "optim",
    "profiling",
    "recording",
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


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{home}", __name__)
    found = globals()[name] = module if home == name else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


_HOME = {name: home for home, names in _HOMES.items() for name in names} | {home: home for home in _HOMES if "." not in home}
if "torch" in sys.modules:
    # A program: what makes calls is there before it forks. Not so for the ``rdmarpc`` command, and for Pythons that only may
    # come to use RPC (``tools/hook``): they come here before torch, and do not wait for it.
    _collects = gc.isenabled()
    gc.disable()  # one collection walks all objects that torch has made, which takes as long as our imports
    try:
        for _name in _HOME:
            if _HOME[_name] not in _LATE:
                __getattr__(_name)
    finally:
        if _collects:
            gc.enable()
_register_backend()
