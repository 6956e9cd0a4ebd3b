"""Signatures, constants and errors as bytes: numbers, texts and tuples of them, so that reading them runs nothing."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from ..transport import RdmaError

_PLAIN = (bool, int, float, str, type(None))


class _NoNames(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a signature")


def dump(value: Any) -> bytes:
    return pickle.dumps(value, 5)


def loads(blob: bytes) -> Any:
    return _NoNames(io.BytesIO(blob)).load()


def encode(value: Any) -> Any:
    """A constant argument of an operator. ``TypeError`` for what is none."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        return ("list", [encode(each) for each in value])
    if isinstance(value, complex):
        return ("complex", value.real, value.imag)
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return ("torch", str(value)[6:])
    if isinstance(value, torch.device):
        return ("device", str(value))
    if isinstance(value, bool | int | float):
        return type(value).__mro__[1](value)
    raise TypeError(f"a {type(value).__name__} is no constant that an operator at a worker can take")


def decode(told: Any) -> Any:
    if type(told) is not tuple:
        return told
    kind, *rest = told
    if kind == "list":
        return [decode(each) for each in rest[0]]
    if kind == "complex":
        return complex(*rest)
    return torch.device(rest[0]) if kind == "device" else getattr(torch, rest[0])


def dump_error(error: BaseException, position: int) -> bytes:
    """An error with the words' position at which it happened."""
    kind = type(error)
    about: dict[str, Any]
    if isinstance(error, RdmaError):
        text, about = error.message, {"peer": error.peer, "device": error.device, "status": error.status, "hint": error.hint}
    else:
        text, about = str(error), {"errno": error.errno} if isinstance(error, OSError) else {}
    return dump((kind.__module__, kind.__qualname__, text, about, position))


def load_error(blob: bytes) -> tuple[BaseException, int]:
    """The error again: of its class where that is one of Python's or torch's, else a ``RuntimeError`` with its text."""
    module, name, text, about, position = loads(blob)
    if module == "builtins" or module.partition(".")[0] in ("torch", "rdmarpc"):
        import importlib

        try:
            kind = getattr(importlib.import_module(module), name)
            if issubclass(kind, Exception):
                number = about.pop("errno", None)
                found = kind(text, **about)
                if number is not None:
                    found.errno = number
                return found, position
        except (ImportError, AttributeError, TypeError):
            pass
    return RuntimeError(f"{name}: {text}"), position
