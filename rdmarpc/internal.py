"""``torch.distributed.rpc.internal``: the pickler of calls, for programs that use it by themselves."""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
import threading
from collections.abc import Callable
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

import torch

from .functions import MAY_DEFER, NO_FUTURE
from .message.serialize import NO_TAIL, complete, dumps, loads, register_reducer


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
    """The object that ``serialize`` took apart, or any other pickle. ``tensor_table``: the tensors, in the order in which they
    were returned."""
    before = vars(_thread_local_tensor_tables).get("recv_tables")
    _thread_local_tensor_tables.recv_tables = tensor_table
    try:
        return loads(binary_data if complete(binary_data) else binary_data + NO_TAIL, tensor_table)
    finally:
        _thread_local_tensor_tables.recv_tables = before


_thread_local_tensor_tables = threading.local()
"""``send_tables``, ``recv_tables``: the tensors of what a program's own pickler takes apart, and of what is put together."""


_OURS = f"{__package__}."


class _Dispatch(dict[Any, Callable[[Any], Any]]):
    """How classes travel, as ``pickle.Pickler.dispatch_table`` has it. What a program adds holds for all picklers."""

    def __setitem__(self, kind: Any, reducer: Callable[[Any], Any]) -> None:
        if kind is not torch.Tensor and not kind.__module__.startswith(_OURS):
            register_reducer(kind, lambda value, message: reducer(value))
        super().__setitem__(kind, reducer)


def _received(tensor_index: int) -> torch.Tensor:
    return _thread_local_tensor_tables.recv_tables[tensor_index]


def _received_reference(kind: Any, data: Any) -> Any:
    return kind._deserialize(data)


class _InternalRPCPickler:
    """The pickler of calls, as an object that programs make classes of. What its methods whose names begin with ``_`` give is
    for their ``serialize``."""

    def __init__(self) -> None:
        self._dispatch_table = _Dispatch(copyreg.dispatch_table)
        self._dispatch_table[torch.Tensor] = self._tensor_reducer
        self._class_reducer_dict = _Dispatch()

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        """Have objects of a class travel as ``reducer(object)`` says, with every pickler. The first one of a class counts."""
        if obj_class not in self._class_reducer_dict:
            self._class_reducer_dict[obj_class] = reducer

    _tensor_receiver = staticmethod(_received)

    def _tensor_reducer(self, tensor: torch.Tensor) -> Any:
        _thread_local_tensor_tables.send_tables.append(tensor)
        return _received, (len(_thread_local_tensor_tables.send_tables) - 1,)

    def _py_rref_reducer(self, py_rref: Any) -> Any:
        return _received_reference, (type(py_rref), py_rref._serialize())

    _rref_reducer = _py_rref_reducer

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """As the function does; by a plain pickler, where a program has set a ``_dispatch_table`` of its own."""
        if isinstance(self._dispatch_table, _Dispatch):
            return serialize(obj)
        before = vars(_thread_local_tensor_tables).get("send_tables")
        _thread_local_tensor_tables.send_tables = tensors = []
        pickler = pickle.Pickler(file := io.BytesIO())
        pickler.dispatch_table = {**self._dispatch_table, **self._class_reducer_dict}
        try:
            pickler.dump(obj)
        finally:
            _thread_local_tensor_tables.send_tables = before
        return file.getvalue(), tensors

    deserialize = staticmethod(deserialize)


_internal_rpc_pickler = _InternalRPCPickler()
current: Any = _internal_rpc_pickler
"""The pickler of calls of this process (``api._use_rpc_pickler``)."""


def taken_apart(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The call that has to be made in place of this one: the same, unless a program has a pickler of its own. Then it is one
    that carries what that pickler made of it. As in torch, operators and TorchScript go without."""
    if current is _internal_rpc_pickler or isinstance(func, torch.jit.ScriptFunction):
        return func, args, kwargs
    if not callable(func):
        raise TypeError("function should be callable.")
    if torch.jit._builtins._find_builtin(func) is not None:
        return func, args, kwargs
    data, tensors = current.serialize(PythonUDF(func, args or (), kwargs or {}))
    return _run_pickled, (data, tensors), None


def _run_pickled(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    """Run at the callee what another pickler of the caller's took apart."""
    return run_called(*deserialize(binary_data, tensor_table))


def run_called(function: Any, args: Any, kwargs: Any) -> Any:
    """The result of a function that was called by another worker: a future of one that is ``async_execution`` alone."""
    result = function(*args, **kwargs)
    inner, is_future = getattr(function, "_wrapped_async_rpc_function", None), isinstance(result, torch._C.Future)
    if is_future and inner is None:
        raise RuntimeError("Can not pickle torch.futures.Future")
    if not is_future and inner not in (None, MAY_DEFER):
        raise RuntimeError(f"{NO_FUTURE} but got {type(result)}")
    return result


_run_pickled._wrapped_async_rpc_function = MAY_DEFER  # type: ignore[attr-defined]


def _build_rpc_profiling_key(exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str) -> str:
    """The name of a call in torch's legacy profiler."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"


_FIXED = ("_pickler", "_unpickler", "_run_function", "_handle_exception", "serialize", "deserialize")


class _Module(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED:
            raise AttributeError(
                f"internal.{name} cannot be replaced: rdmarpc has a pickler of its own. For functions by value there is "
                "RpcBackendOptions(pickler='cloudpickle'), for one class _internal_rpc_pickler._register_reducer, for all of a "
                "call api._use_rpc_pickler"
            )
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Module
