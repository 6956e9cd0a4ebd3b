"""What a part that lies at a worker as a whole does besides giving its result: globals that it reads or changes, numbers that
it draws. In one process the others see that; from another worker they do not."""

from __future__ import annotations

import contextvars
import functools
import random
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...transport import NotSupported
from .content import MISSING, Content, Unguardable, fields_of, foreign, is_data, items_of, pairs_of
from .generators import python_marks, torch_mark
from .roots import Root, globals_of, named_in, reachable
from .world import World

_OF_A_THREAD = (contextvars.ContextVar, threading.local)
_WRITTEN = frozenset([bool, int, float, complex, str, bytes, type(None)])
_HINT = 'capture="here", or keep it in an attribute of the part'


class OnlyHere(NotSupported):
    """What a part elsewhere does otherwise than in one process, although it can run there."""


def draws_there(what: str, generator: str) -> OnlyHere:
    return OnlyHere(f"{what} draws numbers from {generator}, of which every worker has its own", hint='capture="here"')


def changes_there(what: str, label: str) -> OnlyHere:
    return OnlyHere(f"{what} changes {label}, of which every worker has its own", hint=_HINT)


class Globals:
    """The data among the globals that the code of a part names, in this process, without what cannot be compared, and without
    what is in ``known`` ones. ``changed()`` names one that is not as it was, ``take()`` takes down what there is now.
    ``own`` names one that every thread has for itself."""

    def __init__(self, part: nn.Module, known: Iterable[Globals] = ()) -> None:
        before = {key for other in known for key in map(_key, other._roots)}
        named = _data_of(part) if has_code(part) else ()
        self._roots: list[Root] = [root for root in named if _key(root) not in before]
        self.own = next((root.label for root in self._roots if isinstance(root.value(), _OF_A_THREAD)), "")
        self.take()

    def __bool__(self) -> bool:
        return bool(self._roots)

    def take(self) -> None:
        found = [(root, tensors) for root in self._roots if (tensors := _tensors_of(root)) is not None]
        self._roots, self._world = [root for root, _ in found], World(0)
        self._world.add(self._roots)
        self._tables = [(root, table) for root in self._roots if (table := table_of(root)) is not None]
        self._tensors = [(root.label, tensor, tensor._version) for root, tensors in found for tensor in tensors]

    def changed(self) -> str:
        if not self._world.holds() and not (self._gained() and self._world.holds()):
            return self._world.changed() or "a global"
        return next((label for label, tensor, version in self._tensors if tensor._version != version), "")

    def _gained(self) -> bool:
        """Whether there are private tables that have only gained something; from now on that belongs to them."""
        found = [root for root, table in self._tables if only_gains(root, table)]
        try:
            for root in found:
                self._world.take_again(root)
        except Unguardable:
            return False
        self._tables = [(root, table_of(root) or {} if root in found else table) for root, table in self._tables]
        return bool(found)

    def values(self) -> dict[str, str]:
        """By label, what can be compared with another process: a number or text as Python writes it, of others the class."""
        found = [(root.label, root.value()) for root in self._roots]
        return {label: repr(value) if type(value) in _WRITTEN else type(value).__qualname__ for label, value in found}


