"""Whether this process has one way only to a tensor: then it may be changed in place, or handed over.

Python and torch count references. How many of them a function's own variables are depends on the version (Python 3.14 borrows
where 3.11 counts), so ``references`` is never compared with a number that somebody wrote down, but with what the same lines of
code find, at import, for a tensor that surely nobody else has. Where one reference more does not show, everything counts as
shared, and is copied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch


def references(value: object) -> int:
    """How many there are to an object, with those that are only there because we ask."""
    return sys.getrefcount(value)


def storage_uses(storage: torch.UntypedStorage) -> int:
    """How many tensors have it, and Python objects: at least the one that asks."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def _kept(others: list[object] | None) -> int:
    table = {0: torch.empty(1)}
    value = table.get(0)
    if others is not None:
        others.append(value)
    return references(value)


def _passed(others: list[object] | None) -> int:
    value = torch.empty(1)
    if others is not None:
        others.append(value)
    return _received(value)


def _received(value: torch.Tensor) -> int:
    return references(value)


def _storage(others: list[object] | None) -> int:
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    if others is not None:
        others.append(storage)
    return references(storage)


def _uses(others: list[object] | None) -> int:
    tensor = torch.empty(1)
    if others is not None:
        others.append(tensor.view(1))
    storage = tensor.untyped_storage()
    return storage_uses(storage)


def _calibrated(count: Callable[[list[object] | None], int]) -> int:
    """The result of ``count`` for an object without further references; -1, which is below all counts, if ``count`` does not
    see further references."""
    alone, shared = count(None), count([])
    return alone if shared > alone else -1


KEPT = _calibrated(_kept)
"""``references`` to what lies in a table, looked up into a variable of the function that asks."""
PASSED = _calibrated(_passed)
"""``references`` to what a variable of the caller refers to, and the parameter of the function that asks."""
STORAGE = _calibrated(_storage)
"""``references`` to a storage that a variable of the function that asks refers to."""
STORAGE_USES = _calibrated(_uses)
"""``storage_uses`` of one that one tensor has, asked by way of one variable."""
