"""Sending the messages of both sides of calling, however large they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..message.tensors import Memory, Outgoing
from ..transport import PeerLost
from . import reads
from .frames import BULK, alone
from .ring import MAX_BODY, Link


class Post:
    """Sends the messages of one worker. Thread-safe. ``memory``: the source of memory for bodies that are too large for a
    frame."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.observer: Any = None
        """Told of every call, on both sides (``tools/events``), while a timeline is recorded."""

    def send(
        self,
        link: Link,
        kind: int,
        call: int,
        flags: int,
        out: Outgoing,
        function: bytes,
        payload: bytes,
        keeper: Any,
        dropped: Callable[[], None] | None = None,
    ) -> None:
        """Send a frame; it is queued where the peer's ring is full (``Link.post``, also for ``dropped``). A body too large for
        a frame (``MAX_BODY``) is left in our memory for the peer to READ: ``keeper`` (the call, or ``reads.Kept``) keeps it
        alive, and says until when memory may be waited for."""
        if self.observer is not None:
            self.observer.packed(kind, flags, out, len(payload))
        parts, tensors = (function, payload, out.table, out.data), out.tensors
        if sum(map(len, parts)) > MAX_BODY:
            deadline = None if keeper is None else keeper.deadline
            place, bulk = reads.leave(parts, tensors, self.memory, link, deadline)
            parts, tensors, flags = alone(place), 0, flags | BULK
            if keeper is not None:
                keeper.hold(bulk)
        if not link.try_send(kind, call, flags, tensors, parts):
            link.post(kind, call, flags, tensors, parts, dropped)


def tell(link: Link, kind: int, call: int, payload: bytes = b"") -> None:
    """A frame that means nothing to a peer that is lost."""
    try:
        link.post(kind, call, 0, parts=alone(payload))
    except PeerLost:
        pass
