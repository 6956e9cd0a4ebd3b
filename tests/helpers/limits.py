"""No more files that this process may open, for as long as a test needs that."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_QUIET_S = 0.3


@contextmanager
def no_descriptors() -> Iterator[Callable[[], None]]:
    """Within, no new descriptor can be had. Other threads may still close one that they had: the function that this gives takes
    all such, until there are none for a while."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 1, hard))

    def take() -> None:
        quiet = time.monotonic()
        while time.monotonic() < quiet + _QUIET_S:
            try:
                held.append(os.dup(0))
                quiet = time.monotonic()
            except OSError:
                time.sleep(0.01)

    try:
        yield take
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)
