"""A message that could not be sent: its references, and the GPU memory that it lends, are taken back."""

from __future__ import annotations

from ..links.frames import FLAT, without_head
from ..message import serialize
from .context import RRefContext


def take_back(rrefs: RRefContext, to: int, kind: int, flags: int, payload: bytes) -> None:
    """The references in a request or an answer that was not sent to worker ``to``, and the GPU memory that it lends."""
    if not flags & FLAT and payload:
        payload = without_head(kind, flags, payload)
        rrefs.undo(to, payload)
        serialize.undo(to, payload)
