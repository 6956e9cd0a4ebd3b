"""The groups of workers that the tests of ``wrap`` share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from standing_group import StandingGroup


@pytest.fixture(scope="session")
def groups() -> Iterator[dict[Any, StandingGroup]]:
    found: dict[Any, StandingGroup] = {}
    yield found
    for group in found.values():
        group.end()


@pytest.fixture
def drive(groups: dict[Any, StandingGroup]) -> Callable[..., Any]:
    """``drive(body, *args, size=3, transport="shm")`` runs a function at worker 0 of such a group."""

    def run(body: Callable[..., Any], *args: Any, size: int = 3, transport: str = "shm", timeout: float = 60.0) -> Any:
        group = groups.setdefault((size, transport), StandingGroup(size, transport=transport))
        return group.run(body, *args, timeout=timeout)

    return run
