"""What the captures of a model depend on: what their forwards read from Python."""

from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Callable, Iterable
from typing import Any

from ...transport import NotSupported
from .content import MISSING, Content, Unguardable
from .roots import Root

MOST_WORLDS = 8
_MISSING = itertools.repeat(MISSING)


class World:
    """What the captures that were made while it held have read. ``empty``: tables (of hooks) that must stay so."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._roots: dict[tuple[int, str], tuple[Root, Any]] = {}
        self._empty: list[Any] = []
        self._named: list[tuple[Callable[..., Any], tuple[str, ...], tuple[Any, ...]]] = []
        self._cells: list[tuple[Any, Any]] = []
        self._content = Content()

    def add(self, roots: Iterable[Root], empty: Iterable[Any] = ()) -> None:
        """Hold what these hold now. Raises ``Unguardable``."""
        new = {(id(root.table), root.name): root for root in roots}
        found = {key: (root, Content().of(root.value(), root.label, root.by_path)) for key, root in new.items()}
        self._roots |= {key: item for key, item in found.items() if key not in self._roots}
        self._empty += empty
        self._arm()

    def take_again(self, root: Root) -> None:
        """Hold what this one holds now. Raises ``Unguardable``."""
        self._roots[id(root.table), root.name] = root, Content().of(root.value(), root.label, root.by_path)

    def _arm(self) -> None:
        """Take down the identities of what is there now."""
        content, cells = Content(), []
        named: dict[int, tuple[Any, list[tuple[str, Any]]]] = {}
        for root, _ in self._roots.values():
            value = root.value()
            content.of(value, root.label, root.by_path)
            if isinstance(root.table, types.CellType):
                cells.append((root.table, value))
            else:
                named.setdefault(id(root.table), (root.table, []))[1].append((root.name, value))
        self._content, self._cells = content, cells
        self._named = [(t.get, tuple(n for n, _ in found), tuple(v for _, v in found)) for t, found in named.values()]

    def holds(self) -> bool:
        """Whether everything is as it was."""
        if any(self._empty):
            return False
        if self._identical():
            return True
        try:
            if self.changed():
                return False
            self._arm()
        except Exception:  # whatever comparing them raises
            return False
        return True

    def _identical(self) -> bool:
        try:
            for get, names, values in self._named:
                if not all(map(operator.is_, map(get, names, _MISSING), values)):
                    return False
            for cell, value in self._cells:
                if cell.cell_contents is not value:
                    return False
            content = self._content
            if any(content.bare):
                return False
            for table, keys, values in content.tables:
                if len(table) != len(keys) or not all(map(operator.is_, table.values(), values)) or tuple(table) != keys:
                    return False
            for row, items in content.rows:
                if len(row) != len(items) or not all(map(operator.is_, row, items)):
                    return False
            return all(now == then for now, then in content.sets) and all(a.tobytes() == then for a, then in content.arrays)
        except Exception:
            return False

    def changed(self) -> str:
        """The first root that is not as it was; empty if there is none."""
        if any(self._empty):
            return "hooks"
        for root, content in self._roots.values():
            try:
                if Content().of(root.value(), root.label, root.by_path) != content:
                    return root.label
            except Unguardable:
                return root.label
        return ""


class Worlds:
    """The worlds of one model, the last used first. ``kind``: what else captures differ in."""

    def __init__(self) -> None:
        self._known: dict[Any, list[World]] = {}
        self._numbers = itertools.count(1)

    def now(self, kind: Any) -> World:
        """The one that holds; a new one if none does. Raises ``NotSupported`` if there are too many."""
        known = self._known.setdefault(kind, [])
        for at, world in enumerate(known):
            if world.holds():
                if at:
                    known.insert(0, known.pop(at))
                return world
        if len(known) > MOST_WORLDS:
            raise NotSupported(
                f"{known[0].changed()} changes from step to step",
                hint="pass what changes to the forward as a tensor",
            )
        known.insert(0, World(next(self._numbers)))
        return known[0]
