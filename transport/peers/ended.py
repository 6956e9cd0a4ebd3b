"""A callable that does nothing, in the place of one that was let go."""

from __future__ import annotations


def nobody(*_: object) -> None:
    """In place of a callback whose owner has ended, so that whoever would call it does not keep the owner alive."""
