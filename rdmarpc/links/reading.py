"""Reading the frames of peers: each goes to the handler of its kind."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

from ..transport import Guard, Poller, RdmaError, broken_by, nobody
from .frames import GOODBYE, GRADIENTS, Frame, NotTheirs
from .losses import Losses
from .polling.progress import Progress
from .ring import CREDIT_DUE, Link
from .table import Links

Handler = Callable[[Link, Frame], None]
"""Takes a frame, on the thread that reads for everybody: never blocks. ``NotTheirs``, or any other error, ends the link."""


def _goodbye(link: Link, frame: Frame) -> None:
    raised, words = frame.body[: frame.function], frame.body[frame.function :]
    link.goodbye = raised.decode(errors="replace"), words.decode(errors="replace")


class Reading:
    """Reads the frames of one worker's peers. Only the holder of the polling role calls ``read``. ``resume(link)`` is called
    after frames were read from a peer of which requests are held."""

    def __init__(
        self,
        links: Links,
        losses: Losses,
        progress: Progress,
        device: str,
        resume: Callable[[Link], None],
        takes: dict[int, Handler],
    ) -> None:
        """``takes``: the handlers, by kind of frame."""
        self._links, self._losses, self._rows, self._completed = links, losses, links.rows, progress.completed
        self._device, self._resume, self._guard = device, resume, Guard("rdmarpc")
        self.handlers: list[Handler] = [nobody] * (GRADIENTS + 1)
        for kind, handler in (takes | {GOODBYE: _goodbye}).items():
            self.handlers[kind] = handler

    def read(self, row: int, fresh: int) -> None:
        """Read the frames that were announced."""
        if row == Poller.KICK:
            while self._links.gone_rows:
                self._links.forget_row(self._links.gone_rows.popleft())
            return
        link = self._rows.get(row)
        while link is None:  # added a moment ago by another thread
            time.sleep(0)
            link = self._rows.get(row)
        for _ in range(fresh):
            try:
                frame = link.read()
            except RdmaError as error:
                self._losses.refuse(link, error)
                return
            if frame is None:
                continue
            try:
                self.handlers[frame.kind](link, frame)
            except Exception as error:  # this thread reads for all peers, so one peer's error must not end it
                self._refuse(link, frame.kind, error)
                return
        if link.behind:
            link.flush()
            self._completed()
        if link.held.any:
            self._resume(link)
        if link.taken - link.told > CREDIT_DUE:
            link.give_credit()

    def _refuse(self, link: Link, kind: int, error: Exception) -> None:
        if isinstance(error, struct.error):
            why = RdmaError(f"what came is no message (frame of kind {kind}: {error})", peer=link.name)
        elif isinstance(error, NotTheirs):
            why = error
        else:
            self._guard.note(error, "handling a message")
            why = broken_by(error, "handling its message", peer=link.name, device=self._device)
        self._losses.refuse(link, why)

    def close(self) -> None:
        """Drop all frames that are read from now on."""
        self.handlers = [nobody] * (GRADIENTS + 1)
