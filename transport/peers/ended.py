"""What is called in place of those who have let go."""

from __future__ import annotations


def nobody(*_: object) -> None:
    """In place of a callback whose owner has ended, so that whoever would call it does not keep the owner alive."""
