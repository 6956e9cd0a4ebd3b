"""TorchScript objects in calls. Functions travel by name: where Python finds them, or else as the receiver has compiled them,
too. Modules travel as ``torch.jit.save`` writes them."""

from __future__ import annotations

import importlib
import io
import re
from functools import reduce
from types import FunctionType
from typing import Any

import torch

from . import serialize

_MANGLED = re.compile(r"___torch_mangle_\d+\.")


class ScriptError(torch.jit.Error, RuntimeError):
    """What a TorchScript function raised at the callee. Programs written for torch's RPC catch ``RuntimeError``."""


def _find(module: str, name: str) -> Any:
    return reduce(getattr, name.split("."), importlib.import_module(module))


def _place(qualified_name: str) -> tuple[str, str]:
    """The module and the name under which TorchScript found the Python of a function."""
    module, _, name = _MANGLED.sub("", qualified_name).removeprefix("__torch__.").rpartition(".")
    return module, name


def _found(module: str, name: str) -> Any:
    try:
        return _find(module, name)
    except (ImportError, AttributeError, ValueError):
        return None


def _function(function: torch.jit.ScriptFunction, message: serialize.Message) -> Any:
    place = _place(function.qualified_name)
    return (_find, place) if _found(*place) is function else (_compiled, (function.qualified_name,))


def _compiled(qualified_name: str) -> torch.jit.ScriptFunction:
    """A function that has been compiled in this process, too, under the same name: ``torch.jit.script`` and ``trace`` need not
    leave it where Python finds it."""
    found = torch.jit._state._python_cu.find_function(qualified_name)
    if found is None:
        name = qualified_name.rpartition(".")[2]
        raise RuntimeError(f"attempted to get undefined function {name}: this worker has not compiled {qualified_name}")
    python = _found(*_place(qualified_name))
    if isinstance(python, FunctionType):
        found._torchdynamo_inline = python  # type: ignore[attr-defined] # as ``torch.jit.script`` notes it
    return found


def check(function: Any, args: tuple[Any, ...]) -> None:
    """Raise ``RuntimeError`` for too many arguments: as torch does, at the caller. All else is found out where it runs."""
    if len(args) > (most := len(function.schema.arguments)):
        raise RuntimeError(
            f"{function.name}() expected at most {most} argument(s) but received {len(args)} argument(s). "
            f"Declaration: {function.schema}"
        )


def _module(module: torch.jit.ScriptModule, message: serialize.Message) -> Any:
    return load, (save(module),)


def _native_module(module: torch._C.ScriptModule, message: serialize.Message) -> Any:
    """A module as TorchScript's own functions return it."""
    return _module(torch.jit._recursive.wrap_cpp_module(module), message)


def save(module: torch.jit.ScriptModule) -> bytes:
    file = io.BytesIO()
    torch.jit.save(module, file)
    return file.getvalue()


def load(data: bytes) -> torch.jit.ScriptModule:
    return torch.jit.load(io.BytesIO(data))


serialize.register_reducer(torch.jit.ScriptFunction, _function)
serialize.register_reducer(torch.jit.RecursiveScriptModule, _module)
serialize.register_reducer(torch._C.ScriptModule, _native_module)
