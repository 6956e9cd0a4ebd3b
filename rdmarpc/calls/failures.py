"""The log of functions that failed, at the worker that ran them: a traceback of each kind, then counts.

A kind is a type of exception and the function that was called: the outermost frame that is not ours. Counts keep a caller that
retries a failing call for a minute from filling the callee's disk; the caller gets every error itself.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from types import TracebackType

_OURS = os.path.join(os.path.dirname(sys.modules[__name__.partition(".")[0]].__file__ or ""), "")
_KINDS = 1000
"""The number of kinds that are counted one by one. All further ones are counted as one kind."""
_OTHERS = "others", "functions of many kinds"


class Failures:
    """Counts and logs the requests that failed at one worker. Any thread."""

    def __init__(self) -> None:
        self.count = 0
        """The number of requests that have failed so far."""
        self._kinds: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def tell(self, error: BaseException, text: str) -> None:
        """Count a failed function. Logs ``text``, which has the traceback, for the first failure of a kind, and the count at
        10, 100, 1000, ..."""
        kind = type(error).__name__, _where(error.__traceback__)
        with self._lock:
            self.count += 1
            if kind not in self._kinds and len(self._kinds) >= _KINDS:
                kind = _OTHERS
            found = self._kinds[kind] = self._kinds.get(kind, 0) + 1
        log = logging.getLogger("rdmarpc")
        if found == 1 and kind != _OTHERS:
            log.error("%s", text)
        elif str(found).strip("0") == "1":  # a power of ten
            log.error("%s in %s: %d times so far (the first traceback is above)", *kind, found)


def _where(trace: TracebackType | None) -> str:
    """The function that a request called, as far as it is written in Python: name and file. Else where it was called."""
    name = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        name = f"{code.co_name} ({os.path.basename(code.co_filename)})"
        if not code.co_filename.startswith(_OURS):
            return name
        trace = trace.tb_next
    return name
