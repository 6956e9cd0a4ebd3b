"""What is to be closed, and was dropped instead."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

_MANY = 8


class Closable(Protocol):
    closed: bool


T = TypeVar("T", bound=Closable)


class Dropped(Generic[T]):
    """Those that nobody has any more and nobody has closed: alive once more, until somebody takes them."""

    def __init__(self) -> None:
        self._left: deque[T] = deque()

    def watch(self, owner: T) -> object:
        """What the owner keeps, in an attribute."""
        return _End(owner, self._left)

    def take(self, opened: int) -> Iterator[T]:
        """Each of them, once. Where many are ``opened``, those in circles are looked for."""
        if opened >= _MANY:
            gc.collect()
        while self._left:
            yield self._left.popleft()


class _End(Generic[T]):
    """Dies with its owner."""

    def __init__(self, owner: T, left: deque[T]) -> None:
        self._owner, self._left = owner, left

    def __del__(self) -> None:
        # In any thread, at any moment, perhaps within a lock: no calls here.
        if not self._owner.closed:
            self._left.append(self._owner)
