"""Something to do at the end of an import of a module that is not ours. Imports neither torch nor the rest of this package."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Then = Callable[[ModuleType], None]


class _Loader(importlib.abc.Loader):
    """A module's own loader, and what comes after it."""

    def __init__(self, own: Any, then: Then) -> None:
        self._own, self._then = own, then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._own
        self._own.exec_module(module)
        self._then(module)


class AfterImport(importlib.abc.MetaPathFinder):
    """A finder: once the module ``name`` has been imported, ``then(module)`` runs, before the line behind the import."""

    def __init__(self, name: str, then: Then) -> None:
        self.name, self._then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._then)
        return spec
