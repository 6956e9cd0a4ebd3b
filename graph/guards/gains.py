"""What a module remembers in a private table of its own: objects of its own classes that hold no data.

A library that dispatches by the class of a tensor keeps what it has found (``_of_class[type(x)] = _Backend()``). Every process
fills such a table for itself, and computes the same. So a table that gains such entries, and nothing else, has not changed to
those who look. What comes of the entries afterwards counts as ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .content import fields_of, is_data, pairs_of
from .roots import Root


def table_of(root: Root) -> dict[Any, Any] | None:
    """What is in this global now, if it is a private table of its module."""
    value = root.value()
    private = root.name.startswith("_") and isinstance(root.table, dict) and "__name__" in root.table
    return dict(pairs_of(value)) if private and type(value) is dict else None


def only_gains(root: Root, before: Mapping[Any, Any]) -> bool:
    """Whether a table that had these entries has more now, all of this kind."""
    now = table_of(root)
    if now is None or len(now) <= len(before):
        return False
    if any(key not in now or now[key] is not value for key, value in before.items()):
        return False
    new = [(key, value) for key, value in now.items() if key not in before]
    own = root.table["__name__"]
    return all(isinstance(key, (str, type)) and type(value).__module__ == own and not _data_in(value) for key, value in new)


def _data_in(value: Any) -> bool:
    """Whether an object holds more than functions, classes, modules and texts."""
    return any(is_data(item) and not isinstance(item, str) for fields in fields_of(value) for item in fields.values())
