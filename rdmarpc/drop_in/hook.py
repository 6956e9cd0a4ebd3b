"""What happens when a program imports torch, and when it imports a module that we stand in for.

``import torch`` imports ``torch.distributed.rpc`` itself, so the original is there first. It is replaced at the end of
``import torch``, before the program's next line. Imports neither torch nor the rest of this package.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

from ..base.imports import AfterImport
from . import modules

_TORCH = "torch"


class _StandInLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return modules.stand_in(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """A program that imports it will use it, in this process or in those that it forks. Torch itself (TorchScript, the
        package of its optimizers) only looks at it: then it is loaded when it is first used."""
        if not modules.asked_by("torch"):
            modules.load()


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in modules.MEANT or not modules.replaced():
            return None  # torch's own, while it is being imported
        return importlib.machinery.ModuleSpec(name, _StandInLoader(), is_package=name in modules.PACKAGES)


_finders = [
    _Finder(),
    AfterImport(_TORCH, lambda _: modules.replace()),
    *(AfterImport(package, modules.ask_later) for package in modules.LATER),
]


def register() -> None:
    """Stand in for torch's modules from now on; at once if torch is imported already."""
    if _finders[0] not in sys.meta_path:
        sys.meta_path[:0] = _finders
    if _TORCH in sys.modules:
        modules.replace()
