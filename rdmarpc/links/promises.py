"""Landing places promised to callers for the arguments of calls to come: fresh memory, each used once."""

from __future__ import annotations

import itertools
import threading

from ..message.tensors import Landing
from ..transport import Arena, ArenaFull
from .ring import Link


class Promises:
    """The landing places that one worker has promised: at most a quarter of the arena's limit. Thread-safe."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.landings: dict[tuple[Link, int], Landing] = {}
        """The promised places, by peer and number."""
        self.nbytes = 0
        """The bytes of all promised places."""
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def give(self, link: Link, sizes: tuple[int, ...]) -> tuple[int, bytes]:
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

    def take(self, link: Link, number: int) -> Landing | None:
        """Take promised places out, because they are used or given back. ``None`` if the peer holds none of that number."""
        with self._lock:
            landing = self.landings.pop((link, number), None)
            if landing is not None:
                self.nbytes -= sum(landing.sizes)
        return landing

    def forget(self, link: Link) -> list[Landing | None]:
        """The peer is gone. Returned is what it may still touch if it stopped in a copy."""
        return [self.take(link, number) for owner, number in list(self.landings) if owner is link]

    def held(self) -> dict[Link, int]:
        """The bytes of the promised places, by peer."""
        found: dict[Link, int] = {}
        for (owner, _), landing in list(self.landings.items()):
            found[owner] = found.get(owner, 0) + sum(landing.sizes)
        return found

    def count(self, link: Link) -> int:
        """The number of places that a peer holds of us."""
        return sum(owner is link for owner, _ in list(self.landings))
