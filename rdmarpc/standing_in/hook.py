"""What happens when a program imports torch, and when it imports a module that we stand in for.

``import torch`` imports ``torch.distributed.rpc`` itself, so the original is there first. It is replaced at the end of
``import torch``, before the program's next line. Imports neither torch nor the rest of this package.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from . import modules

_TORCH = "torch"


class _AfterTorch(importlib.abc.Loader):
    """Torch's own loader, and what comes after it."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._own
        self._own.exec_module(module)
        modules.replace()


class _StandInLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return modules.stand_in(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """A program that imports it will use it, in this process or in those that it forks."""
        modules.load()


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._seeks_torch = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in modules.MEANT:
            if not modules.replaced():
                return None  # torch itself, while it is being imported
            return importlib.machinery.ModuleSpec(name, _StandInLoader(), is_package=name in modules.PACKAGES)
        if name != _TORCH or self._seeks_torch:
            return None
        self._seeks_torch = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._seeks_torch = False
        if spec is not None and spec.loader is not None:
            spec.loader = _AfterTorch(spec.loader)
        return spec


_finder = _Finder()


def register() -> None:
    """Stand in for torch's modules from now on; at once if torch is imported already."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    if _TORCH in sys.modules:
        modules.replace()
