"""The API of ``torch.distributed.rpc``, over one-sided RDMA or shared-memory copies into destinations that are allocated
beforehand.

``init_rpc`` joins a group of workers. ``rpc_sync``, ``rpc_async`` and ``remote`` call functions there, ``wrap`` distributes one
model over workers, ``serve`` keeps a model's parameters at servers. The submodules ``autograd``, ``optim``, ``nn``,
``functions`` and ``internal`` stand in for those of torch; ``transfers`` reads what was saved about what crosses.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import sys
from typing import TYPE_CHECKING, Any

from .collectives.register import register as _register_backend

_HOMES = {
    "api": "_get_current_rpc_agent _get_debug_info _is_current_rpc_agent_set _rref_context_get_debug_info _set_rpc_timeout"
    " get_rpc_timeout get_worker_info init_rpc is_available remote rpc_async rpc_sync shutdown"
    " AllGatherStates PyRRef RpcAgent TensorPipeAgent",
    "base.here": "WorkerInfo",
    "message.permits": "NotAllowed",
    "tools.debug": "counters debug_info explain",
    "options": "BackendType RpcBackendOptions TensorPipeRpcBackendOptions",
    "places.balance": "auto_placement",
    "places.checkpoint": "load_checkpoint save_checkpoint",
    "places.devices": "device",
    "places.graphed": "graphed",
    "places.recording": "recording",
    "places.tensor": "RemoteTensor",
    "places.wrap": "wrap",
    "references.handle": "RRef",
    "servers.model": "serve",
    "torch_names": "backend_registry",
    "tools.hook": "install",
    "transport": "ArenaFull AuthenticationError NotSupported PeerLost RdmaError RegistrationError RemoteAccessError TlsOptions"
    " TransferTimeout",
    **dict.fromkeys(("autograd", "constants", "functions", "internal", "nn", "optim", "profiling", "timeline"), ""),
}
"""Modules, and the names that are theirs. A module is a name itself."""
_LATE = ("places.", "servers.")
"""A program that only calls need not wait for what wraps and serves models."""

_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
_HOME |= {home: home for home in _HOMES if "." not in home}
_OF_TORCH = {"AllGatherStates", "PyRRef", "RpcAgent", "TensorPipeAgent", "backend_registry", "options", "torch_names"}
"""Programs written for torch take these from its module."""
__all__ = sorted(_HOME.keys() - _OF_TORCH)

if TYPE_CHECKING:
    from . import api as api
    from . import autograd as autograd
    from . import constants as constants
    from . import functions as functions
    from . import internal as internal
    from . import nn as nn
    from . import optim as optim
    from . import profiling as profiling
    from . import timeline as timeline
    from . import transport as transport
    from .api import get_rpc_timeout as get_rpc_timeout
    from .api import get_worker_info as get_worker_info
    from .api import init_rpc as init_rpc
    from .api import is_available as is_available
    from .api import remote as remote
    from .api import rpc_async as rpc_async
    from .api import rpc_sync as rpc_sync
    from .api import shutdown as shutdown
    from .base.here import WorkerInfo as WorkerInfo
    from .message.permits import NotAllowed as NotAllowed
    from .options import BackendType as BackendType
    from .options import RpcBackendOptions as RpcBackendOptions
    from .options import TensorPipeRpcBackendOptions as TensorPipeRpcBackendOptions
    from .places.balance import auto_placement as auto_placement
    from .places.checkpoint import load_checkpoint as load_checkpoint
    from .places.checkpoint import save_checkpoint as save_checkpoint
    from .places.devices import device as device
    from .places.graphed import graphed as graphed
    from .places.recording import recording as recording
    from .places.tensor import RemoteTensor as RemoteTensor
    from .places.wrap import wrap as wrap
    from .references.handle import RRef as RRef
    from .servers.model import serve as serve
    from .tools.debug import counters as counters
    from .tools.debug import debug_info as debug_info
    from .tools.debug import explain as explain
    from .tools.hook import install as install
    from .transport import ArenaFull as ArenaFull
    from .transport import AuthenticationError as AuthenticationError
    from .transport import NotSupported as NotSupported
    from .transport import PeerLost as PeerLost
    from .transport import RdmaError as RdmaError
    from .transport import RegistrationError as RegistrationError
    from .transport import RemoteAccessError as RemoteAccessError
    from .transport import TlsOptions as TlsOptions
    from .transport import TransferTimeout as TransferTimeout


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{home}", __name__)
    found = globals()[name] = module if home == name else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


@atexit.register  # the first to come is the last to run: programs shut down in callbacks of their own
def _end() -> None:
    if (api := sys.modules.get("rdmarpc.api")) is not None:
        api.end_with_the_interpreter()


if "torch" in sys.modules:
    # A program: what makes calls is there before it forks. Not so for the ``rdmarpc`` command, and for Pythons that only may
    # come to use RPC (``tools/hook``): they come here before torch, and do not wait for it.
    _collects = gc.isenabled()
    gc.disable()  # one collection walks all objects that torch has made, which takes as long as our imports
    try:
        for _name in _HOME:
            if not _HOME[_name].startswith(_LATE):
                __getattr__(_name)
    finally:
        if _collects and not gc.get_freeze_count():
            gc.freeze()  # with the next line: what has been made is old now, so the next collection does not walk it
            gc.unfreeze()
        if _collects:
            gc.enable()
_register_backend()
