"""Events of the driver's, for the order of streams within a process.

Not torch's, whose ``record`` and ``wait`` keep the interpreter's lock: where a stream has been given as much as it can hold,
the driver has callers wait until it goes on; and if it waits for a process that has died, those who would notice need the lock.

Callbacks of futures, and graphs that other threads capture: a future that knows of devices runs each callback on the next
stream of torch's pool, which it makes wait for the value first (``ivalue_inl.h``, ``invokeCallback``). The pool is gone round,
and ``torch.cuda.graph`` captures on a stream of it: that wait would spoil the graph, and its failure would take the callbacks,
and whoever waits for them, with it. So a thread that is about to complete such a future looks whether a stream of the pool
captures, and if so goes round past it.
"""

from __future__ import annotations

import time
from array import array
from collections import defaultdict, deque

import torch

from ..errors import RdmaError, TransferTimeout
from ..words.atomics import call, load_acquire, store_release
from ..words.compiled import compiled
from ..words.symbols import i64
from .driver import current_stream, driver, kind, same_device

NOT_READY = "CUDA_ERROR_NOT_READY"
_SPIN_S, _LONGEST_NAP_S = 50e-6, 1e-3
"""How long a wait looks without a pause, and its longest pause between looks."""
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

    def wait(self, limit: float, late: str, device: str) -> None:
        """Wait until it has come, for ``limit`` seconds at most; other threads may run meanwhile. ``TransferTimeout`` with the
        text ``late``; ``RdmaError`` if the GPU has failed."""
        begun = time.monotonic()
        while (found := self.status()) == NOT_READY:
            waited = time.monotonic() - begun
            if waited > limit:
                raise TransferTimeout(late, device=device, hint="is a kernel stuck?")
            if waited > _SPIN_S:
                time.sleep(min(waited / 2, _LONGEST_NAP_S))
        if found:
            raise RdmaError(f"work of the GPU failed: {found}", device=device, status=found)

    def over(self) -> bool:
        """Whether it has come, or never will."""
        return self.status() != NOT_READY


_MOST = 1024


@compiled(i64(i64, i64, i64, i64))
def _capturing(function: int, handles: int, count: int, scratch: int) -> int:
    """Index of the stream that captures; -1: none does. ``scratch``: a word for the answers."""
    for at in range(count):
        store_release(scratch, 0)
        call(function, load_acquire(handles + 8 * at), scratch, 0, 0)
        if load_acquire(scratch) != 0:
            return at
    return -1


class StreamPool:
    """The streams that torch gives out of device ``index``, in their order. Any thread may use it."""

    def __init__(self, index: int) -> None:
        self._index, self._device = index, torch.device(kind(), index)
        self._places: dict[int, int] = {}
        """By the number of a stream."""
        handles = array("q")
        before = torch.accelerator.current_stream(self._device)
        with same_device(), driver().on(index):
            try:
                known = 0
                while known <= 8 * len(handles) and len(handles) < _MOST:  # often round: other threads take some meanwhile
                    stream = torch.Stream(self._device)
                    if stream.stream_id in self._places:
                        known += 1
                        continue
                    self._places[stream.stream_id] = len(handles)
                    torch.accelerator.set_stream(stream)
                    handles.append(current_stream(index))
            finally:
                torch.accelerator.set_stream(before)
        self._handles, self._function = handles, driver().function("cuStreamIsCapturing")

    def pass_captures(self) -> None:
        """If one of these streams captures, have it given out now, so that torch comes to all others before it comes there
        again. (There is one capture at a time in a process, says torch.) No other thread of Python's comes between this and
        what the caller does next in C++: both keep the interpreter's lock. Raises ``RdmaError`` if the GPU has failed."""
        handles, count = self._handles.buffer_info()
        scratch = array("q", [0])
        with driver().on(self._index):
            captured = _capturing(self._function, handles, count, scratch.buffer_info()[0])
        for _ in range(count if captured >= 0 else 0):
            if self._places.get(torch.Stream(self._device).stream_id) == captured:
                return
