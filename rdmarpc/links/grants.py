"""The landing places that a peer has granted us for calls to come."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque

from ..transport import RemoteRegion

Classes = tuple[int, ...]
"""The size classes (``arena.size_class``) of the large runs among the arguments of a call: places for one call do for any other
of the same classes, whatever its function."""
Signature = tuple[bytes | str, tuple[int, ...]]
"""Function (by reference; of a callable that carries state: its name) and the sizes in bytes of the large runs among the
arguments: what the sizes of the result are expected by."""

_SIGNATURES = 64


class Grants:
    """The landing places that one peer has granted, by size classes. Grants of the least recently used classes are given back.
    Thread-safe.

    A call takes at most one grant and brings at most one home, so there are as many grants of some classes as calls of these
    classes were ever in flight at once."""

    def __init__(self) -> None:
        self._places: OrderedDict[Classes, deque[tuple[int, list[RemoteRegion]]]] = OrderedDict()
        self.result_sizes: OrderedDict[Signature, tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, key: Classes) -> tuple[int, list[RemoteRegion]] | None:
        try:
            return self._places[key].popleft()
        except (KeyError, IndexError):
            return None

    def expect_result(self, key: Signature, sizes: tuple[int, ...]) -> None:
        """Note the sizes that the answer to a call of this signature had. The next such call will bring places for them."""
        known = self.result_sizes.get(key)
        if (known or ()) == sizes:
            return
        with self._lock:
            self.result_sizes.pop(key, None)
            if sizes:
                self.result_sizes[key] = sizes
                if len(self.result_sizes) > 4 * _SIGNATURES:
                    self.result_sizes.popitem(last=False)

    def put(self, key: Classes, grant: int, places: list[RemoteRegion]) -> list[int]:
        """Keep a grant; returns the numbers of grants to give back."""
        with self._lock:
            self._places.setdefault(key, deque()).append((grant, places))
            self._places.move_to_end(key)
            if len(self._places) <= _SIGNATURES:
                return []
            return self._forgo(next(iter(self._places)))

    def make_room(self, key: Classes) -> list[int]:
        """The peer grants no more: the numbers of grants to give back, of other classes, those used least recently."""
        with self._lock:
            return next((self._forgo(old) for old in self._places if old != key), [])

    def _forgo(self, key: Classes) -> list[int]:
        """Take out all grants of some classes, and return their numbers. Call it with the lock held."""
        return [number for number, _ in self._places.pop(key)]

    def __len__(self) -> int:
        return sum(len(places) for places in list(self._places.values()))