class Followed:
    """A part at its worker. Called, it runs, and raises ``NotSupported`` if it has changed globals or what ``common()`` names
    (see ``Access.changed_common``), or drawn from generators of Python's or numpy's; ``tell()`` is called if it has drawn from
    torch's. ``follows``: whether it has code of the user's, who may do so."""

    def __init__(
        self, path: str, part: nn.Module, gpu: torch.device | None, tell: Callable[[], None], common: Callable[[], str]
    ) -> None:
        self.part, self.forward, self.follows = part, getattr(part, "forward", part), has_code(part)
        self._what, self._gpu, self._tell, self._common = f"part {path!r}", gpu, tell, common
        self._globals, self._draws = Globals(part), self.follows and _draws_from_python(part)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._globals and self._globals.changed():
            self._globals.take()  # by others in this process
        before, marks = torch_mark(self._gpu), python_marks() if self._draws else {}
        result = self.part(*args, **kwargs)
        if torch_mark(self._gpu) != before:
            self._tell()
        for name, mark in (python_marks() if marks else {}).items():
            if marks.get(name, mark) != mark:
                raise _late(draws_there(self._what, name))
        if self._globals and (label := self._globals.changed()):
            raise _late(changes_there(self._what, label))
        if name := self._common():
            raise NotSupported(
                f"{self._what} changes what is in {name}, which others in the model have, too: they would not see it",
                hint='return it from the forward of the part, or capture="here"',
            )
        return result


def _late(error: OnlyHere) -> NotSupported:
    """It has done so: no other process can do it instead."""
    return NotSupported(f"{error.message}, and did not when it was captured", hint=error.hint)


def has_code(part: nn.Module) -> bool:
    """Whether it has code of the user's."""
    hooked = any(table for m in part.modules() for name, table in vars(m).items() if name.endswith("_hooks"))
    own = hooked or any(not foreign(type(module).__module__) or "forward" in vars(module) for module in part.modules())
    return own or any(code_in(value) for module in part.modules() for value in vars(module).values())


def code_in(value: Any) -> bool:
    """Whether a value that is an attribute of a part is, or holds, a function of the user's or an object with methods."""
    functions, kinds = _called_in(value)
    return bool(kinds) or any(not foreign(function.__module__) for function in functions)


def _called_in(value: Any) -> tuple[list[types.FunctionType], set[type]]:
    """Functions in an attribute, and the user's classes of objects in it."""
    if isinstance(value, dict):
        inside = [item for _, item in pairs_of(value)]
    else:
        inside = items_of(value) if isinstance(value, (list, tuple)) else [value]
    functions: list[types.FunctionType] = []
    kinds: set[type] = set()
    for item in inside:
        while isinstance(item, functools.partial):
            item = item.func
        function = getattr(item, "__func__", item)
        if isinstance(function, types.FunctionType):
            functions.append(function)
            item = getattr(item, "__self__", None)
        if not isinstance(item, (nn.Module, type)):
            kinds.update(kind for kind in type(item).__mro__ if not foreign(kind.__module__))
    return functions, kinds


def _code_of(part: nn.Module) -> dict[types.CodeType, dict[str, Any]]:
    """That of its forwards, of the functions that it has as attributes and hooks, and what is called from there: a method
    counts as called where something of its name is used."""
    kinds: set[type] = set()
    functions: list[Any] = []
    for module in part.modules():
        kinds.update(kind for kind in type(module).__mro__ if not foreign(kind.__module__))
        for value in vars(module).values():
            called, of_objects = _called_in(value)
            functions += called
            kinds |= of_objects
    methods: dict[str, list[Any]] = {}
    for kind in kinds:
        for name, value in vars(kind).items():
            methods.setdefault("forward" if name[:2] == "__" and name != "__init__" else name, []).append(value)
    names = {"forward"}
    while True:
        codes = reachable((), [*functions, *(value for name in names for value in methods.get(name, ()))])
        new = {name for code in codes for name in code.co_names if name in methods} - names
        if not new:
            return codes
        names |= new


def _key(root: Root) -> tuple[int, str]:
    return id(root.table), root.name


def _data_of(part: nn.Module) -> Iterator[Root]:
    seen: set[tuple[int, str]] = set()
    for code, table in _code_of(part).items():
        for root in globals_of(code, table):
            value = root.value()
            if _key(root) in seen or root.label == "'environ' of os":
                continue
            seen.add(_key(root))
            if value is MISSING or is_data(value) or isinstance(value, torch.Tensor):
                yield root


