"""Where a forward can read values from Python besides its tensors.

A ``Root`` is a name in a table (the attributes of a module, the globals of a function) or a cell of a closure. ``globals_of``
and ``closed_over`` find the roots that a function names, from its code.
"""

from __future__ import annotations

import builtins
import dis
import functools
import gc
import importlib.util
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .content import MISSING, foreign, is_data

_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
_CHAINS = (*_LOADS, "STORE_ATTR", "DELETE_ATTR")
BETWEEN = ("CACHE", "EXTENDED_ARG", "PUSH_NULL", "COPY", "DUP_TOP")
"""They leave what a chain has come to where it is. (Python 3.10 has ``DUP_TOP`` where later ones have ``COPY``.)"""


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
            if step.opname not in _LOADS:
                chain = []
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
            chain = [step.argval]
            chains.append((step.argval,))
        elif step.opname == "IMPORT_NAME":
            chain, module, level = [], step.argval, before[0] if isinstance(before[0], int) else 0
            imports.append((module, level, ""))
        elif step.opname == "IMPORT_FROM":
            imports.append((module, level, step.argval))
        elif step.opname not in BETWEEN:
            chain = []
        if step.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
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


@functools.lru_cache(maxsize=4096)
def compares_identity(code: types.CodeType) -> bool:
    """Whether a function may ask if two names are one object: ``is`` with something other than a constant, or ``id``."""
    before = ""
    for step in dis.get_instructions(code):
        if step.opname == "IS_OP" and before != "LOAD_CONST":
            return True
        before = step.opname
    return ("id",) in _named(code)[0]


def named_in(code: types.CodeType, table: Mapping[str, Any]) -> Iterator[Any]:
    """The values at the ends of the chains of names in a function's code, functions of modules for example."""
    chains, imports = _named(code)
    for name, *rest in chains:
        value = table.get(name, MISSING)
        for step in rest:
            value = _member(value, step) if isinstance(value, (types.ModuleType, type)) else MISSING
        yield value
    for module, _, name in imports:
        yield _member(sys.modules.get(module), name) if name else MISSING


def _member(value: Any, name: str) -> Any:
    try:
        return getattr(value, name, MISSING)
    except Exception:  # a module's own ``__getattr__`` may import or make what is not there
        return MISSING


def _inside(value: Any, names: list[str]) -> Iterator[Root]:
    for name in names:
        if isinstance(value, types.ModuleType):
            if foreign(value.__name__) and (value.__name__, name) != ("os", "environ"):
                return
            table: Any = vars(value)
        elif isinstance(value, type) and not foreign(value.__module__):
            # Not those of torch's own classes: a trace exchanges some while it lasts (``autograd.Function``).
            table = _class_table(next((k for k in value.__mro__ if name in vars(k) and not foreign(k.__module__)), value))
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
    for name in getattr(code, "co_qualname", code.co_name).split("."):  # Python 3.10 has the last name only
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


class ClassTable:
    """The attributes of a class, as a table: ``vars`` does not tell whose they are."""

    def __init__(self, kind: type) -> None:
        self._kind, self.get = kind, vars(kind).get

    def put(self, name: str, value: Any) -> None:
        """``MISSING``: it has none of that name."""
        if value is not MISSING:
            setattr(self._kind, name, value)
        elif name in vars(self._kind):
            delattr(self._kind, name)


_class_table = functools.lru_cache(maxsize=1024)(ClassTable)
"""The same one for a class every time: a table is known by its ``id``."""


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


def reachable(kinds: Iterable[type], functions: Iterable[Any] = (), most: int = 2000) -> dict[types.CodeType, dict[str, Any]]:
    """The codes of the methods of these classes, of these functions, and of the user's functions that they name, with their
    globals."""
    found: dict[types.CodeType, dict[str, Any]] = {}
    left: list[Any] = [*functions, *(value for kind in kinds for base in kind.__mro__ for value in vars(base).values())]
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
