"""The globals that the parts of one model at other workers name: whether they are the same ones here and there."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from .side_effects import Globals

Compare = Callable[[str, Mapping[str, Mapping[str, str]]], Mapping[str, str]]
"""Of a worker and the ``Globals.values`` of its parts, by path: a global of a part that the worker has otherwise, by path."""


class Elsewhere:
    """``homes``: the workers of the parts, by path. Asks a worker when it begins to follow a part, and never again."""

    def __init__(self, homes: Mapping[str, str], compare: Compare) -> None:
        self._homes, self._compare = homes, compare
        self._followed: dict[str, list[Globals]] = {}
        self._other: dict[str, str] = {}

    def follow(self, parts: Mapping[str, nn.Module]) -> None:
        """From now on, what the code of these parts names, and what was not followed yet."""
        new: dict[str, dict[str, dict[str, str]]] = {}
        for path, part in parts.items():
            followed = self._followed.setdefault(path, [])
            if found := Globals(part, followed):
                followed.append(found)
                if found.own:
                    self._other.setdefault(path, f"{found.own}, which every thread has for itself,")
                new.setdefault(self._homes[path], {})[path] = found.values()
        for worker, values in new.items():
            self._other = {**self._compare(worker, values), **self._other}

    def part_of(self, path: str) -> str:
        """The part that has this module."""
        return next(part for part in self._homes if f"{path}.".startswith(f"{part}."))

    def other(self, path: str = "") -> str:
        """A global that a worker has otherwise: when its part began to be followed, or as it has changed here since.
        ``path``: of the part that has this module, instead of any part."""
        parts = [part for part in self._followed if not path or f"{path}.".startswith(f"{part}.")]
        for part in parts:
            found = (self._other.get(part, ""), *(followed.changed() for followed in self._followed[part]))
            if label := next(filter(None, found), ""):
                return label
        return ""
