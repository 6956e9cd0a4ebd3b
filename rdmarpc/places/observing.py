"""Who looks on while operations are posted and run. Nobody, as a rule: each look is one ``if``.

``recording.Recorder`` is told what this process posts; ``timeline.Timeline`` what the streams of others run here.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

import torch


class Observer(Protocol):
    """What is told of posting, in any thread; it looks at what ``thread`` posts. ``at``: -1 for a tensor as it was made, else
    its offset in elements."""

    thread: int

    def operation(self, op: Any, args: Any, kwargs: Any, out: Any, place: Any, /) -> None:
        """It was posted to ``place``, or has run here."""

    def brought(self, target: Any, tensor: torch.Tensor, made: Any, /) -> None:
        """A plain tensor was copied to a worker."""

    def crossed(self, source: Any, at: int, meta: Any, shift: int, made: Any, /) -> None:
        """A tensor was copied from worker to worker, to ``shift`` bytes behind an aligned address."""

    def fetched(self, source: Any, name: int, at: int, meta: Any, found: torch.Tensor, /) -> None:
        """A tensor was copied here."""


observers: tuple[Observer, ...] = ()
_lock = threading.Lock()
line: Any = None
"""The ``timeline.Timeline`` that is recorded, if one is."""


def begin(observer: Observer) -> None:
    """Tell this one of what is posted, until ``end``."""
    global observers
    with _lock:  # others begin and end in their threads
        observers = (*observers, observer)


def end(observer: Observer) -> None:
    """Idempotent."""
    global observers
    with _lock:
        observers = tuple(each for each in observers if each is not observer)


class _Capture(threading.local):
    """Which capture of a step is under way in this thread (``graphed``), or 0: it must see all copies that the step needs, so
    none from before, and none that another thread makes meanwhile."""

    number = 0


capture = _Capture()
capturing = threading.Lock()
"""Held by the thread that captures: one at a time."""
copied: list[Any] = []
"""Storages of which it has seen copies."""
graphs: weakref.WeakSet[Any] = weakref.WeakSet()
"""Steps that are graphed: what they hold of a model is in the way of moving it."""
