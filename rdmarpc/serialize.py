"""Objects to bytes: pickle protocol 5 with the tensors taken out of band.

A dense tensor leaves the pickle as an index into the message's tensor list; what travels of it is described by ``tensors``.
Everything else (sparse and quantised tensors too) is ordinary pickle. Functions travel by reference.

References (``rref``) leave the pickle in the same way: their forks stand in a table before it, so that the receiver can take
them without unpickling anything.
"""

from __future__ import annotations

import io
import pickle
import struct
import threading
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Protocol

import torch

_PLAIN = frozenset((int, float, str, bytes, bool, type(None), complex, torch.dtype, torch.device, torch.Size))
_QUANTISED = frozenset((torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4))


class _Incoming(threading.local):
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.references: list[Any] = []


_incoming = _Incoming()


def _landed(index: int) -> torch.Tensor:
    return _incoming.tensors[index]


def _landed_parameter(index: int, requires_grad: bool) -> torch.nn.Parameter:
    return torch.nn.Parameter(_incoming.tensors[index].detach(), requires_grad)


def landed_reference(index: int) -> Any:
    """Number ``index`` of what ``loads`` was given as references. Only while unpickling."""
    return _incoming.references[index]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor], to: int | None) -> None:
        super().__init__(file, protocol=5)
        self._tensors = tensors
        self.to = to
        """Rank of the receiver; ``None`` where there is none: references cannot be pickled then."""
        self.enclosed: list[Enclosed] = []

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
        return NotImplemented if special is None else special(value, self)


class Enclosed(Protocol):
    """What a message carries in front of its pickle."""

    @property
    def entry(self) -> tuple[int, int, int]: ...

    def undo(self) -> None:
        """The message will not be sent."""


_reducers: dict[type, Callable[[Any, _Pickler], Any]] = {}


def register_reducer(kind: type, reduce: Callable[[Any, _Pickler], Any]) -> None:
    """Let objects of exactly this type travel by RPC, as ``reduce(value, pickler)`` says (see ``pickle``: ``__reduce__``).
    It may append to ``pickler.enclosed``."""
    _reducers[kind] = reduce


MARK = 0x52
"""First byte of a payload with a table of references; that of a pickle is 0x80."""
_TABLE = struct.Struct("<BI")
_ENTRY = struct.Struct("<HQQ")


def enclosed(payload: bytes) -> Iterator[tuple[int, int, int]]:
    """The entries of the table in front of a pickle, if there is one."""
    if not payload or payload[0] != MARK:
        return iter(())
    count = _TABLE.unpack_from(payload)[1]
    return _ENTRY.iter_unpack(memoryview(payload)[_TABLE.size : _TABLE.size + count * _ENTRY.size])


def travels(tensor: torch.Tensor) -> bool:
    """Whether a tensor goes out of band: dense, on the CPU, not quantised."""
    return tensor.layout is torch.strided and tensor.is_cpu and tensor.dtype not in _QUANTISED


def dumps(value: Any, to: int | None = None) -> tuple[bytes, list[torch.Tensor]]:
    """The pickle of ``value`` for worker ``to``, and the tensors it refers to. Raises what pickling raises.

    If the result is not sent, the references ``enclosed`` in it have to be taken back (``RRefContext.undo``)."""
    file = io.BytesIO()
    tensors: list[torch.Tensor] = []
    pickler = _Pickler(file, tensors, to)
    try:
        pickler.dump(value)
    except BaseException:
        for item in pickler.enclosed:
            item.undo()
        raise
    if not pickler.enclosed:
        return file.getvalue(), tensors
    table = b"".join(_ENTRY.pack(*item.entry) for item in pickler.enclosed)
    return _TABLE.pack(MARK, len(pickler.enclosed)) + table + file.getvalue(), tensors


def loads(payload: bytes, tensors: list[torch.Tensor], references: list[Any] | None = None) -> Any:
    """Inverse of ``dumps``; ``references`` are what the receiver made of the table. User code may run in here (constructors,
    ``__setstate__``), and may call RPC."""
    if references:
        payload = payload[_TABLE.size + len(references) * _ENTRY.size :]
    outer = _incoming.tensors, _incoming.references
    _incoming.tensors, _incoming.references = tensors, references or []
    try:
        return pickle.loads(payload)
    finally:
        _incoming.tensors, _incoming.references = outer


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
