"""Notification numbers of one poller, each with the function that handles it; recycled, never watched twice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...transport import Channel, Poller

Handler = Callable[[int], None]


class Ports:
    """Numbers are taken by any thread; handlers run on the thread that polls, with the count of new notifications."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._handlers: dict[int, Handler] = {}
        self._rows: dict[tuple[Channel, int], int] = {}
        # First in, first out: the longer a number rests, the surer is a late notification on it seen as one.
        self._free: dict[Channel, deque[int]] = {}

    def take(self, channel: Channel, handler: Handler) -> int:
        """A number that the peer of this channel may notify from now on."""
        resting = self._free.get(channel)
        if resting:
            number = resting.popleft()
            self._handlers[self._rows[channel, number]] = handler
            return number
        number = channel.take_numbers(1)
        row = self._poller.add(channel, number)
        self._rows[channel, number] = row
        self._handlers[row] = handler
        return number

    def give_back(self, channel: Channel, number: int) -> None:
        """The peer will not notify this number any more; it may serve another edge. What it did notify and nobody has taken yet
        (credits of a last step, mostly) ends here. By the thread that polls."""
        row = self._rows[channel, number]
        self._handlers.pop(row, None)
        self._poller.skip(row)
        self._free.setdefault(channel, deque()).append(number)

    def handle(self, row: int, count: int) -> None:
        handler = self._handlers.get(row)
        if handler is not None:
            handler(count)
