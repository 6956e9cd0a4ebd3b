"""Landing places for calls to come: those that a peer has granted us, and those that we have promised to callers."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, deque
from typing import Any

from ..message.tensors import Landing, size_classes
from ..transport import Arena, ArenaFull, RemoteRegion

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
        self.refused = 0
        """The number of grants with landing places that fit no call of ours."""
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

    def put(self, sizes: tuple[int, ...], grant: int, places: list[RemoteRegion]) -> list[int]:
        """The answer to a call with arguments of these sizes came. Keep what it grants; where it grants nothing (0) the peer
        has promised as much as it may. Returns the numbers of grants to give back: all of the classes used least recently."""
        key, old = size_classes(sizes), None
        if grant and not 0 < len(places) == len(sizes):
            self.refused += 1
            grant = 0
        with self._lock:
            if grant:
                self._places.setdefault(key, deque()).append((grant, places))
                self._places.move_to_end(key)
            if (sizes and not grant) or len(self._places) > _SIGNATURES:
                old = next((each for each in self._places if each != key), None)
            return [] if old is None else [number for number, _ in self._places.pop(old)]

    def __len__(self) -> int:
        return sum(len(places) for places in list(self._places.values()))


class Promises:
    """The landing places that one worker has promised to callers (each a ``Link``), for the arguments of calls to come: fresh
    memory, each used once, at most a quarter of the arena's limit. Thread-safe."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.landings: dict[tuple[Any, int], Landing] = {}
        """The promised places, by peer and number."""
        self.nbytes = 0
        """The bytes of all promised places."""
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def give(self, link: Any, sizes: tuple[int, ...]) -> tuple[int, bytes]:
        """Promise fresh memory for the next call of this signature; (0, b"") when enough has been promised."""
        total = sum(sizes)
        if not total or self.nbytes + total > self._arena.limit // 4:
            return 0, b""
        try:
            landing = Landing(link.channel, sizes)
        except ArenaFull:
            return 0, b""
        number = next(self._numbers)
        with self._lock:
            self.landings[link, number] = landing
            self.nbytes += total
        return number, landing.places

    def take(self, link: Any, number: int) -> Landing | None:
        """Take promised places out, because they are used or given back. ``None`` if the peer holds none of that number."""
        with self._lock:
            landing = self.landings.pop((link, number), None)
            if landing is not None:
                self.nbytes -= sum(landing.sizes)
        return landing

    def forget(self, link: Any) -> list[Landing | None]:
        """The peer is gone. Returned is what it may still touch if it stopped in a copy."""
        return [self.take(link, number) for owner, number in list(self.landings) if owner is link]

    def held(self) -> dict[Any, int]:
        """The bytes of the promised places, by peer."""
        found: dict[Any, int] = {}
        for (owner, _), landing in list(self.landings.items()):
            found[owner] = found.get(owner, 0) + sum(landing.sizes)
        return found

    def count(self, link: Any) -> int:
        """The number of places that a peer holds of us."""
        return sum(owner is link for owner, _ in list(self.landings))
