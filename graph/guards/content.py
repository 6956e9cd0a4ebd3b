"""What Python values hold, however deep, as something that can be compared."""

from __future__ import annotations

import contextvars
import ctypes
import enum
import functools
import io
import logging
import random
import re
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ...transport import NotSupported

_OBJECTS, _ITEMS, _BYTES = 10_000, 20_000, 1 << 16
_DEPTH = 3
_BARE = frozenset([bool, int, float, str, type(None)])


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING: Any = _Missing()


class Unguardable(NotSupported):
    """A value that can change without being replaced, and whose content cannot be compared."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the forward uses {what}", hint="read it outside of the model, and pass it as a tensor")


class _Same:
    """Equal to the same object only."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def fields_of(value: Any) -> list[dict[str, Any]]:
    """The attributes of an object that is no module: its ``__dict__``, or what its slots hold."""
    found = [vars(value)] if hasattr(value, "__dict__") and isinstance(vars(value), dict) else []
    slots = [name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    held = {name: getattr(value, name) for name in slots if name not in ("__dict__", "__weakref__") and hasattr(value, name)}
    return [*found, held] if held else found


def _names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def items_of(value: Any) -> list[Any]:
    """What a container holds (of a dict: its keys), read by its built-in class: what a subclass makes of ``len`` and of loops
    may raise, change something or say otherwise."""
    kind = next(kind for kind in _CONTAINERS if isinstance(value, kind))
    return [*kind.__iter__(value)]


def pairs_of(value: Any) -> list[tuple[Any, Any]]:
    """The keys and values of a dict, likewise."""
    if isinstance(value, types.MappingProxyType):
        return [*value.items()]
    return [*(OrderedDict if isinstance(value, OrderedDict) else dict).items(value)]


def held(part: nn.Module) -> list[torch.Tensor]:
    """The tensors that a part has in parameters, buffers and attributes, also within containers and objects of the user's."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    for module in part.modules():
        for value in vars(module).values():
            _add_held(value, _DEPTH, found, seen)
    return found


def _add_held(value: Any, depth: int, found: list[torch.Tensor], seen: set[int]) -> None:
    kind = type(value)
    if kind in _BARE:
        return
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif not depth or isinstance(value, (nn.Module, *_ATOMS)):
        return
    elif isinstance(value, (dict, types.MappingProxyType)):
        for _, item in pairs_of(value):
            _add_held(item, depth - 1, found, seen)
    elif isinstance(value, _CONTAINERS):
        for item in items_of(value):
            _add_held(item, depth - 1, found, seen)
    elif id(value) not in seen and not foreign(kind.__module__):
        seen.add(id(value))
        for fields in fields_of(value):
            for item in fields.values():
                _add_held(item, depth - 1, found, seen)


def foreign(module: str | None) -> bool:
    """Whether this is a module of torch, of Python or of ours, whose own state no forward depends on."""
    first, _, rest = (module or "").partition(".")
    return first in _FOREIGN or first.startswith("_frozen") or (first == "rdmarpc" and not rest.startswith("experiments"))


def package_of(frame: types.FrameType) -> str:
    """The package whose function this is the frame of."""
    name: str = frame.f_globals.get("__name__") or ""
    return name.partition(".")[0]


def imported_by(frame: types.FrameType | None) -> bool:
    """Whether an import has called this function (a finder of editable packages, for example), not a forward that we trace."""
    while frame is not None and not (name := frame.f_globals.get("__name__") or "").startswith("rdmarpc."):
        if name.startswith(("importlib.", "_frozen_importlib")):
            return True
        frame = frame.f_back
    return False


def settings_of(kind: type) -> dict[str, Any]:
    """The attributes that a class of the user's has itself and that are data."""
    if foreign(kind.__module__):
        return {}
    return {name: value for name, value in vars(kind).items() if not name.startswith("__") and is_data(value)}


def is_data(value: Any) -> bool:
    """Not a function, class, property or the like."""
    return not isinstance(value, (*_ATOMS, property, staticmethod, classmethod, functools.cached_property, *_DESCRIPTORS))


class Content:
    """The content of values, as something that can be compared, and the containers in which it lies."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, tuple[Any, ...]]] = []
        self.tables: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = []
        self.bare: list[Any] = []  # tables without entries, most of them of hooks
        self.sets: list[tuple[Any, Any]] = []
        self.arrays: list[tuple[Any, bytes]] = []
        self.tensors: list[torch.Tensor] = []
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []

    def of(self, value: Any, what: str, by_path: bool = False) -> Any:
        """``what`` names it in errors. Raises ``Unguardable``."""
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind is float or kind is complex:
            return kind, repr(value)  # -0.0 is not 0.0, and nan is nan
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            if not by_path:
                return _Same(value)
            with torch._C.DisableTorchFunctionSubclass():
                return kind, tuple(value.shape), value.dtype, value.requires_grad, value.device
        if isinstance(value, types.MethodType):
            return kind, _Same(value.__func__), self.of(value.__self__, what)
        if isinstance(value, _ATOMS) or value is MISSING:
            return _Same(value)
        return self._object(value, kind, what, by_path)

    def _object(self, value: Any, kind: type, what: str, by_path: bool) -> Any:
        if id(value) in self._seen:
            return "again", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        if len(self._seen) > _OBJECTS:
            raise Unguardable(f"{what}, which holds more than {_OBJECTS} objects")
        inside = functools.partial(self.of, what=what, by_path=by_path)
        if isinstance(value, (*_CONTAINERS, types.MappingProxyType)):
            return self._container(value, kind, what, inside)
        if isinstance(value, functools.partial):
            return kind, inside(value.func), inside(value.args), inside(value.keywords)
        if isinstance(value, (range, slice)):
            return kind, repr(value)
        if isinstance(value, contextvars.ContextVar):
            self.rows.append((_Held(value), (value.get(MISSING),)))
            return kind, inside(value.get(MISSING))
        if hasattr(kind, "tobytes") and hasattr(kind, "nbytes"):  # not of the value: it may have an answer to every name
            return self._array(value, kind, what)
        if value is _PYTHONS_OWN:  # ``randrange`` and others are its methods; that it was drawn from is seen by its state
            return kind, "of the process"
        if isinstance(value, _STATEFUL) or kind.__module__.startswith("numpy.random"):
            raise Unguardable(f"{what}, a {kind.__module__}.{kind.__qualname__}, which changes when it is used")
        fields = None if isinstance(value, _PLACID) else self._fields(value, what)
        if fields is not None:
            return kind, fields
        if foreign(kind.__module__):
            return _Same(value)
        raise Unguardable(f"{what}, a {kind.__module__}.{kind.__qualname__}, which may change without a trace")

    def _container(self, value: Any, kind: type, what: str, inside: Callable[[Any], Any]) -> Any:
        """A list, tuple, set, dict or the like."""
        mapping = isinstance(value, (dict, types.MappingProxyType))
        items: list[Any] = pairs_of(value) if mapping else items_of(value)
        if len(items) > _ITEMS:
            raise Unguardable(f"{what}, a {kind.__name__} of {len(items)} items")
        if isinstance(value, (set, frozenset)):
            self.sets.append((value, set(items)))
            return kind, frozenset(items)
        if not mapping:
            if not isinstance(value, tuple):
                self.rows.append((value if kind in _CONTAINERS else _Items(value), tuple(items)))
            return kind, tuple(map(inside, items)), self._fields(value, what)
        if kind not in (dict, OrderedDict, types.MappingProxyType):
            self.rows.append((_Pairs(value), tuple(part for pair in items for part in pair)))
        elif items:
            self.tables.append((value, tuple(key for key, _ in items), tuple(item for _, item in items)))
        else:
            self.bare.append(value)
        return kind, tuple((inside(key), inside(item)) for key, item in items), self._fields(value, what)

    def _array(self, value: Any, kind: type, what: str) -> Any:
        content = value.tobytes() if getattr(value, "nbytes", 0) <= _BYTES and hasattr(value, "tobytes") else None
        if content is None or "O" in str(getattr(value, "dtype", "")):
            raise Unguardable(f"{what}, a {kind.__name__} of {getattr(value, 'nbytes', '?')} bytes")
        self.arrays.append((value, content))
        return kind, str(getattr(value, "dtype", "")), getattr(value, "shape", ()), content

    def _fields(self, value: Any, what: str) -> Any:
        found = []
        for fields in fields_of(value):
            live = fields if hasattr(value, "__dict__") and fields is vars(value) else None
            if live is not None:
                self.tables.append((live, tuple(live), tuple(live.values())))
            else:
                self.rows.append((_Slots(value, tuple(fields)), tuple(fields.values())))
            found += [(name, self.of(item, f"{what} ({name})")) for name, item in fields.items()]
        for kind in type(value).__mro__:
            found += [(name, self.of(item, f"{what} ({name})")) for name, item in settings_of(kind).items()]
        return tuple(found) if found or fields_of(value) or not foreign(type(value).__module__) else None


class _Held:
    """What a context variable holds, as a row."""

    def __init__(self, variable: contextvars.ContextVar[Any]) -> None:
        self._variable = variable

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        return iter((self._variable.get(MISSING),))


class _Items:
    """What a container of a class of its own holds, as a row."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __len__(self) -> int:
        return len(items_of(self._value))

    def __iter__(self) -> Iterator[Any]:
        return iter(items_of(self._value))


class _Pairs(_Items):
    """Likewise of a dict: its keys and values in turns."""

    def __len__(self) -> int:
        return 2 * len(pairs_of(self._value))

    def __iter__(self) -> Iterator[Any]:
        return (part for pair in pairs_of(self._value) for part in pair)


class _Slots:
    """What an object with slots holds, as a row."""

    def __init__(self, value: Any, names: tuple[str, ...]) -> None:
        self._value, self._names = value, names

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self._value, name, MISSING) for name in self._names)


