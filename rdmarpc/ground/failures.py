"""The log of functions that failed, at the worker that ran them: a traceback of each kind, then counts.

A kind is a type of exception and the function that was called: the outermost frame that is not ours. A caller that retries a
failing call for a minute would else fill the disk of the callee; it gets every error itself anyway.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from types import TracebackType

_OURS = os.path.join(os.path.dirname(sys.modules[__name__.partition(".")[0]].__file__ or ""), "")
_KINDS = 1000
"""Kinds that are told apart. All others are one."""
_OTHERS = "others", "functions of many kinds"


class Failures:
    """Of one worker. Any thread."""

    def __init__(self) -> None:
        self.count = 0
        """Requests that failed, ever."""
        self._kinds: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def tell(self, error: BaseException, text: str) -> None:
        """A function failed; ``text`` has the traceback. Logs the first of a kind, and that there are 10, 100, 1000, ..."""
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
