"""Who makes a call: the program, or a callback of a future; and calls that ranks may have in different orders.

A callback runs when its call is over, which is sooner at one rank than at another. Those of a group's own calls run before its
next call (``collectives/queue``). What callbacks of other groups and of messages call has no such place among the calls of the
program: equal ones went to each other's places, silently. The program has one order at all ranks. So if ranks differ, one of
them makes the call of the callback behind another that came after the callback's future was asked for; that rank refuses it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

from ..transport import NotSupported

stamps = itertools.count(1)
"""Calls, and futures that were asked for, in the order in which this process made them. ``next`` is atomic."""
PROGRAM = 0
_KEYS = 1024


class Caller(NamedTuple):
    """A callback. Those of one ``origin`` run in one order at all ranks: of a group's calls. Messages have one each."""

    origin: int
    since: int
    """When its future was asked for; if a callback did that, when that one's was."""
    text: str


class _Here(threading.local):
    caller: Caller | None = None


here = _Here()
"""The callback that this thread runs. One that a callback adds to a future that is over runs at once, as part of it."""


@contextmanager
def called_by(caller: Caller) -> Iterator[None]:
    before, here.caller = here.caller, caller
    try:
        yield
    finally:
        here.caller = before


class Order:
    """Calls that all ranks have to make in one order. Used by one thread at a time."""

    __slots__ = ("_of_callbacks", "_of_program")

    def __init__(self) -> None:
        self._of_program = (0, "")
        self._of_callbacks: dict[int, tuple[int, str]] = {}
        """The last calls of the last two origins."""

    def add(self, what: str) -> None:
        """This thread makes the next call. Raises ``NotSupported`` if a callback makes it behind one that it did not wait for,
        nor that one for it."""
        caller = here.caller
        if caller is None:
            self._of_program = (next(stamps), what)
            return
        last = {PROGRAM: self._of_program, **self._of_callbacks}
        late = [each for origin, each in last.items() if origin != caller.origin and each[0] > caller.since]
        if late:
            raise NotSupported(
                f"{what} by a callback of {caller.text} comes behind {max(late)[1]}, which was called after that: other ranks "
                "may have the two in another order",
                hint="wait for the callback's future before the next call, or have callbacks call their own group only",
            )
        self._of_callbacks.pop(caller.origin, None)
        self._of_callbacks[caller.origin] = (next(stamps), what)
        while len(self._of_callbacks) > 2:
            del self._of_callbacks[next(iter(self._of_callbacks))]


class Orders:
    """One for each of the 1024 keys that were used last. Used by one thread at a time."""

    def __init__(self, told: Callable[[Any], str]) -> None:
        """``told``: what people call the calls of a key."""
        self._order = lru_cache(_KEYS)(lambda key: (Order(), told(key)))

    def add(self, key: Hashable) -> None:
        """As ``Order.add``."""
        order, what = self._order(key)
        order.add(what)
