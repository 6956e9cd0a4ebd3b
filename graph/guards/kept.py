"""What Python values hold at one moment, to see later whether somebody has changed them.

A model's parts have settings beside their tensors: numbers, lists, configuration objects. One that nobody can change is
*plain*. Of all others ``Kept`` remembers what they hold, through lists, dicts, sets and objects with attributes.
"""

from __future__ import annotations

import enum
import functools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from .content import items_of, pairs_of

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice, type, enum.Enum, np.generic, np.dtype),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.SymInt, torch.SymFloat, torch.SymBool),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.ModuleType),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket),
)
_MOST = 4096


def plain(value: Any) -> bool:
    """Whether nobody can change it: a number, a text, a function, a class, or a tuple of such."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(plain, items_of(value))) and not getattr(value, "__dict__", None)
    kind: Any = type(value)
    return isinstance(value, _PLAIN) or _native_enum(kind)


@functools.cache
def _native_enum(kind: type) -> bool:
    """Whether it is an enumeration of C++ (``torch.nn.attention.SDPBackend``)."""
    return type(kind).__name__ == "pybind11_type" and hasattr(kind, "__members__")


class Kept:
    """What ``values`` hold now. ``opaque`` names the type of a value inside that cannot be looked into, if there is one;
    ``foreign``: there are tensors or modules inside, which count by their identity. ``inside``: all that somebody could change,
    by ``id``."""

    def __init__(self, *values: Any) -> None:
        self.opaque = ""
        self.foreign = False
        self._pairs: list[tuple[Any, Any]] = []
        self._arrays: list[tuple[np.ndarray, np.ndarray]] = []
        self.inside: dict[int, Any] = {}
        left = list(values)
        while left:
            left.extend(self._look(left.pop()))
            if len(self.inside) > _MOST:
                self.opaque = "large structure"
                break

    def holds(self) -> bool:
        """Whether they still do."""
        try:
            if not all(live == copy for live, copy in self._pairs):
                return False
            return all(np.array_equal(live, copy, equal_nan=live.dtype.kind == "f") for live, copy in self._arrays)
        except Exception:  # values that cannot be compared: they are other ones
            return False

    def _look(self, value: Any) -> Iterator[Any]:
        """Remember what this very value holds; gives what is to be looked at next."""
        if plain(value) or id(value) in self.inside:
            return
        self.inside[id(value)] = value
        if isinstance(value, (nn.Module, torch.Tensor)):
            self.foreign = True
            return
        kind = next((kind for kind in _CONTAINERS if isinstance(value, kind)), None)
        if isinstance(value, np.ndarray) and value.dtype != object and value.nbytes <= 1 << 16:
            self._arrays.append((value, value.copy()))
        elif kind is not None:
            items = [item for _, item in pairs_of(value)] if kind is dict else items_of(value)
            if kind not in (tuple, frozenset):
                self._pairs.append((value, kind(pairs_of(value) if kind is dict else items)))
            yield from items
        elif isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, types.MethodType):
            yield value.__self__
        elif not hasattr(value, "__dict__") or type(value).__basicsize__ > _Bare.__basicsize__:
            self.opaque = self.opaque or type(value).__name__  # its state lies elsewhere, or in slots
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict and not isinstance(value, types.MethodType):
            self._pairs.append((attributes, dict(attributes)))
            yield from attributes.values()


_CONTAINERS = (dict, list, set, deque, tuple, frozenset)


class _Bare:
    """An object with nothing but ``__dict__``."""
