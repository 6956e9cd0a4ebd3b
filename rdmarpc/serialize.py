"""Objects to bytes: pickle protocol 5 with the tensors taken out of band.

A dense tensor leaves the pickle as an index into the message's tensor list; what travels of it is described by ``tensors``.
Everything else (sparse and quantised tensors too) is ordinary pickle. Functions travel by reference.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch

from . import device_maps

_PLAIN = frozenset((int, float, str, bytes, bool, type(None), complex, torch.dtype, torch.device, torch.Size))
_QUANTISED = frozenset((torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4))


class _Incoming(threading.local):
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []


_incoming = _Incoming()


def _landed(index: int) -> torch.Tensor:
    return _incoming.tensors[index]


def _landed_parameter(index: int, requires_grad: bool) -> torch.nn.Parameter:
    return torch.nn.Parameter(_incoming.tensors[index].detach(), requires_grad)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file, protocol=5)
        self._tensors = tensors

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.Tensor and travels(value):
            self._tensors.append(value)
            return _landed, (len(self._tensors) - 1,)
        if kind is torch.nn.Parameter and travels(value):
            self._tensors.append(value.data)
            return _landed_parameter, (len(self._tensors) - 1, value.requires_grad)
        if isinstance(value, torch._C.Future):
            raise RuntimeError("Can not pickle torch.futures.Future")
        special = _reducers.get(kind)
        return NotImplemented if special is None else special(value)


_reducers: dict[type, Callable[[Any], Any]] = {}


def register_reducer(kind: type, reduce: Callable[[Any], Any]) -> None:
    """Let objects of exactly this type travel by RPC, as ``reduce`` says (see ``pickle``: ``__reduce__``)."""
    _reducers[kind] = reduce


def travels(tensor: torch.Tensor) -> bool:
    """Whether a tensor goes out of band: dense, on the CPU, not quantised. Raises ``RuntimeError`` for one of a GPU."""
    if tensor.layout is torch.strided and tensor.is_cpu:
        return tensor.dtype not in _QUANTISED
    if tensor.is_cuda:
        raise RuntimeError(device_maps.NO_GPU)
    return False


def dumps(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """The pickle of ``value`` and the tensors it refers to. Raises what pickling raises."""
    file = io.BytesIO()
    tensors: list[torch.Tensor] = []
    _Pickler(file, tensors).dump(value)
    return file.getvalue(), tensors


def loads(payload: bytes, tensors: list[torch.Tensor]) -> Any:
    """Inverse of ``dumps``. User code may run in here (constructors, ``__setstate__``), and may call RPC."""
    outer = _incoming.tensors
    _incoming.tensors = tensors
    try:
        return pickle.loads(payload)
    finally:
        _incoming.tensors = outer


def flat(values: tuple[Any, ...]) -> list[torch.Tensor] | None:
    """The tensors of a tuple of plain values and tensors, or ``None`` if it needs the full pickler.

    Such tuples are the common case, and need no user code to be read back."""
    tensors: list[torch.Tensor] = []
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            if kind is str and value == _TENSOR:
                return None
            continue
        if kind is not torch.Tensor or not travels(value):
            return None
        tensors.append(value)
    return tensors


_TENSOR = "\0tensor"
_EMPTY = pickle.dumps((), 5)


def dump_flat(values: tuple[Any, ...]) -> bytes:
    """A tuple for which ``flat`` gave tensors: they are replaced by a mark."""
    if not values:
        return _EMPTY
    return pickle.dumps(tuple(_TENSOR if type(value) is torch.Tensor else value for value in values), 5)


def load_flat(payload: bytes, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    """Inverse of ``dump_flat``."""
    if payload == _EMPTY:
        return ()
    values = pickle.loads(payload)
    if not tensors:
        return values
    remaining = iter(tensors)
    return tuple(next(remaining) if value == _TENSOR and type(value) is str else value for value in values)


_NONE = pickle.dumps((None,), 5)


def dump_flat_one(value: Any) -> bytes:
    """``dump_flat`` of one value."""
    return _NONE if value is None else dump_flat((value,))


def load_flat_one(payload: bytes, tensors: list[torch.Tensor]) -> Any:
    """Inverse of ``dump_flat_one``."""
    return None if payload == _NONE else load_flat(payload, tensors)[0]


_references: dict[Any, bytes] = {}


def reference(function: Any) -> bytes | None:
    """The pickle of a function or class that travels by reference, or ``None`` for callables that carry state.

    Raises the pickling error of lambdas and local functions."""
    known = _references.get(function) if function.__hash__ else None
    if known is not None:
        return known
    kind = type(function)
    if kind is BuiltinFunctionType and not isinstance(function.__self__, ModuleType | None):
        return None
    if kind is not FunctionType and kind is not BuiltinFunctionType and not isinstance(function, type):
        return None
    found = pickle.dumps(function, 5)
    _references[function] = found
    return found
