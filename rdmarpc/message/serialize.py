"""Objects to bytes: pickle protocol 5 with the tensors taken out of band.

A dense tensor leaves the pickle as an index into the message's tensor list; what travels of it is described by ``tensors``.
So do the dense parts of other tensors and storages (``reducers``), and large buffers of other objects that offer them
(``pickle.PickleBuffer``: arrays of numpy), copied where the program may change them before they have been read. Everything
else is ordinary pickle. Functions travel by reference, unless ``use_cloudpickle`` was called.

References (``rdmarpc/references``) leave the pickle in the same way: their forks stand in a table before it, so that the
receiver can take them without unpickling anything.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import struct
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from ..base.recursion import ROOM
from . import device_maps, errors, gpu, permits, reducers
from .incoming import Came, beside, in_parts, landed
from .layout import travels

_PLAIN = frozenset((int, float, str, bytes, bool, type(None), complex, torch.dtype, torch.device, torch.Size))
_BUFFER_BYTES = 32 << 10
"""Buffers smaller than this stay in the pickle."""
_TAIL = struct.Struct("<II")
"""The end: bytes of what ``gpu`` put in front of it, and how many tensors, the last ones, are buffers."""

Reduce = Callable[[Any], Any]
InBand = Callable[[pickle.PickleBuffer], bool]


class Message:
    """The tensors, buffers and references of a message that is being pickled. ``to``: the receiver's number; ``None`` if there
    is no receiver: references, and tensors on GPUs, cannot be pickled then. ``reply``: whether it is an answer."""

    def __init__(self, to: int | None, reply: bool = False) -> None:
        self.to = to
        self.parcel: gpu.Parcel | None = None
        self.reply = reply
        self.tensors: list[torch.Tensor] = []
        self.buffers: list[torch.Tensor] = []
        self.enclosed: list[Any] = []
        """The references (``handle._Child``) that it carries in front of its pickle: what stands there of each (``entry``), and
        ``undo()`` for a message that will not be sent."""
        self.parts: list[torch.Tensor] = []
        """Tensors that require grad and are not among ``tensors``, in the order in which they are pickled; and others that the
        receiver finds at its own only as long as they are kept here."""

    def reduce(self, value: Any) -> Any:
        """See ``pickle.Pickler.reducer_override``."""
        kind = type(value)
        if kind is torch.Tensor:
            if travels(value):
                self.tensors.append(value)
                return landed, (len(self.tensors) - 1,)
            if gpu.current is not None and gpu.current.takes(value):
                return self.in_parts(value, self._from_gpu(gpu.current, value))
            return self.in_parts(value, reducers.reduce_tensor(value))
        special = _reducers.get(kind)
        if special is not None:
            return special(value, self)
        if kind is np.ndarray:
            return reducers.reduce_array(value)
        if isinstance(value, torch.Tensor):
            reduced = reducers.reduce_subclass(value)
            if reduced is NotImplemented and value.requires_grad:
                reduced = reducers.own_way(value)
            return self.in_parts(value, reduced)
        if isinstance(value, torch._C.Future):
            raise RuntimeError("Can not pickle torch.futures.Future")
        if isinstance(value, type):
            return reducers.reduce_class(value)
        if reducers.is_cupy(kind):
            return reducers.reduce_cupy(value)
        return NotImplemented

    def _from_gpu(self, gpus: gpu.Gpus, value: torch.Tensor) -> Any:
        if self.parcel is None:
            if self.to is None:
                raise RuntimeError(device_maps.NO_WAY.format(device=value.device, why="nobody is named who gets it"))
            self.parcel = gpu.Parcel(self.to, self.reply)
        return gpus.reduce(value, self.parcel)

    def in_parts(self, value: torch.Tensor, reduced: Any) -> Any:
        """``reduced`` for a tensor that is taken apart; noted, if gradients are to find it."""
        if reduced is NotImplemented or not value.requires_grad:
            return reduced
        self.parts.append(value)
        return in_parts, reduced


_reducers: dict[type, Callable[[Any, Message], Any]] = {
    torch.nn.Parameter: reducers.reduce_parameter,
    torch.UntypedStorage: reducers.reduce_storage,
    torch.storage.TypedStorage: reducers.reduce_typed_storage,
    torch.jit.ScriptFunction: reducers.reduce_function,
    torch.jit.RecursiveScriptModule: reducers.reduce_module,
    torch._C.ScriptModule: reducers.reduce_native_module,
}


def register_reducer(kind: type, reduce: Callable[[Any, Message], Any]) -> None:
    """Let objects of exactly this type travel by RPC, as ``reduce(value, message)`` says (see ``pickle``: ``__reduce__``).
    It may append to ``message.enclosed``."""
    _reducers[kind] = reduce


class _Pickler(pickle.Pickler):
    """``reduce`` gives the tensors another way; ``in_band`` says whether a buffer of another object stays in the pickle."""

    def __init__(self, file: io.BytesIO, reduce: Reduce, in_band: InBand) -> None:
        super().__init__(file, protocol=5, buffer_callback=in_band)
        # Looked up on the object: one Python call less for everything that is pickled.
        self.reducer_override = reduce  # type: ignore[method-assign]


def _fails(value: Any) -> bool:
    """Whether an object cannot be pickled. Without what else pickling does: objects of registered types are passed over."""
    message = Message(None)

    def reduce(part: Any) -> Any:
        return (int, ()) if type(part) in _reducers else message.reduce(part)

    try:
        _pickler(io.BytesIO(), reduce, partial(_in_band, [], False)).dump(value)
    except Exception:
        return True
    return False


def _in_band(buffers: list[torch.Tensor], copied: bool, buffer: pickle.PickleBuffer) -> bool:
    """Take a large buffer, or a copy, out of the pickle (``False``); see ``pickle.Pickler``: ``buffer_callback``."""
    view = buffer.raw()
    if view.nbytes < _BUFFER_BYTES:
        return True
    memory: Any = bytearray(view) if copied else None
    if memory is None:  # by address: torch makes no tensor of read-only memory without a warning; it is only read from
        memory = (ctypes.c_char * view.nbytes).from_address(np.frombuffer(view, np.uint8).ctypes.data)
        memory.owner = view
    buffers.append(torch.frombuffer(memory, dtype=torch.uint8))
    return False


MARK = 0x52
"""First byte of a payload with a table of references; that of a pickle is 0x80."""
_TABLE = struct.Struct("<BI")
_ENTRY = struct.Struct("<IQQ")


def enclosed(payload: bytes) -> Iterator[tuple[int, int, int]]:
    """The entries of the table in front of a pickle, if there is one."""
    if not payload or payload[0] != MARK:
        return iter(())
    count = _TABLE.unpack_from(payload)[1]
    return _ENTRY.iter_unpack(memoryview(payload)[_TABLE.size : _TABLE.size + count * _ENTRY.size])


def dumps(
    value: Any,
    to: int | None = None,
    names: tuple[str, ...] = (),
    parts: list[torch.Tensor] | None = None,
    *,
    reply: bool = False,
    waits: bool = False,
) -> tuple[bytes, list[torch.Tensor]]:
    """The pickle of ``value`` for worker ``to``, and the tensors it refers to. Raises what pickling raises; its text says where
    in ``value`` (``names``: what the members of a tuple are called there). ``parts`` gets the tensors that travel in parts and
    require grad, or have to be kept until there is an answer. ``reply``: it is an answer, for which other device maps count.
    ``waits``: the program goes on only when all has been read, so large buffers are not copied.

    If the result is not sent, the references ``enclosed`` in it have to be taken back (``RRefContext.undo``), and the GPU
    memory that it lends (``undo``)."""
    isinstance(None, ROOM)
    file = io.BytesIO()
    message = Message(to, reply)
    lent = b""
    try:
        _pickler(file, message.reduce, partial(_in_band, message.buffers, not waits)).dump(value)
        if message.parcel is not None and message.parcel.tensors:
            assert gpu.current is not None
            lent = gpu.current.pack(message.parcel)
            file.write(lent)
    except BaseException as error:
        for item in message.enclosed:
            item.undo()
        if isinstance(error, Exception):
            _explain(error, value, names)
        raise
    if parts is not None:
        parts += message.parts
    buffers, tensors = message.buffers, message.tensors
    file.write(_TAIL.pack(len(lent), len(buffers)))
    payload, tensors = file.getvalue(), tensors + buffers if buffers else tensors
    if not message.enclosed:
        return payload, tensors
    table = b"".join(_ENTRY.pack(*item.entry) for item in message.enclosed)
    return _TABLE.pack(MARK, len(message.enclosed)) + table + payload, tensors


def loads(
    payload: bytes,
    tensors: list[torch.Tensor],
    references: list[Any] | None = None,
    parts: list[torch.Tensor] | None = None,
    arrived: list[reducers.Arrived] | None = None,
) -> Any:
    """Inverse of ``dumps``; ``references`` are what the receiver made of the table, ``parts`` as there; ``arrived`` gets the
    arrays of cupy. User code may run in here (constructors, ``__setstate__``), and may call RPC."""
    if references:
        payload = payload[_TABLE.size + len(references) * _ENTRY.size :]
    lent, count = _TAIL.unpack_from(payload, len(payload) - _TAIL.size)
    on_gpu = gpu.present().unpack(payload[-_TAIL.size - lent : -_TAIL.size]) if lent else []
    outer, beside.now = beside.now, Came(tensors, references or [], [] if parts is None else parts, on_gpu, arrived)
    try:
        if not count:
            return permits.loads(payload)
        return permits.loads(payload, buffers=[memoryview(tensor.numpy()) for tensor in tensors[len(tensors) - count :]])
    finally:
        beside.now = outer


NO_TAIL = _TAIL.pack(0, 0)


def complete(payload: bytes) -> bool:
    """Whether ``dumps`` for no receiver made this, rather than some other pickler, whose end has nothing of ours. A pickle
    ends with a dot, and a number of buffers does not."""
    return payload[-1:] == b"\0" and payload[-_TAIL.size - 1 : -4] == b"." + NO_TAIL[:4]


def lends(payload: bytes) -> bool:
    """Whether GPU memory is lent by what ``dumps`` made."""
    return _TAIL.unpack_from(payload, len(payload) - _TAIL.size)[0] > 0


def undo(to: int, payload: bytes) -> None:
    """Take back the GPU memory that is lent by what ``dumps`` made and was not sent."""
    lent, _ = _TAIL.unpack_from(payload, len(payload) - _TAIL.size)
    if lent and gpu.current is not None:
        gpu.current.undo(to, payload[-_TAIL.size - lent : -_TAIL.size])


_pickler: Callable[[io.BytesIO, Reduce, InBand], pickle.Pickler] = _Pickler
_needed_by_value: Callable[[Any], bool] | None = None
"""Whether a function or class has to travel by value."""


@cache
def _by_value() -> type[pickle.Pickler]:
    import cloudpickle  # it need not be installed

    class Pickler(cloudpickle.Pickler):
        """Asks ``reduce`` first, and leaves the rest to cloudpickle."""

        def __init__(self, file: io.BytesIO, reduce: Reduce, in_band: InBand) -> None:
            super().__init__(file, protocol=5, buffer_callback=in_band)
            self._reduce = reduce

        def reducer_override(self, value: Any) -> Any:
            found = self._reduce(value)
            return super().reducer_override(value) if found is NotImplemented else found

    return Pickler


def _found_nowhere(function: Any) -> bool:
    """Whether a function or class cannot be found by its name in another process: defined in ``__main__`` or on the spot."""
    return function.__module__ == "__main__" or "<" in function.__qualname__


def use_cloudpickle(wanted: bool) -> None:
    """Whether lambdas, local functions and what is defined in ``__main__`` travel by value from here on (one setting a
    process). ``ImportError`` if cloudpickle is not installed."""
    global _pickler, _needed_by_value
    _pickler, _needed_by_value = (_by_value(), _found_nowhere) if wanted else (_Pickler, None)
    _references.clear()


def flat(values: tuple[Any, ...]) -> list[torch.Tensor] | None:
    """The tensors of a tuple of plain values and tensors, or ``None`` if it needs the full pickler.

    Such tuples are the common case, and need no user code to be read back."""
    tensors: list[torch.Tensor] = []
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            if kind is str and value[:1] == "\0":  # as our marks begin
                return None
            continue
        if kind is not torch.Tensor or not travels(value):
            return None
        tensors.append(value)
    return tensors


_TENSOR, _TUPLE = "\0tensor", "\0tuple"
_EMPTY = pickle.dumps((), 5)
ONE_TENSOR = pickle.dumps((_TENSOR,), 5)
"""``dump_flat_one`` of a tensor."""


def dump_flat(values: tuple[Any, ...]) -> bytes:
    """A tuple for which ``flat`` gave tensors: they are replaced by a mark."""
    if not values:
        return _EMPTY
    if len(values) == 1 and type(values[0]) is torch.Tensor:
        return ONE_TENSOR
    marked = list(values)
    for at, value in enumerate(values):
        if type(value) is torch.Tensor:
            marked[at] = _TENSOR
    return pickle.dumps(tuple(marked), 5)


def load_flat(payload: bytes, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    """Inverse of ``dump_flat``."""
    if payload == _EMPTY:
        return ()
    values = permits.load_plain(payload)
    if not tensors:
        return values
    found, left = list(values), tensors[::-1]
    for at, value in enumerate(values):
        if type(value) is str and value == _TENSOR:
            found[at] = left.pop()
    return tuple(found)


NONE = pickle.dumps((None,), 5)
"""``dump_flat_one(None)``."""


def dump_flat_one(value: Any) -> bytes:
    """``dump_flat`` of one value, or of a tuple of such."""
    if value is None:
        return NONE
    return dump_flat((_TUPLE, *value) if type(value) is tuple else (value,))


def load_flat_one(payload: bytes, tensors: list[torch.Tensor]) -> Any:
    """Inverse of ``dump_flat_one``."""
    if payload == NONE:
        return None
    values = load_flat(payload, tensors)
    first = values[0]
    return values[1:] if type(first) is str and first == _TUPLE else first


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
        _hint(error)
        raise
    _references[function] = found
    return found


def current(function: Any) -> bool:
    """Whether the name of a function or class still stands for it: it may have been replaced, or its module loaded again."""
    if type(function) is not FunctionType and not isinstance(function, type):
        return True
    return permits.walk(function.__module__, function.__qualname__) is function


def refers(pickled: bytes, function: Any) -> bool:
    """Whether this is the reference to a function by its own name, rather than by one that stands for it for a while."""
    try:
        return reference(function) == pickled and current(function)
    except Exception:  # whatever stands there
        return False


def label(function: Any, args: tuple[Any, ...]) -> str:
    """The name of a callable in the signature of a call, if its pickled reference is missing or says too little. It is the name
    of its function, the same for all objects of a class. If two functions have one name, they only share landing places.

    A function that runs another one, which one of its arguments names, has ``_names_callee``: the index of that argument."""
    if (at := getattr(function, "_names_callee", None)) is not None:
        return f"{function.__qualname__}:{args[at]}"
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, MethodType):
        return f"{type(function.__self__).__qualname__}:{function.__func__.__qualname__}"
    return getattr(function, "__qualname__", None) or type(function).__qualname__


# -- why something cannot be pickled: where it is, and what would help

_EXPLAIN_S, _EXPLAIN_DEPTH = 0.25, 30
_SYMBOLIC = "torch.fx.proxy"


def _explain(error: Exception, value: Any, names: tuple[str, ...]) -> None:
    """Add to the error's text which part of ``value`` it is about, as a path. ``names``: of the members of ``value``,
    the tuple that makes up a call; none for a result. Takes a quarter of a second and the pickling of one part at most; a path
    that is not complete then ends early."""
    deadline = time.monotonic() + _EXPLAIN_S
    path, culprit = "" if names else "result", value
    for _ in range(_EXPLAIN_DEPTH):
        if type(culprit).__module__ == _SYMBOLIC:  # any attribute of it is another one
            _append(error, "; values of a symbolic trace have no data: put the call into a function that torch.fx.wrap names")
            break
        # An object that holds itself leads nowhere new: the depth is limited.
        found = next((part for part in _members(culprit) if time.monotonic() < deadline and _fails(part[1])), None)
        if found is None or time.monotonic() >= deadline:
            break
        step, culprit = found
        path = path + step if path else names[int(step[1:-1])]
    if culprit is not value:
        _append(error, f" (in {path}, a {type(culprit).__name__})")
    _hint(error)


def _hint(error: Exception) -> None:
    """Add what helps with functions that have no name another process could find."""
    text = str(error)
    if any(each in text for each in ("<lambda>", "<locals>", "local object", "__main__")):
        _append(error, f"; functions and classes that are {errors.BY_VALUE}")


def _append(error: Exception, text: str) -> None:
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (error.args[0] + text,)


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """The objects that an object holds, each with the Python expression that leads to it."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type | ModuleType | torch._C.Future) and not callable(value):
        yield from ((f".{name}", part) for name, part in vars(value).items())
    elif hasattr(value, "__self__"):
        yield ".__self__", value.__self__
