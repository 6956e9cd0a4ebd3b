"""What a forward can read from Python besides tensors: where it lies, and how its content is compared.

A ``Root`` is a name in a table (the attributes of a module, the globals of a function) or a cell of a closure. ``Content``
takes down what is there, however deep. ``globals_of`` and ``closed_over`` find the roots that a function names, from its code.
"""

from __future__ import annotations

import builtins
import contextvars
import ctypes
import dis
import enum
import functools
import gc
import importlib.util
import io
import logging
import random
import re
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ...transport import NotSupported

_OBJECTS, _ITEMS, _BYTES = 10_000, 20_000, 1 << 16


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING: Any = _Missing()


class Root(NamedTuple):
    """A value that a forward read: ``table[name]``, or what a cell (``table``) holds. ``by_path``: the plan looks up a tensor
    there in every step, so only its shape matters."""

    label: str
    table: Any
    name: str = ""
    by_path: bool = False

    def value(self) -> Any:
        if isinstance(self.table, types.CellType):
            try:
                return self.table.cell_contents
            except ValueError:
                return MISSING
        return self.table.get(self.name, MISSING)


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


def foreign(module: str | None) -> bool:
    """Whether this is a module of torch, of Python or of ours, whose own state no forward depends on."""
    first, _, rest = (module or "").partition(".")
    return first in _FOREIGN or first.startswith("_frozen") or (first == "rdmarpc" and not rest.startswith("experiments"))


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
        if isinstance(value, (tuple, list, deque, dict, types.MappingProxyType, set, frozenset)) and len(value) > _ITEMS:
            raise Unguardable(f"{what}, a {kind.__name__} of {len(value)} items")
        if isinstance(value, (tuple, list, deque)):
            if not isinstance(value, tuple):
                self.rows.append((value, tuple(value)))
            return kind, tuple(map(inside, value)), self._fields(value, what)
        if isinstance(value, (dict, types.MappingProxyType)):
            if value:
                self.tables.append((value, tuple(value), tuple(value.values())))
            else:
                self.bare.append(value)
            return kind, tuple((inside(key), inside(item)) for key, item in value.items()), self._fields(value, what)
        if isinstance(value, (set, frozenset)):
            self.sets.append((value, set(value)))
            return kind, frozenset(value)
        if isinstance(value, functools.partial):
            return kind, inside(value.func), inside(value.args), inside(value.keywords)
        if isinstance(value, (range, slice)):
            return kind, repr(value)
        if isinstance(value, contextvars.ContextVar):
            self.rows.append((_Held(value), (value.get(MISSING),)))
            return kind, inside(value.get(MISSING))
        if hasattr(value, "tobytes") and hasattr(value, "nbytes"):
            return self._array(value, kind, what)
        if isinstance(value, _STATEFUL) or kind.__module__.startswith("numpy.random"):
            raise Unguardable(f"{what}, a {kind.__module__}.{kind.__qualname__}, which changes when it is used")
        fields = None if isinstance(value, _PLACID) else self._fields(value, what)
        if fields is not None:
            return kind, fields
        if foreign(kind.__module__):
            return _Same(value)
        raise Unguardable(f"{what}, a {kind.__module__}.{kind.__qualname__}, which may change without a trace")

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


class _Slots:
    """What an object with slots holds, as a row."""

    def __init__(self, value: Any, names: tuple[str, ...]) -> None:
        self._value, self._names = value, names

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self._value, name, MISSING) for name in self._names)


_CHAINS = ("LOAD_ATTR", "LOAD_METHOD")


@functools.lru_cache(maxsize=4096)
def _named(code: types.CodeType) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, int, str], ...]]:
    """Chains of names that begin with a global, and (module, level, name) of what it imports."""
    chains: list[tuple[str, ...]] = []
    imports: list[tuple[str, int, str]] = []
    chain: list[str] = []
    module, level, before = "", 0, (None, None)
    for step in dis.get_instructions(code):
        if step.opname in _CHAINS and chain:
            chain.append(step.argval)
            chains[-1] = tuple(chain)
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
            chain = [step.argval]
            chains.append((step.argval,))
        elif step.opname == "IMPORT_NAME":
            chain, module, level = [], step.argval, before[0] if isinstance(before[0], int) else 0
            imports.append((module, level, ""))
        elif step.opname == "IMPORT_FROM":
            imports.append((module, level, step.argval))
        elif step.opname not in ("CACHE", "EXTENDED_ARG", "PUSH_NULL"):
            chain = []
        if step.opname == "LOAD_CONST":
            before = (before[1], step.argval)
    return tuple(dict.fromkeys(chains)), tuple(imports)


