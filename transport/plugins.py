"""Things that other packages bring by entry points: devices, capture methods."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .errors import NotSupported


def packages(group: str) -> dict[str, str]:
    """The names in a group of entry points, and the package that brings each. Imports no package."""
    return {point.name: _package(point) for point in entry_points(group=group)}


def load(group: str, name: str, what: str, *, device: str = "") -> Any | None:
    """The object behind a name; ``None`` if no package brings it. ``what`` it is, and ``device``, are for the ``NotSupported``
    that is raised if it cannot be loaded."""
    for point in entry_points(group=group, name=name):
        try:
            return point.load()
        except Exception as error:
            why = f"the {what} {name!r} of {_package(point)} cannot be loaded: {error}"
            raise NotSupported(why, device=device, hint=f"entry point {point.value} of {group}") from error
    return None


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module
