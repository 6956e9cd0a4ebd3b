"""A callable that does nothing, in the place of one that was let go."""

from __future__ import annotations


def nobody(*_: object) -> None:
    """A callback that does nothing. It replaces the callback of an owner that has ended, which would else be kept alive."""
