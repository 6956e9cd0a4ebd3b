"""``torch.distributed.rpc.internal``: the pickler of calls, for programs that use it by themselves."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch

from .message.serialize import dumps, loads, register_reducer


class RPCExecMode(Enum):
    """The forms of a call."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A call as an object that can be serialized."""

    func: Any
    args: Any
    kwargs: Any


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """The pickle of ``obj`` without its tensors, and the list of these tensors (the objects themselves, no copies). References
    raise: they travel in messages only, or by ``RRef._serialize``."""
    return dumps(obj)


def deserialize(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    """The object that ``serialize`` took apart. ``tensor_table``: the tensors, in the order in which ``serialize`` returned
    them."""
    return loads(binary_data, tensor_table)


class RemoteException(NamedTuple):
    """A function's error, as torch's answers carry it. Ours carry the exception itself."""

    msg: str
    exception_type: type


class _InternalRPCPickler:
    """The pickler of calls, as an object that programs make classes of."""

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        """Have objects of a class travel as ``reducer(object)`` says, with every pickler."""
        register_reducer(obj_class, lambda value, message: reducer(value))

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        return serialize(obj)

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
        return deserialize(binary_data, tensor_table)


_internal_rpc_pickler = _InternalRPCPickler()


def _run_pickled(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    """Run at the callee what another pickler of the caller's took apart."""
    function, args, kwargs = deserialize(binary_data, tensor_table)
    return function(*(args or ()), **(kwargs or {}))


def _build_rpc_profiling_key(exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str) -> str:
    """The name of a call in torch's legacy profiler."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"
