"""The one place that checks timeouts. They are seconds."""

from __future__ import annotations

import math
import threading
from numbers import Real

LONGEST_S = threading.TIMEOUT_MAX / 2
"""Some 146 years: with the time of a clock added it is still a number of nanoseconds in 64 bits. Longer timeouts, infinite ones
too, are as this."""
_SOCKET_S = (2**31 - 1) // 1000


def seconds(timeout: float, what: str = "a timeout") -> float:
    """``timeout`` as a number that every wait takes. Raises ``TypeError`` unless it is a number, ``ValueError`` if it is nan,
    which no clock would ever reach."""
    if type(timeout) is float and 0.0 <= timeout <= LONGEST_S:
        return timeout
    if not isinstance(timeout, Real):
        raise TypeError(f"{what} is a number of seconds, got {type(timeout).__name__}")
    if math.isnan(timeout):
        raise ValueError(f"{what} is a number of seconds, got nan")
    return min(float(timeout), LONGEST_S)


def of_socket(timeout: float) -> float:
    """As ``seconds``, and at most what a socket takes."""
    return min(seconds(timeout), _SOCKET_S)


def limit(timeout: float, what: str) -> float:
    """As ``seconds``, of a timeout that may not be negative. Raises ``ValueError``."""
    found = seconds(timeout, what)
    if found < 0:
        raise ValueError(f"{what} must not be negative, got {timeout} s")
    return found


def above_zero(timeout: float, what: str) -> float:
    """As ``seconds``, of a timeout within which something can happen. Raises ``ValueError``."""
    found = seconds(timeout, what)
    if found <= 0:
        raise ValueError(f"{what} must be longer than 0 s, got {timeout} s")
    return found
