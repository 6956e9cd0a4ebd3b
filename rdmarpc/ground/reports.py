"""What rooms above add to ``rdmarpc.explain``."""

from __future__ import annotations

from collections.abc import Callable

sources: list[Callable[[], list[str]]] = []
"""Each gives lines for people. Called in any thread."""
