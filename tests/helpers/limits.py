"""Fewer files that this process may open, for as long as a test needs that."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def descriptors(limit: int) -> Iterator[None]:
    """Within, no descriptor of ``limit`` or above can be had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def lowest_free() -> int:
    """The descriptor that would be had next: as a limit, it leaves none."""
    os.close(free := os.dup(0))
    return free
