"""What happens when a program imports torch, and when it imports a module that we stand in for.

``import torch`` imports ``torch.distributed.rpc`` itself, so the original is there first. It is replaced at the end of
``import torch``, before the program's next line. Imports neither torch nor the rest of this package.

Processes that this one starts come to know by a folder with a ``sitecustomize`` that leads their ``PYTHONPATH``.

What torch's modules have and ours do not, and why, is in ``differences.tsv``. Errors quote it; a test compares it with the
installed torch.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections import defaultdict
from collections.abc import MutableMapping, Sequence
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from ..base.imports import after_import

_SITE = str(Path(__file__).parent / "site")
_RPC = ("rdmarpc", "rdmarpc.api", "rdmarpc.torch_names")
MEANT: dict[str, tuple[str, ...]] = {
    "torch.distributed.rpc": _RPC,
    "torch.distributed.rpc.api": ("rdmarpc.api", "rdmarpc.internal", "rdmarpc.constants"),
    "torch.distributed.rpc.backend_registry": ("rdmarpc.torch_names",),
    "torch.distributed.rpc.constants": ("rdmarpc.constants", "rdmarpc.torch_names"),
    "torch.distributed.rpc.functions": ("rdmarpc.functions",),
    "torch.distributed.rpc.internal": ("rdmarpc.internal", "rdmarpc.api"),
    "torch.distributed.rpc.options": ("rdmarpc.options", "rdmarpc.torch_names"),
    "torch.distributed.rpc.rref_proxy": ("rdmarpc.torch_names", "rdmarpc.constants"),
    "torch.distributed.autograd": ("rdmarpc.autograd",),
    "torch.distributed.nn.api.remote_module": ("rdmarpc.nn", "rdmarpc.torch_names"),
    "torch.distributed.optim.optimizer": ("rdmarpc.optim",),
    "torch._C._distributed_rpc": ("rdmarpc.api", "rdmarpc", "rdmarpc.torch_names"),
    "torch._C._distributed_autograd": ("rdmarpc.autograd",),
}
"""Torch's modules, and ours that have their names: the first that has one."""

PACKAGES = {"torch.distributed.rpc"}
_IN_C = ("torch._C._distributed_rpc", "torch._C._distributed_autograd")
_FAMILIES = ("torch.distributed.rpc", "torch.distributed.autograd", *_IN_C)
"""What is defined in these works with torch's own agent."""
_MARKS = ("RRef(", "prim::rpc_", "aten::to_here", "aten::local_value")
"""In the text of a TorchScript function: it uses RPC."""


@cache
def differences() -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Why modules are absent as a whole, and why a module, and those below it, lacks names."""
    absent: dict[str, str] = {}
    lacking: dict[str, dict[str, str]] = defaultdict(dict)
    for line in Path(__file__).with_name("differences.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        modules, why, names = line.split("\t")
        for module in modules.split():
            if names:
                lacking[module].update(dict.fromkeys(names.split(), why))
            else:
                absent[module] = why
    return absent, lacking


def known(module: str, name: str) -> str | None:
    """Why a module of ours lacks a name of torch's, if that is said."""
    absent, lacking = differences()
    if f"{module}.{name}" in absent:
        return absent[f"{module}.{name}"]
    for part, table in lacking.items():
        if (module == part or module.startswith(f"{part}.")) and name in table:
            return table[name]
    return None


