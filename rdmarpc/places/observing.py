"""Who looks on while operations are posted and run. Nobody, as a rule: each look is one ``if``.

``recording.Recorder`` is told what this process posts; ``timeline.Timeline`` what the streams of others run here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from .operators import Operator
    from .stream import Storage, Stream


class Observer(Protocol):
    """What is told of posting, in any thread. ``at``: -1 for a tensor as it was made, else its offset in elements."""

    def operation(self, op: Operator, args: Any, kwargs: Any, out: Any, place: Stream | None, /) -> None:
        """It was posted to ``place``, or has run here."""

    def brought(self, target: Stream, tensor: torch.Tensor, made: Storage, /) -> None:
        """A plain tensor was copied to a worker."""

    def crossed(self, source: Storage, at: int, meta: Any, made: Storage, /) -> None:
        """A tensor was copied from worker to worker."""

    def fetched(self, source: Stream, name: int, at: int, meta: Any, found: torch.Tensor, /) -> None:
        """A tensor was copied here."""


class Line(Protocol):
    """A timeline. Times: ns of ``time.monotonic_ns``."""

    def track(self) -> int:
        """The track of the calling thread."""

    def new_track(self, name: str, /) -> int: ...

    def span(self, track: int, name: str, category: str, begin: int, end: int, about: dict[str, Any], /) -> None: ...


observer: Observer | None = None
line: Line | None = None
