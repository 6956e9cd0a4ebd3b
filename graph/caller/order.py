"""Whether the caller's segments draw random numbers in the order of the forward.

What a capture has seen to draw runs in that order. A module that stays one operation may begin to draw later, without a new
capture: by its probability, a flag, a count of calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...transport import NotSupported
from ..guards.generators import torch_mark
from ..plan.program import Segment

_START = (-1, -1)


class Order:
    """``late``: modules that may draw although no capture has seen it: the next one is to take them for such."""

    def __init__(self) -> None:
        self.late: set[str] = set()
        self._end, self._unknown = _START, False

    def begin(self) -> None:
        """A forward, or a batch of them."""
        self._end, self._unknown = _START, False

    @contextmanager
    def around(self, segment: Segment, micro: int = 0) -> Iterator[None]:
        """Around a segment of one micro-batch. ``NotSupported`` if it has drawn what others should have drawn before it."""
        if not any(step.kind == "module" for step in segment.instructions):
            yield
            return
        mark = torch_mark()
        yield
        if torch_mark() != mark:
            if not segment.draws:
                self._unknown = True
                self.late.update(step.target for step in segment.instructions if step.kind == "module")
            self._drawn((micro, segment.first), (micro, segment.last), str(segment))

    def loss(self, micro: int) -> None:
        """The loss function of a micro-batch has drawn."""
        self._drawn((micro, 1 << 62), (micro, 1 << 62), "the loss function")

    def _drawn(self, first: tuple[int, int], last: tuple[int, int], who: str) -> None:
        late = first <= self._end
        self._end = max(self._end, last)
        if late and self._unknown:
            raise NotSupported(
                f"{who} draws random numbers, and did not when the forward was captured: other numbers than in one process",
                hint="this is known from now on: call the model again",
            )