class StandIn(ModuleType):
    """A module with torch's name and our functions. What is set here is set in our module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        below = f"{self.__name__}.{name}"
        if below in MEANT:
            return importlib.import_module(below)
        for home in MEANT[self.__name__]:
            module = importlib.import_module(home)
            if hasattr(module, name):
                found = getattr(module, name)
                if isinstance(found, type | FunctionType):
                    self.__dict__[name] = found  # calls find it at once; what is set here is set in both
                return found
        return _taken(self.__name__, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or isinstance(value, ModuleType):
            super().__setattr__(name, value)
            return
        homes = [importlib.import_module(home) for home in MEANT[self.__name__]]
        setattr(next((home for home in homes if hasattr(home, name)), homes[0]), name, value)
        self.__dict__.pop(name, None)

    def __dir__(self) -> list[str]:
        return sorted({name for home in MEANT[self.__name__] for name in dir(importlib.import_module(home))})


def _taken(module: str, name: str) -> Any:
    """A name that torch's module took from elsewhere: ours, if from a module that we stand in for; else the same."""
    why = known(module, name)
    value = vars(_originals[module]).get(name) if module in _originals and why is None else None
    is_module = isinstance(value, ModuleType)
    home = getattr(value, "__name__" if is_module else "__module__", None)
    if isinstance(home, str) and home != module:
        if home in MEANT:
            ours = importlib.import_module(home)
            return ours if is_module else getattr(ours, getattr(value, "__name__", name))
        if not home.startswith(_FAMILIES) and (is_module or callable(value)):
            return value
    raise AttributeError(
        f"module {module!r} has no attribute {name!r} while rdmarpc stands in for it: {why or 'torch has none, or it is state'}"
    )


stand_ins: dict[str, StandIn] = {}
"""By name; empty until they are where torch's modules are."""
_originals: dict[str, ModuleType] = {}


def _replace() -> None:
    """Put the stand-ins where torch's modules are, and give our names to the modules that took names from the originals. Torch
    is imported. A second time does nothing."""
    if stand_ins:
        return
    for name in MEANT:
        module = stand_ins[name] = StandIn(name)
        if name in PACKAGES:
            module.__path__ = []
        original = sys.modules.pop(name, None)
        if original is None:
            continue  # the importer asks the finder for it
        _originals[name] = original
        parent, _, own = name.rpartition(".")
        if parent not in MEANT:
            setattr(sys.modules[parent], own, module)
        if parent == "torch._C":
            sys.modules[name] = module
    # TorchScript looks at two of its functions whatever the program does.
    sys.modules["torch.distributed.autograd"] = stand_ins["torch.distributed.autograd"]
    importlib.import_module("rdmarpc.api")
    _run_scripts_as_python()
    ours: dict[int, Any] = {}
    for name, original in _originals.items():
        ours[id(original)] = stand_ins[name]
        for key, value in vars(original).items():
            home = getattr(value, "__module__", None) or ""
            if callable(value) and (home in _originals or home.startswith(_IN_C)):
                ours[id(value)] = getattr(stand_ins[name], key, value)
    for each in list(sys.modules.values()):
        if isinstance(each, ModuleType) and each not in _originals.values():
            names = list(vars(each).items())
            vars(each).update({key: ours[id(now)] for key, now in names if id(now) in ours and not isinstance(now, StandIn)})


def _run_scripts_as_python() -> None:
    """TorchScript compiles calls and references (``rpc_async``, ``RRef[Tensor]``) to those of torch's own agent, which does not
    run here. So a function with such runs as the Python that it was compiled from: the same program, which finds ours. All
    others are left as they are."""
    import torch

    compiled: Any = torch.jit.ScriptFunction.__call__

    def call(function: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            python = function._rdmarpc_python
        except AttributeError:
            text = f"{function.schema}{function.inlined_graph}"
            python = getattr(function, "_torchdynamo_inline", None) if any(mark in text for mark in _MARKS) else None
            function._rdmarpc_python = python
        return compiled(function, *args, **kwargs) if python is None else python(*args, **kwargs)

    torch.jit.ScriptFunction.__call__ = call  # type: ignore[assignment, method-assign]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in MEANT or not stand_ins:
            return None  # torch's own, while it is being imported
        return importlib.machinery.ModuleSpec(name, self, is_package=name in PACKAGES)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return stand_ins[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It has its names from ours."""


_finder = _Finder()


def register() -> None:
    """Stand in for torch's modules from now on; at once if torch is imported already. A second time does nothing."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
        after_import("torch", lambda _: _replace())


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
