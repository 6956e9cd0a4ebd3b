"""Objects to bytes: pickle protocol 5 with the tensors taken out of band.

A dense tensor leaves the pickle as an index into the message's tensor list; what travels of it is described by ``tensors``.
So do the dense parts of other tensors and storages (``reducers``), and large buffers of other objects that offer them
(``pickle.PickleBuffer``: arrays of numpy). Everything else is ordinary pickle. Functions travel by reference, unless
``use_cloudpickle`` was called.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import struct
import threading
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from . import reducers, unpicklable
from .layout import travels

_PLAIN = frozenset((int, float, str, bytes, bool, type(None), complex, torch.dtype, torch.device, torch.Size))
_BUFFER_BYTES = 4096
"""Buffers smaller than this stay in the pickle."""
_COUNT = struct.Struct("<I")  # after the pickle: how many of the tensors, the last ones, are buffers


class _Incoming(threading.local):
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []


_incoming = _Incoming()


def _landed(index: int) -> torch.Tensor:
    return _incoming.tensors[index]


Reducer = Callable[[Any], Any]
_reducers: dict[type, Reducer] = {
    torch.nn.Parameter: reducers.reduce_parameter,
    torch.UntypedStorage: reducers.reduce_storage,
    torch.storage.TypedStorage: reducers.reduce_typed_storage,
}


def register_reducer(kind: type, reduce: Reducer) -> None:
    """Let objects of exactly this type travel by RPC, as ``reduce`` says (see ``pickle``: ``__reduce__``)."""
    _reducers[kind] = reduce


class _Pickler(pickle.Pickler):
    """``reduce`` gives the tensors another way; ``buffers`` receives the large buffers of other objects."""

    def __init__(self, file: io.BytesIO, reduce: Callable[[Any], Any], buffers: list[torch.Tensor]) -> None:
        super().__init__(file, protocol=5, buffer_callback=partial(keep_in_band, buffers))
        self.reducer_override = reduce  # type: ignore[method-assign]  # looked up on the object: one Python call less for everything that is pickled


def _reduce(tensors: list[torch.Tensor], value: Any) -> Any:
    kind = type(value)
    if kind is torch.Tensor:
        if travels(value):
            tensors.append(value)
            return _landed, (len(tensors) - 1,)
        return reducers.reduce_tensor(value)
    special = _reducers.get(kind)
    if special is not None:
        return special(value)
    if isinstance(value, torch.Tensor):
        return reducers.reduce_subclass(value)
    if isinstance(value, torch._C.Future):
        raise RuntimeError("Can not pickle torch.futures.Future")
    return NotImplemented


def _fails(value: Any) -> bool:
    """Whether an object cannot be pickled. Without what else pickling does: objects of registered types are passed over."""

    def reduce(part: Any) -> Any:
        return (int, ()) if type(part) in _reducers else _reduce([], part)

    try:
        _pickler(io.BytesIO(), reduce, []).dump(value)
    except Exception:
        return True
    return False


def keep_in_band(buffers: list[torch.Tensor], buffer: pickle.PickleBuffer) -> bool:
    """Take a large buffer out of the pickle (``False``); see ``pickle.Pickler``: ``buffer_callback``."""
    view = buffer.raw()
    if view.nbytes < _BUFFER_BYTES:
        return True
    # By address: torch makes no tensor of read-only memory without a warning. It is only read from.
    memory = (ctypes.c_char * view.nbytes).from_address(_address(view))
    memory.owner = view  # type: ignore[attr-defined]
    buffers.append(torch.frombuffer(memory, dtype=torch.uint8))
    return False


def _address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def dumps(value: Any, names: tuple[str, ...] = ()) -> tuple[bytes, list[torch.Tensor]]:
    """The pickle of ``value`` and the tensors it refers to. Raises what pickling raises; its text says where in ``value``
    (``names``: what the members of a tuple are called there)."""
    file = io.BytesIO()
    tensors: list[torch.Tensor] = []
    buffers: list[torch.Tensor] = []
    try:
        _pickler(file, partial(_reduce, tensors), buffers).dump(value)
    except Exception as error:
        unpicklable.explain(error, value, names, _fails)
        raise
    file.write(_COUNT.pack(len(buffers)))
    return file.getvalue(), tensors + buffers if buffers else tensors


def loads(payload: bytes, tensors: list[torch.Tensor]) -> Any:
    """Inverse of ``dumps``. User code may run in here (constructors, ``__setstate__``), and may call RPC."""
    outer = _incoming.tensors
    _incoming.tensors = tensors
    (count,) = _COUNT.unpack_from(payload, len(payload) - _COUNT.size)
    try:
        if not count:
            return pickle.loads(payload)
        return pickle.loads(payload, buffers=[memoryview(tensor.numpy()) for tensor in tensors[len(tensors) - count :]])
    finally:
        _incoming.tensors = outer


_pickler: Callable[[io.BytesIO, Callable[[Any], Any], list[torch.Tensor]], pickle.Pickler] = _Pickler
_needed_by_value: Callable[[Any], bool] | None = None
"""Whether a function or class has to travel by value."""


def use_cloudpickle(wanted: bool) -> None:
    """Whether lambdas, local functions and what is defined in ``__main__`` travel by value from here on (one setting a
    process). ``ImportError`` if cloudpickle is not installed."""
    global _pickler, _needed_by_value
    if wanted:
        from . import by_value

        _pickler, _needed_by_value = by_value.Pickler, by_value.needed
    else:
        _pickler, _needed_by_value = _Pickler, None
    _references.clear()


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


ONE_TENSOR = pickle.dumps((_TENSOR,), 5)
"""``dump_flat_one`` of a tensor."""
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
    if _needed_by_value is not None and _needed_by_value(function):
        return None
    try:
        found = pickle.dumps(function, 5)
    except Exception as error:
        unpicklable.hint(error)
        raise
    _references[function] = found
    return found


def label(function: Any, args: tuple[Any, ...]) -> str:
    """What stands for a callable in the signature of a call where its reference does not, or would say too little: the name of
    its function, the same for all objects of a class. Two functions of one name only share landing places.

    A function that runs what one of its arguments names says so: ``function._names_callee`` is the index of that argument."""
    if (at := getattr(function, "_names_callee", None)) is not None:
        return f"{function.__qualname__}:{args[at]}"
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, MethodType):
        return f"{type(function.__self__).__qualname__}:{function.__func__.__qualname__}"
    return getattr(function, "__qualname__", None) or type(function).__qualname__
