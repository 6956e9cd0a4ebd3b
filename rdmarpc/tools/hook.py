"""What happens when a program imports torch, and when it imports a module that we stand in for.

``import torch`` imports ``torch.distributed.rpc`` itself, so the original is there first. It is replaced at the end of
``import torch``, before the program's next line. Imports neither torch nor the rest of this package.

Processes that this one starts come to know by a folder with a ``sitecustomize`` that leads their ``PYTHONPATH``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from types import ModuleType

from ..base.imports import after_import
from . import modules

_SITE = str(Path(__file__).parent / "site")


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in modules.MEANT or not modules.stand_ins:
            return None  # torch's own, while it is being imported
        return importlib.machinery.ModuleSpec(name, self, is_package=name in modules.PACKAGES)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return modules.stand_ins[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It has its names from ours."""


_stand_ins = _StandIns()


def register() -> None:
    """Stand in for torch's modules from now on; at once if torch is imported already. A second time does nothing."""
    if _stand_ins not in sys.meta_path:
        sys.meta_path.insert(0, _stand_ins)
        after_import("torch", lambda _: modules.replace())


def tell_children(environment: MutableMapping[str, str]) -> None:
    """Have every Python that inherits this environment begin with ``register``. The ``sitecustomize`` of ours runs the one that
    it hides."""
    environment["RDMARPC_STANDING_IN"] = "1"
    path = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != _SITE]
    environment["PYTHONPATH"] = os.pathsep.join([_SITE, *path])


def install() -> None:
    """Stand in for ``torch.distributed.rpc``, ``.autograd``, ``DistributedOptimizer`` and ``RemoteModule``, for every library
    in this process and in the Python processes that it starts. Call it before other imports: names that other modules took
    from torch's are exchanged, but not what they made of them (subclasses, defaults of arguments, objects)."""
    tell_children(os.environ)
    register()
