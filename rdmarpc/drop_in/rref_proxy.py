"""``torch.distributed.rpc.rref_proxy``."""

from __future__ import annotations

from typing import Any

from ..constants import UNSET_RPC_TIMEOUT
from ..references.handle import RRef


def RRefProxy(rref: RRef[Any], rpc_api: Any, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    """The proxy of a reference whose methods are called by ``rpc_sync``, ``rpc_async`` or ``remote``."""
    return getattr(rref, rpc_api.__name__)(timeout)
