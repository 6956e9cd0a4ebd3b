"""Hooks that were set on stand-ins, where the originals run here: they run with those of the originals."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import nn

from ..parts.remote_part import TABLES_OF_HOOKS, RemotePart, added, hooks_around


def join(part: RemotePart, copied: nn.Module) -> None:
    """Give the copy of a module the hooks on its stand-in, also those that are set and removed from now on."""
    for name in TABLES_OF_HOOKS:
        vars(copied)[name] = _Joined(part, vars(part)[name], vars(copied)[name])


class _Joined(MutableMapping[Any, Any]):
    """A table of hooks (or of what is special about them) of a copied module: those that it came with, by number, and those
    of its stand-in, by number in a tuple, as numbers may be the same. They have the order that they would have in one module,
    and the latter are called with the stand-in. What is set here is the copy's own."""

    def __init__(self, part: RemotePart, there: dict[int, Any], own: OrderedDict[int, Any]) -> None:
        self._part, self._there, self._own = part, there, own

    def __iter__(self) -> Iterator[Any]:
        there = [] if hooks_around(self._part) else [key for key, _ in added(self._there)]
        first = self._part._place.prepended
        yield from [(key,) for key in there if key in first]
        yield from list(self._own)
        yield from [(key,) for key in there if key not in first]

    def __len__(self) -> int:
        return len(self._own) + (0 if not self._there or hooks_around(self._part) else len(self._there))

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, tuple):
            return self._own[key]
        found = self._there[key[0]]
        return _Called(found, self._part) if callable(found) else found

    def __setitem__(self, key: int, value: Any) -> None:
        self._own[key] = value

    def __delitem__(self, key: int) -> None:
        del self._own[key]

    def move_to_end(self, key: int, last: bool = True) -> None:
        """Of ``OrderedDict``: a hook that is registered with ``prepend=True``."""
        self._own.move_to_end(key, last)


class _Called:
    """A hook that is called with the stand-in of the module that calls it."""

    def __init__(self, hook: Any, part: RemotePart) -> None:
        self._hook, self._part = hook, part

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        return self._hook(self._part, *args)
