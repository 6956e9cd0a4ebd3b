"""Something to do at the end of an import of a module that is not ours. Imports neither torch nor the rest of this package."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Then = Callable[[ModuleType], None]


class _After(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module by the other finders, and loads it by its own loader; then comes what comes after it, and this goes."""

    def __init__(self, name: str, then: Then) -> None:
        self.name, self._then = name, then
        self._own: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._own, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._own
        self._own.exec_module(module)
        self._then(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def after_import(name: str, then: Then) -> None:
    """Have ``then(module)`` run: now if that module is there, else at the end of its import, before the line behind that."""
    if (module := sys.modules.get(name)) is not None:
        then(module)
    else:
        sys.meta_path.insert(0, _After(name, then))
