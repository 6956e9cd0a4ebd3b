"""TorchScript objects in calls: functions travel by name, as Python's do; modules as ``torch.jit.save`` writes them."""

from __future__ import annotations

import importlib
import io
import pickle
import re
from functools import reduce
from typing import Any

import torch

from . import serialize

_MANGLED = re.compile(r"___torch_mangle_\d+\.")


class ScriptError(torch.jit.Error, RuntimeError):
    """What a TorchScript function raised at the callee. Programs written for torch's RPC catch ``RuntimeError``."""


def _find(module: str, name: str) -> Any:
    return reduce(getattr, name.split("."), importlib.import_module(module))


def _function(function: torch.jit.ScriptFunction, message: serialize.Message) -> Any:
    module, _, name = _MANGLED.sub("", function.qualified_name).removeprefix("__torch__.").rpartition(".")
    try:
        found = _find(module, name)
    except (ImportError, AttributeError, ValueError):
        found = None
    if found is not function:
        raise pickle.PicklingError(f"Can't pickle the TorchScript function {name}: it is not found as {module}.{name}")
    return _find, (module, name)


def _module(module: torch.jit.ScriptModule, message: serialize.Message) -> Any:
    file = io.BytesIO()
    torch.jit.save(module, file)
    return _load, (file.getvalue(),)


def _load(data: bytes) -> torch.jit.ScriptModule:
    return torch.jit.load(io.BytesIO(data))


serialize.register_reducer(torch.jit.ScriptFunction, _function)
serialize.register_reducer(torch.jit.RecursiveScriptModule, _module)
