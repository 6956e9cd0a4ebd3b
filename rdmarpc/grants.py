"""The landing places that a peer has granted us for calls to come."""

from __future__ import annotations

from collections import OrderedDict, deque

from .transport import RemoteRegion

Signature = tuple[bytes, tuple[int, ...]]
"""Function (by reference) and the sizes in bytes of the large tensors among its arguments."""

_SIGNATURES = 64


class Grants:
    """By signature; those of the signatures used least recently are given back. Thread-safe."""

    def __init__(self) -> None:
        self._places: OrderedDict[Signature, deque[tuple[int, list[RemoteRegion]]]] = OrderedDict()
        self.result_sizes: dict[Signature, tuple[int, ...]] = {}

    def take(self, key: Signature) -> tuple[int, list[RemoteRegion]] | None:
        try:
            return self._places[key].popleft()
        except (KeyError, IndexError):
            return None

    def expect_result(self, key: Signature, sizes: tuple[int, ...]) -> None:
        """What the answer to a call of this signature had to land: the next one will get a place for as much."""
        if sizes:
            self.result_sizes[key] = sizes
        elif key in self.result_sizes:
            self.result_sizes.pop(key, None)

    def put(self, key: Signature, grant: int, places: list[RemoteRegion]) -> list[int]:
        """Keep a grant; returns the numbers of grants to give back."""
        self._places.setdefault(key, deque()).append((grant, places))
        try:
            self._places.move_to_end(key)
            if len(self._places) <= _SIGNATURES:
                return []
            old, forgone = self._places.popitem(last=False)
        except KeyError:  # another thread was faster
            return []
        self.result_sizes.pop(old, None)
        return [number for number, _ in forgone]

    def __len__(self) -> int:
        return sum(len(places) for places in list(self._places.values()))
