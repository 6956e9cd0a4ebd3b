"""The modules under torch's names."""

from __future__ import annotations

import importlib
import sys
from types import FunctionType, ModuleType
from typing import Any

from . import differences

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
_FAMILIES = (
    "torch.distributed.rpc",
    "torch._C._distributed_rpc",
    "torch.distributed.autograd",
    "torch._C._distributed_autograd",
)
"""What is defined in these works with torch's own agent."""


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
    why = differences.known(module, name)
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


def replace() -> None:
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
    importlib.import_module("rdmarpc.tools.scripts")
    ours: dict[int, Any] = {}
    for name, original in _originals.items():
        ours[id(original)] = stand_ins[name]
        for key, value in vars(original).items():
            if callable(value) and _of_the_original(value):
                meant = getattr(stand_ins[name], key, value)
                ours[id(value)] = meant
    for each in list(sys.modules.values()):
        if isinstance(each, ModuleType) and each not in _originals.values():
            _give(vars(each), ours)


def _of_the_original(value: Any) -> bool:
    home = getattr(value, "__module__", None) or ""
    return home in _originals or home.startswith(("torch._C._distributed_rpc", "torch._C._distributed_autograd"))


def _give(names: dict[str, Any], ours: dict[int, Any]) -> None:
    for name, value in list(names.items()):
        if id(value) in ours and not isinstance(value, StandIn):
            names[name] = ours[id(value)]
