"""Control messages that one end of a channel sends and waits to be answered."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Protocol

from ..errors import RdmaError, TransferTimeout, fresh

ANSWER_TIMEOUT_S = 60.0
"""How long a peer that lives has for an answer that takes a thread of Python there: one of its threads may hold the GIL. One
that does not run at all is lost after ``peer_timeout``."""


class Named(Protocol):
    @property
    def name(self) -> str: ...


class Asking(Protocol):
    """Our end of a connection (``Channel``)."""

    peer: str
    error: RdmaError | None

    @property
    def device(self) -> Named: ...


class Questions:
    """Of one channel. The answer to a message of a kind has the next kind, and the same number. Thread-safe; refers to no
    channel, which would keep it."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._asked: dict[tuple[int, int], threading.Event] = {}
        self._numbers = itertools.count(1)

    def number(self) -> int:
        """Of a question that is about nothing that has one."""
        return next(self._numbers)

    def ask(
        self,
        channel: Asking,
        send: Callable[[int, int], None],
        kind: int,
        number: int,
        known: Callable[[], bool] = lambda: False,
    ) -> None:
        """``send(kind, number)``, and wait for the answer, or until what it would tell is ``known``. Never on the thread that
        hears the peer. Raises why the channel ended; ``TransferTimeout``."""
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
            raise TransferTimeout(
                "the peer did not acknowledge a control message", peer=channel.peer, device=channel.device.name
            )

    def answer(self, kind: int, number: int) -> None:
        """An answer came."""
        with self._news:
            if event := self._asked.get((kind, number)):
                event.set()
            self._news.notify_all()

    def news(self) -> None:
        """Something came that may be ``known`` now, or the channel has ended."""
        with self._news:
            self._news.notify_all()
