"""Events of the driver's, for the order of streams within a process.

Not torch's, whose ``record`` and ``wait`` keep the interpreter's lock: where a stream has been given as much as it can hold,
the driver has callers wait until it goes on; and if it waits for a process that has died, those who would notice need the lock.
"""

from __future__ import annotations

from collections import defaultdict, deque

from ..errors import RdmaError
from .driver import current_stream, driver

NOT_READY = "CUDA_ERROR_NOT_READY"
_spare: defaultdict[int, deque[int]] = defaultdict(deque)


def status(index: int, question: str, handle: int) -> str:
    """The driver's answer to ``cuStreamQuery`` or ``cuEventQuery`` about something of device ``index``: empty when it is done,
    ``NOT_READY``, or its word for how the GPU has failed."""
    cuda = driver()
    try:
        with cuda.on(index):
            return cuda.attempt(question, handle)
    except RdmaError as error:  # a context that is lost cannot even be entered
        return error.status


class Event:
    """The work that a stream (its handle) of device ``index`` has been given until now. Any thread may use it. Raises
    ``RdmaError`` if the GPU has failed."""

    __slots__ = ("_handle", "index")

    def __init__(self, index: int, stream: int) -> None:
        self.index, self._handle = index, 0
        cuda = driver()
        with cuda.on(index):
            try:
                self._handle = _spare[index].popleft()
            except IndexError:
                self._handle = cuda.new_event()
            cuda.call("cuEventRecord", self._handle, stream)

    def __del__(self, spare: defaultdict[int, deque[int]] = _spare) -> None:
        if self._handle:
            spare[self.index].append(self._handle)  # a stream that waits for it does so for that recording

    def follow(self, stream: int | None = None) -> None:
        """Have a stream wait for it, of any device; this thread's current one of this device, if none is named."""
        cuda = driver()
        with cuda.on(self.index):
            cuda.call("cuStreamWaitEvent", current_stream(self.index) if stream is None else stream, self._handle, 0)

    def status(self) -> str:
        """Empty when the event has come, ``NOT_READY`` before; if the GPU has failed, the driver's name for the error."""
        return status(self.index, "cuEventQuery", self._handle)

    def over(self) -> bool:
        """Whether it has come, or never will."""
        return self.status() != NOT_READY
