"""Whether this process has only one reference to a tensor: then it may be changed in place, or handed over.

Python and torch count references. How many of them are a function's own variables depends on the version (Python 3.14 borrows
where 3.11 counts). So ``references`` is never compared with a written number, but with the count that the same lines of code
find, at import, for a tensor that certainly has no other reference. If a further reference does not raise that count, every
tensor counts as shared, and is copied.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable

import torch

references = sys.getrefcount
"""The number of references to an object, with those that exist only because of this call."""


storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
"""The number of tensors and Python objects that refer to the storage with this ``_cdata``."""


def _kept(others: deque[object]) -> int:
    table = {0: torch.empty(1, device="cpu")}
    value = table.get(0)
    others.append(value)
    return references(value)


def _passed(others: deque[object]) -> int:
    value = torch.empty(1, device="cpu")
    others.append(value)
    return _received(value)


def _received(value: torch.Tensor) -> int:
    return references(value)


def _storage(others: deque[object]) -> int:
    tensor = torch.empty(1, device="cpu")
    storage = tensor.untyped_storage()
    others.append(storage)
    return references(storage)


def _uses(others: deque[object]) -> int:
    tensor = torch.empty(1, device="cpu")
    others.append(tensor.view(1))
    storage = tensor.untyped_storage()
    return storage_uses(storage._cdata)


def _calibrated(count: Callable[[deque[object]], int]) -> int:
    """The result of ``count`` for an object without further references; -1, which is below all counts, if ``count`` does not
    see further references."""
    alone, shared = count(deque(maxlen=0)), count(deque())
    return alone if shared > alone else -1


KEPT = _calibrated(_kept)
"""``references`` of an unshared object in a table, which the asking function has looked up into a variable."""
PASSED = _calibrated(_passed)
"""``references`` of an unshared object in a variable of the caller and the parameter of the asking function."""
STORAGE = _calibrated(_storage)
"""``references`` of an unshared storage in a variable of the asking function."""
STORAGE_USES = _calibrated(_uses)
"""``storage_uses`` of the storage of a single tensor, in a variable of the asking function."""
