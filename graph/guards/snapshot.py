"""What Python containers are before a trace, to see what it has changed in them and to put it back."""

from __future__ import annotations

import builtins
import itertools
import random
import types
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from .content import MISSING, fields_of, foreign, items_of, pairs_of


class Snapshot:
    """Containers as they are now. ``changed`` says which are not any more, ``restore`` makes them so again."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, Any, str]] = {}
        self._met: dict[int, Any] = {}

    def add(self, value: Any, label: str) -> None:
        """This value and all containers in it, but what is in modules."""
        left = [value]
        while left and len(self._met) < 200_000:
            value = left.pop()
            if type(value) in _LEAVES or isinstance(value, _CLOSED) or id(value) in self._met or value is vars(builtins):
                continue
            self._met[id(value)] = value
            self.keep(value, label)
            left += _items(value)

    def keep(self, value: Any, label: str) -> None:
        """This one alone."""
        copy = _copy(value)
        if copy is not None:
            self._kept[id(value)] = value, copy, label

    def met(self, key: int) -> bool:
        """Whether an object of this ``id`` was among them."""
        return key in self._met

    def changed(self) -> dict[int, tuple[Any, Any, str]]:
        """By ``id``: the container, what it had, its label."""
        return {key: item for key, item in self._kept.items() if not _same(item[0], item[1])}

    def restore(self) -> None:
        for value, copy, _ in self.changed().values():
            _put_back(value, copy)


def _items(value: Any) -> list[Any]:
    if isinstance(value, (dict, types.MappingProxyType)):
        own = [vars(value)] if type(value) is not dict and hasattr(value, "__dict__") else []
        return [*(item for _, item in pairs_of(value)), *own]
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return items_of(value)
    if isinstance(value, Mapping):
        return fields_of(value) or [*value.values()]
    if isinstance(value, random.Random):
        return []
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if foreign(type(value).__module__) and type(value).__module__ not in ("types", "argparse"):
        return []
    return fields_of(value)


def _copy(value: Any) -> Any:
    if isinstance(value, (list, deque)):
        return tuple(items_of(value))
    if isinstance(value, dict):
        return tuple(pairs_of(value))
    if isinstance(value, set):
        return frozenset(items_of(value))
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().untyped_storage()), value.get_state()
    kind = type(value)  # not the value: it may have an answer to every name
    if kind.__module__.startswith("numpy.random") and hasattr(value, "bit_generator"):
        return repr(value.bit_generator.state), value.bit_generator.state
    if hasattr(kind, "tobytes") and hasattr(kind, "nbytes") and value.nbytes <= 1 << 20:
        return value.tobytes(), value.copy()
    return None


def _same(value: Any, copy: Any) -> bool:
    if isinstance(value, (list, deque)):
        items = items_of(value)
        return len(items) == len(copy) and all(a is b for a, b in zip(items, copy))
    if isinstance(value, dict):
        pairs = pairs_of(value)
        return len(pairs) == len(copy) and all(k is n and a is b for (k, a), (n, b) in zip(pairs, copy))
    if isinstance(value, set):
        return set(items_of(value)) == copy
    now = _copy(value)
    return bool(now == copy if isinstance(value, random.Random) else now[0] == copy[0])


def _put_back(value: Any, copy: Any) -> None:
    if isinstance(value, (list, deque)):
        kind: Any = list if isinstance(value, list) else deque
        kind.clear(value)
        kind.extend(value, copy)
    elif isinstance(value, dict):
        _put_back_items(value, dict(copy))
    elif isinstance(value, set):
        set.clear(value)
        set.update(value, copy)
    elif isinstance(value, random.Random):
        value.setstate(copy)
    elif isinstance(value, torch.Generator):
        value.set_state(copy[1])
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = copy[1]
    else:
        value[...] = copy[1]


def _put_back_items(value: dict[Any, Any], before: dict[Any, Any]) -> None:
    # A class may have methods of its own for this; an ``OrderedDict`` has to know.
    kind = OrderedDict if isinstance(value, OrderedDict) else dict
    keys = items_of(value)
    # Other threads may read it, the globals of a module for example: what stands where it stood stays there meanwhile.
    stays = list(itertools.takewhile(lambda pair: pair[0] is pair[1], zip(keys, before)))
    for key in keys[len(stays) :]:
        kind.__delitem__(value, key)
    for key, item in before.items():
        if dict.get(value, key, MISSING) is not item:
            kind.__setitem__(value, key, item)


_LEAVES = frozenset([int, float, bool, str, bytes, complex, type(None), torch.Tensor, nn.Parameter, torch.dtype, torch.Size])
_CLOSED = (
    nn.Module,
    torch.Tensor,
    fx.Proxy,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.CodeType,
)
