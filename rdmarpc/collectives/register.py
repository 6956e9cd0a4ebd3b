"""Tells torch of the backend ``rdmarpc``. Imports neither torch nor anything else before a group is made.

A program may import this package before torch: then torch is told as soon as its module of groups has been imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

NAME = "rdmarpc"
_GROUPS = "torch.distributed.distributed_c10d"


def _create(options: Any, backend_options: Any = None) -> Any:
    from .backend import ProcessGroup

    return ProcessGroup(options.store, options.group_rank, options.group_size, options.timeout)


def _tell(groups: ModuleType) -> None:
    if NAME not in groups.Backend.backend_list:
        groups.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


class _Loader(importlib.abc.Loader):
    """The module's own loader, and what comes after it."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._own
        self._own.exec_module(module)
        _tell(module)
        if _finder in sys.meta_path:
            sys.meta_path.remove(_finder)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _GROUPS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


_finder = _Finder()


def register() -> None:
    """Once a process; a second time does nothing. Later, if torch is not imported yet."""
    groups = sys.modules.get(_GROUPS)
    if groups is not None:
        _tell(groups)
    elif _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