def _tensors_of(root: Root) -> list[torch.Tensor] | None:
    """Those in a global that tell when something is written into them; ``None`` if what it holds cannot be compared."""
    content = Content()
    try:
        content.of(root.value(), root.label)
    except Unguardable:
        return None
    return [tensor for tensor in content.tensors if not tensor.is_inference()]


def _draws_from_python(part: nn.Module) -> bool:
    """Whether its code names generators of Python's or numpy's."""
    codes = _code_of(part).items()
    return any(_draws(value) for code, table in codes for value in named_in(code, table)) or any(
        _draws(value) for module in part.modules() for value in vars(module).values()
    )


def _draws(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return value is random or value.__name__.startswith("numpy.random")
    bound = getattr(value, "__self__", None)
    return isinstance(bound, random.Random) or type(bound).__module__.startswith("numpy.random")


# A library that dispatches by the class of a tensor keeps what it has found in a private table of its module
# (``_of_class[type(x)] = _Backend()``). Every process fills its own, and computes the same. So a table that gains objects of
# that module's classes, without data, has not changed to those who look. What comes of the entries afterwards counts as ever.


def table_of(root: Root) -> dict[Any, Any] | None:
    """What is in this global now, if it is a private table of its module."""
    value = root.value()
    private = root.name.startswith("_") and isinstance(root.table, dict) and "__name__" in root.table
    return dict(pairs_of(value)) if private and type(value) is dict else None


def only_gains(root: Root, before: Mapping[Any, Any]) -> bool:
    """Whether a table that had these entries has more now, all of this kind."""
    now = table_of(root)
    if now is None or len(now) <= len(before):
        return False
    if any(key not in now or now[key] is not value for key, value in before.items()):
        return False
    new = [(key, value) for key, value in now.items() if key not in before]
    own = root.table["__name__"]
    return all(isinstance(key, (str, type)) and type(value).__module__ == own and not _data_in(value) for key, value in new)


def _data_in(value: Any) -> bool:
    """Whether an object holds more than functions, classes, modules and texts."""
    return any(is_data(item) and not isinstance(item, str) for fields in fields_of(value) for item in fields.values())


Compare = Callable[[str, Mapping[str, Mapping[str, str]]], Mapping[str, str]]
"""Of a worker and the ``Globals.values`` of its parts, by path: a global of a part that the worker has otherwise, by path."""


class Elsewhere:
    """The globals that the parts of one model at other workers name: whether they are the same ones here and there.

    ``homes``: the workers of the parts, by path. Asks a worker when it begins to follow a part, and never again."""

    def __init__(self, homes: Mapping[str, str], compare: Compare) -> None:
        self._homes, self._compare = homes, compare
        self._followed: dict[str, list[Globals]] = {}
        self._other: dict[str, str] = {}

    def follow(self, parts: Mapping[str, nn.Module]) -> None:
        """From now on, what the code of these parts names, and what was not followed yet."""
        new: dict[str, dict[str, dict[str, str]]] = {}
        for path, part in parts.items():
            followed = self._followed.setdefault(path, [])
            if found := Globals(part, followed):
                followed.append(found)
                if found.own:
                    self._other.setdefault(path, f"{found.own}, which every thread has for itself,")
                new.setdefault(self._homes[path], {})[path] = found.values()
        for worker, values in new.items():
            self._other = {**self._compare(worker, values), **self._other}

    def part_of(self, path: str) -> str:
        """The part that has this module."""
        return next(part for part in self._homes if f"{path}.".startswith(f"{part}."))

    def other(self, path: str = "") -> str:
        """A global that a worker has otherwise: when its part began to be followed, or as it has changed here since.
        ``path``: of the part that has this module, instead of any part."""
        parts = [part for part in self._followed if not path or f"{path}.".startswith(f"{part}.")]
        for part in parts:
            found = (self._other.get(part, ""), *(followed.changed() for followed in self._followed[part]))
            if label := next(filter(None, found), ""):
                return label
        return ""
