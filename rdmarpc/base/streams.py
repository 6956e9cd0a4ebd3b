"""The order of streams at a worker: each thread that runs functions has streams of its own, and values pass from one thread's
streams to another's.

The rule: all work that a function gave to its streams before it ended comes before the work of functions that begin later. So
the changes that a function made to a module, or an optimizer to parameters, are there for everybody who hears that it is done.
Functions that run at the same time are not ordered.

A *mark* stands for all work that the streams of a thread had been given when the thread set it. A thread that waits for a mark
makes its own current streams wait, and does not block itself. Devices that this process does not use cost nothing.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

from ..transport import Event, RdmaError, StreamPool
from ..transport import cuda_driver as driver

Place = tuple[int, int]
"""A stream: index of its device, the driver's handle."""


_spare: defaultdict[int, deque[int]] = defaultdict(deque)
"""Streams of threads that have ended."""


class _Own:
    """The streams of one thread that runs functions, by device. We make them, because others use the streams that torch gives
    out too, and may capture graphs on them."""

    def __init__(self) -> None:
        self.streams: dict[int, int] = {}

    def __del__(self, spare: defaultdict[int, deque[int]] = _spare) -> None:
        for index, stream in self.streams.items():
            spare[index].append(stream)


class _Serving(threading.local):
    own: _Own | None = None
    """The streams of this thread, if it runs functions."""
    decoding = False
    """Whether it is reading a request, so that the function has not begun."""
    touched = False
    """Whether a message had tensors on a device."""


_serving = _Serving()


class Streams:
    """The streams of this worker's threads. Thread-safe."""

    def __init__(self) -> None:
        self.kind = driver.kind()
        self.devices = [torch.device(self.kind, index) for index in range(driver.count())]
        self.expected: set[Any] = set()
        """Labels of functions whose results lay on a GPU: futures of such calls know of streams."""
        self.used: set[int] = set()
        """Indices of the devices that this process is known to use."""
        self._pools: dict[int, StreamPool] = {}
        self._made: dict[Place, None] = {}
        self._ended: dict[Place, Event] = {}
        """For each stream an event at the end of the last function that ran on it."""
        self._retired: deque[tuple[Any, Mark]] = deque()
        self._lock = threading.Lock()

    def use(self, index: int) -> None:
        """Note that a message has tensors on a device."""
        if index not in self.used:
            torch.empty(0, device=self.devices[index])  # torch may not have begun with it
            self.used.add(index)
        _serving.touched = True
        if _serving.decoding and _serving.own is not None and index not in _serving.own.streams:
            self._take(index, _serving.own)
            self._follow()

    def touched(self) -> bool:
        """Whether this thread has seen a message with tensors on a device since it asked last."""
        found, _serving.touched = _serving.touched, False
        return found

    def pass_captures(self) -> None:
        """This thread is about to complete a future that knows of devices: its callbacks are to run on no stream of torch's
        that another thread captures on."""
        for index in self.used:
            found = self._pools.get(index) or self._pools.setdefault(index, StreamPool(index))
            found.pass_captures()

    def synchronize(self) -> None:
        """Wait for the current streams of this thread."""
        for index in self.used:
            with driver.driver().relaxed():
                torch.accelerator.current_stream(self.devices[index]).synchronize()

    def begin(self) -> None:
        """This thread, which is ours, reads a request and then runs its function: on streams of its own, for good, on the
        devices that are in use. Not once the function has begun: it may have chosen streams itself."""
        _serving.decoding = True
        if _serving.own is None:
            _serving.own = _Own()
        self._look()
        if len(_serving.own.streams) < len(self.used):
            for index in self.used.difference(_serving.own.streams):
                try:
                    self._take(index, _serving.own)
                except RuntimeError:  # the GPU has failed: every use of it raises that
                    return
        # Before the arguments are copied, too: they may get memory that a function has just let go of, and still reads.
        self._follow()

    def begun(self) -> None:
        """The function begins."""
        _serving.decoding = False
        self._follow()

    def _follow(self) -> None:
        """Have the current streams wait for the functions that have ended."""
        if not self._ended:
            return
        with self._lock:
            others = list(self._ended.items())
        for place, event in others:
            if driver.current_stream(place[0]) == place[1]:
                continue
            with suppress(RdmaError):  # as in ``ended``
                if not event.over():
                    event.follow()
                    continue
            with self._lock:
                if self._ended.get(place) is event:
                    del self._ended[place]

    def ended(self) -> None:
        """The function has ended, and the answer is still to be sent."""
        self._look()
        for place in self._current():
            try:
                event = Event(*place)
            except RdmaError:  # the GPU has failed: every use of it raises that
                return
            with self._lock:
                self._ended[place] = event

    def _current(self) -> list[Place]:
        return [(index, driver.current_stream(index)) for index in self.used]

    def _look(self) -> None:
        """Enter devices that functions have begun to use by themselves. Looking does not make the process use a device."""
        if len(self.used) < len(self.devices) and driver.active():
            self.used.update(index for index in range(len(self.devices)) if driver.has_context(index))

    def _take(self, index: int, own: _Own) -> None:
        cuda, before = driver.driver(), Event(index, driver.current_stream(index))
        try:
            stream = _spare[index].popleft()
        except IndexError:
            with cuda.on(index):
                stream = cuda.new_stream()
        if not own.streams:
            cuda.relax()
        cuda.stay(index)
        own.streams[index] = stream
        with driver.same_device():
            torch.accelerator.set_stream(driver.as_torch(index, stream))
        before.follow()
        with self._lock:
            self._made[index, stream] = None

    def mark(self) -> Mark | None:
        """A mark of the calling thread's current streams; ``None`` while no device is in use."""
        self._look()
        return Mark(self._current()) if self.used else None

    def retire(self, value: Any) -> None:
        """Keep a value until all our threads' streams have done what they were given until now, as functions may have used it
        on any of them. Then its memory may go back to the allocator, which only knows the stream that made it."""
        if not self.used:
            return
        with self._lock:
            made = list(self._made)
        self._retired.append((value, Mark([*made, *self._current()])))
        self.sweep()

    def sweep(self) -> None:
        """Release the retired values whose streams are done."""
        dead = []
        with self._lock:  # under it the driver is only asked whether an event has come
            while self._retired and self._retired[0][1].passed():
                dead.append(self._retired.popleft())


class Joint:
    """A lock for threads that work on the same tensors in turn: who holds it is also in order on its streams. Where there are
    none (``current`` is ``None``), the lock alone does."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._mark: Mark | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            if self._mark is not None:
                self._mark.wait()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._mark = None if current is None else current.mark()
        finally:
            self._lock.release()


class Mark:
    """The work that some streams have been given until now."""

    __slots__ = ("_events",)

    def __init__(self, places: list[Place]) -> None:
        self._events = [Event(*place) for place in places]

    def wait(self) -> None:
        """Make the current streams of this thread wait for it."""
        for event in self._events:
            event.follow()

    def passed(self) -> bool:
        """Whether all of it is done; also where a GPU has failed."""
        return all(event.over() for event in self._events)


def use_here(things: Iterable[Any]) -> None:
    """This thread uses these tensors, which another one may have made: what its streams have been given by the time that a
    tensor dies comes before its memory is used again."""
    if current is None:
        return
    for tensor in things:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != current.kind:
            continue
        stream = torch.accelerator.current_stream(tensor.device)
        for part in (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else (tensor,):
            if part.layout is torch.strided:
                part.record_stream(stream)


current: Streams | None = None
"""This process's; ``None`` without a GPU."""
