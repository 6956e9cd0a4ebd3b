"""Looks at the single instructions of some functions while they run in one thread.

A trace function is told of each instruction where it asks for that (``f_trace_opcodes``). From Python 3.12 on a function that
runs for the first time has been instrumented before it is asked, and tells nothing in that run. There it is ``sys.monitoring``
(PEP 669) that tells.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from ...transport import NotSupported

_TOOLS = (4, 3, 5, 2, 1, 0)
"""Of ``sys.monitoring``: those without a purpose of their own first."""


class Instructions:
    """``look(frame, offset)`` is called before the instruction at that offset of a function that is followed."""

    def __init__(self, look: Callable[[types.FrameType, int], None]) -> None:
        self._look = look
        self._tool: int | None = None
        self._followed: set[types.CodeType] = set()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While this lasts, in this thread, functions can be followed. Raises ``NotSupported`` where other tools take all
        places of the interpreter."""
        if sys.version_info < (3, 12):
            yield
            return
        monitoring, thread = sys.monitoring, threading.get_ident()

        def told(code: types.CodeType, offset: int) -> None:
            if threading.get_ident() == thread:
                self._look(sys._getframe(1), offset)

        tool = self._tool = _claim()
        monitoring.register_callback(tool, monitoring.events.INSTRUCTION, told)
        try:
            yield
        finally:
            for code in self._followed:
                monitoring.set_local_events(tool, code, 0)
            self._followed.clear()
            monitoring.register_callback(tool, monitoring.events.INSTRUCTION, None)
            monitoring.free_tool_id(tool)
            self._tool = None

    def follow(self, frame: types.FrameType) -> Any:
        """Follow the function that is about to run, for a trace function to return."""
        if sys.version_info < (3, 12):
            frame.f_trace_opcodes = True
            return self._traced
        if self._tool is not None and frame.f_code not in self._followed:
            self._followed.add(frame.f_code)
            sys.monitoring.set_local_events(self._tool, frame.f_code, sys.monitoring.events.INSTRUCTION)
        return None

    def _traced(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            self._look(frame, frame.f_lasti)
        return self._traced


if sys.version_info >= (3, 12):

    def _claim() -> int:
        for tool in _TOOLS:
            with contextlib.suppress(ValueError):
                sys.monitoring.use_tool_id(tool, "rdmarpc")
                return tool
        raise NotSupported("every tool of sys.monitoring is in use, which a trace needs one of")
