"""Control messages that the other end of a channel answers, and the wait for these answers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from ..errors import TransferTimeout, fresh

ANSWER_TIMEOUT_S = 60.0
"""Seconds that a living peer has for its answer. The answer needs a Python thread there, and another one may hold the GIL. A
process that does not run at all is lost after ``peer_timeout``."""


class Questions:
    """The unanswered questions of one channel. An answer has the question's kind plus one, and the same number. Thread-safe. It
    does not refer to the channel, which would else stay alive."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._asked: dict[tuple[int, int], threading.Event] = {}
        self._numbers = itertools.count(1)

    def number(self) -> int:
        """A fresh number, for a question that is not about a numbered thing such as a region."""
        return next(self._numbers)

    def ask(
        self, channel: Any, send: Callable[[int, int], None], kind: int, number: int, known: Callable[[], bool] = lambda: False
    ) -> None:
        """Call ``send(kind, number)`` over our ``Channel``, and wait until the answer has come or ``known()`` is true without
        it. Never call this on the thread that hears the peer. Raises the error that ended the channel, and
        ``TransferTimeout``."""
        answer = kind + 1, number
        answered = self._asked.setdefault(answer, threading.Event())

        def over() -> bool:
            return answered.is_set() or channel.error is not None or known()

        try:
            send(kind, number)
            with self._news:
                heard = self._news.wait_for(over, ANSWER_TIMEOUT_S)
        finally:
            self._asked.pop(answer, None)
        if channel.error is not None:
            raise fresh(channel.error)
        if not heard:
            why = "the peer did not acknowledge a control message"
            raise TransferTimeout(why, peer=channel.peer, device=channel.device.name)

    def answer(self, kind: int, number: int) -> None:
        """Enter an answer that came."""
        with self._news:
            if event := self._asked.get((kind, number)):
                event.set()
            self._news.notify_all()

    def news(self) -> None:
        """Have the waiting threads look again: ``known()`` may have changed, or the channel has ended."""
        with self._news:
            self._news.notify_all()
