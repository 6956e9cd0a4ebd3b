"""The tables of submodules, parameters and buffers of a wrapped model: what stands for something at another worker stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

TABLES = ("_modules", "_parameters", "_buffers")
"""The attributes of a module that are tables."""


def has(module: nn.Module, name: str, value: Any) -> bool:
    """Whether a module has this very parameter, buffer or module under that name: ``module.bias += 1`` sets what is there."""
    return value is not None and any(vars(module)[table].get(name) is value for table in TABLES)


class Table(dict[str, Any]):
    """An ordinary table, but that entries for which ``refuse(name, value)`` raises cannot be set, replaced or deleted
    (``value`` is ``None`` then). ``nn.Module`` and what changes modules (``parametrize``, ``prune``) go through here."""

    def __init__(self, entries: Mapping[str, Any], refuse: Callable[[str, Any], None]) -> None:
        super().__init__(entries)
        self._refuse = refuse

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self or self[name] is not value:
            self._refuse(name, value)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self._refuse(name, None)
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        if name in self:
            self._refuse(name, None)
        return super().pop(name, *default)

    def popitem(self) -> tuple[str, Any]:
        self._refuse(next(reversed(self), ""), None)
        return super().popitem()

    def clear(self) -> None:
        for name in self:
            self._refuse(name, None)
        super().clear()

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *others: Any, **more: Any) -> None:
        for name, value in dict(*others, **more).items():
            self[name] = value

    def __ior__(self, others: Any) -> Table:  # type: ignore[override, misc]
        self.update(others)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def copy(self) -> dict[str, Any]:
        return dict(self)
