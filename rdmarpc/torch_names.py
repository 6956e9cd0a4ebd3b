"""Names that torch's modules of RPC have for their own use, or from C++, for programs that find this package there
(``tools/hook``): those of ``backend_registry`` (there is one backend here, which has TensorPipe's name too), ``constants``,
``options``, ``rref_proxy`` and ``nn.api.remote_module``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from . import constants as rpc_constants
from .api import _get_current_rpc_agent, init_rpc
from .nn import RemoteModule
from .options import BackendType, TensorPipeRpcBackendOptions
from .references.handle import RRef
from .transport import NotSupported

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]
backend_registry = sys.modules[__name__]
_DEFAULT_INIT_METHOD = rpc_constants.DEFAULT_INIT_METHOD
_DEFAULT_NUM_WORKER_THREADS = rpc_constants.DEFAULT_NUM_WORKER_THREADS
_DEFAULT_RPC_TIMEOUT_SEC = rpc_constants.DEFAULT_RPC_TIMEOUT_SEC
_UNSET_RPC_TIMEOUT = rpc_constants.UNSET_RPC_TIMEOUT
_RemoteModule = RemoteModule
_REMOTE_MODULE_PICKLED_ATTRIBUTES = ("on", "device", "is_device_map_set", "is_scriptable", "module_rref")
"""What travels of a handle. Torch also sends its ``generated_methods``, which are the class's here."""


def RRefProxy(rref: RRef[Any], rpc_api: Any, timeout: float = rpc_constants.UNSET_RPC_TIMEOUT) -> Any:
    """The proxy of a reference whose methods are called by ``rpc_sync``, ``rpc_async`` or ``remote``."""
    return getattr(rref, rpc_api.__name__)(timeout)


class BackendValue(NamedTuple):
    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


def backend_registered(backend_name: str) -> bool:
    return backend_name in BackendType.__members__


def register_backend(backend_name: str, *handlers: Callable[..., Any]) -> Any:
    """``RuntimeError`` for a name that is taken, else ``NotSupported``."""
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    raise NotSupported(f"RPC backend {backend_name}: rdmarpc is the only one", hint="run the program without rdmarpc")


def construct_rpc_backend_options(
    backend: BackendType,
    rpc_timeout: float = rpc_constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = rpc_constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def init_backend(
    backend: BackendType,
    store: Any = None,
    name: str = "",
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> Any:
    """``init_rpc``, which has a store of its own. Returns the agent."""
    init_rpc(name, backend, rank, world_size, rpc_backend_options)
    return _get_current_rpc_agent()
