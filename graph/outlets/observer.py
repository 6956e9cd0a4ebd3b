"""The observer of the wrapped models of this process while they step: one at a time, such as a timeline.

The code that steps looks at ``current`` once a segment, once a stage, and once a copy from or to an accelerator. While
``current`` is ``None``, that look is the whole cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ...transport.channel import DONE, Work
from ..plan.place import Edge


class Copy:
    """``work`` is set once the copy is under way; it stays ``DONE`` where that failed."""

    work: Work = DONE


class Observer(Protocol):
    """Called by the thread that does what is observed, perhaps once more when it is not ``current`` any longer; the contexts
    last as long as what they are of."""

    def span(self, name: str, about: dict[str, Any], gpus: Sequence[str] = (), /) -> AbstractContextManager[object]:
        """Something that this thread does; on ``gpus`` it enqueues work on the current streams."""

    def copy(self, edge: Edge, gpu: str, sequence: int, /) -> AbstractContextManager[Copy]:
        """A copy that this accelerator makes, for the forward of that sequence, is posted."""


current: Observer | None = None