def globals_of(code: types.CodeType, table: Mapping[str, Any]) -> Iterator[Root]:
    """What the code of a module with these globals names in them, and in the user's modules and classes among them."""
    chains, imports = _named(code)
    where = table.get("__name__", "?")
    for name, *rest in chains:
        if name in table or not hasattr(builtins, name):
            yield Root(f"global {name!r} of {where}", table, name)
            yield from _inside(table.get(name, MISSING), rest)
    for module, level, name in imports:
        try:
            absolute = importlib.util.resolve_name("." * level + module, table.get("__package__")) if level else module
        except (ImportError, TypeError, ValueError):
            continue
        found = sys.modules.get(absolute)
        if found is not None and not foreign(absolute):
            yield from _inside(found, [name] if name else [])


def named_in(code: types.CodeType, table: Mapping[str, Any]) -> Iterator[Any]:
    """The values at the ends of the chains of names in a function's code, functions of modules for example."""
    chains, imports = _named(code)
    for name, *rest in chains:
        value = table.get(name, MISSING)
        for step in rest:
            value = getattr(value, step, MISSING) if isinstance(value, (types.ModuleType, type)) else MISSING
        yield value
    for module, _, name in imports:
        yield getattr(sys.modules.get(module), name, MISSING) if name else MISSING


def _inside(value: Any, names: list[str]) -> Iterator[Root]:
    for name in names:
        if isinstance(value, types.ModuleType):
            if foreign(value.__name__) and (value.__name__, name) != ("os", "environ"):
                return
            table: Any = vars(value)
        elif isinstance(value, type) and not foreign(value.__module__):
            table = next((vars(kind) for kind in value.__mro__ if name in vars(kind)), vars(value))
        else:
            return
        yield Root(f"{name!r} of {getattr(value, '__qualname__', value.__name__)}", table, name)
        value = table.get(name, MISSING)
    if isinstance(value, types.ModuleType) and not foreign(value.__name__):
        # It may be read under another name.
        for name, item in vars(value).items():
            if not name.startswith("__") and is_data(item):
                yield Root(f"{name!r} of {value.__name__}", vars(value), name)


def function_of(code: types.CodeType, table: Mapping[str, Any]) -> types.FunctionType | None:
    """The function with this code, if its name leads to it."""
    found: Any = table
    for name in code.co_qualname.split("."):
        found = found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)
    for _ in range(16):
        found = getattr(found, "fget", None) or getattr(found, "__func__", None) or found
        if isinstance(found, types.FunctionType) and found.__code__ is code:
            return found
        found = getattr(found, "__wrapped__", None)
    return None


def functions_of(codes: Iterable[types.CodeType]) -> list[types.FunctionType]:
    """All functions with one of these codes; looks at every object there is."""
    wanted = set(codes)
    if not wanted:
        return []
    return [f for f in gc.get_referrers(*wanted) if isinstance(f, types.FunctionType) and f.__code__ in wanted]


def closed_over(function: types.FunctionType) -> Iterator[Root]:
    """The variables of its closure, and what is its own: defaults, attributes."""
    name = f"{function.__module__}.{function.__qualname__}"
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        if variable != "__class__":
            yield Root(f"variable {variable!r} of {name}", cell)
    own = {"defaults": function.__defaults__, "keyword defaults": function.__kwdefaults__, **vars(function)}
    for what, value in own.items():
        if value and is_data(value) and what != "__wrapped__":
            yield Root(f"{what} of {name}", _Attribute(function, what), what)


class _Attribute:
    """A table of one attribute of a function."""

    def __init__(self, function: types.FunctionType, what: str) -> None:
        self._function, self._what = function, what

    def get(self, name: str, default: Any = None) -> Any:
        spelled = {"defaults": "__defaults__", "keyword defaults": "__kwdefaults__"}.get(name, name)
        return getattr(self._function, spelled, default)


def needs_search(code: types.CodeType, within: Iterable[types.CodeType]) -> bool:
    """Whether a function that no name leads to may have more than globals: it was not made by those that ran (``within``)."""
    return not any(code in other.co_consts for other in within)


def reachable(kinds: Iterable[type], most: int = 2000) -> dict[types.CodeType, dict[str, Any]]:
    """The codes of the methods of these classes, and of the user's functions that they name, with their globals."""
    found: dict[types.CodeType, dict[str, Any]] = {}
    left: list[Any] = [value for kind in kinds for base in kind.__mro__ for value in vars(base).values()]
    while left and len(found) < most:
        value = left.pop()
        value = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
        if not isinstance(value, types.FunctionType) or foreign(value.__module__) or value.__code__ in found:
            continue
        codes = [value.__code__]
        for code in codes:
            codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
            found[code] = value.__globals__
            left += [root.value() for root in globals_of(code, value.__globals__)]
        left.append(getattr(value, "__wrapped__", None))
    return found


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
_STATEFUL = (random.Random, io.IOBase, ctypes._SimpleCData, ctypes.Structure, ctypes.Array, memoryview, bytearray, Iterator)
_LIBRARIES = (
    "torch numpy functorch triton sympy mpmath networkx jinja2 markupsafe fsspec filelock typing_extensions setuptools numba"
)
_FOREIGN = frozenset(_LIBRARIES.split()) | sys.stdlib_module_names | {"builtins"}