_CONTAINERS = (tuple, list, deque, OrderedDict, dict, set, frozenset)
_PLAIN = frozenset(
    [bool, int, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size]
)
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_ATOMS: tuple[type, ...] = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.ModuleType,
    types.CodeType,
    types.GenericAlias,
    types.UnionType,
    nn.Module,
    torch.Tensor,
    torch.Generator,
    enum.Enum,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)
_PLACID = (
    logging.Logger,
    logging.LoggerAdapter,
    logging.Handler,
    threading.Event,
    type(threading.Lock()),
    type(threading.RLock()),
    re.Pattern,
    weakref.ref,
    type(functools.lru_cache(len)),
)
"""Objects that a forward may use, and whose state decides nothing."""
_PYTHONS_OWN: Any = random._inst
_STATEFUL = (random.Random, io.IOBase, ctypes._SimpleCData, ctypes.Structure, ctypes.Array, memoryview, bytearray, Iterator)
_LIBRARIES = (
    "torch numpy functorch triton sympy mpmath networkx jinja2 markupsafe fsspec filelock typing_extensions setuptools numba "
    "tqdm optree opt_einsum packaging llvmlite cupy"
)
_FOREIGN = frozenset(_LIBRARIES.split()) | sys.stdlib_module_names | {"builtins"}
