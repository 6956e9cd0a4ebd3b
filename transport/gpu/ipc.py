"""GPU memory of other processes of this host, mapped here (CUDA IPC), once a segment.

The unit of an export is an allocation of the driver (a *segment*: torch's allocator makes many tensors in one). Its number
(``CU_POINTER_ATTRIBUTE_BUFFER_ID``) is never given again in a process, so it names the segment for as long as peers may ask for
it, even if another segment gets the same address.

A mapping stays until the peer ends or ``LIMIT`` others were used since, because opening one takes 100 us and more. While it is
open the owner's memory is not given back to the system, even if its allocator frees it (as with torch's own sharing). A process
cannot open its own export, and need not.

When the owner has given a segment back, a new one may get its address. The driver refuses to open the new one while the old one
is mapped here, so all idle mappings of that peer are then closed. Hence there is one table for each peer, for all that copy.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import NotSupported, RdmaError
from .driver import Driver, count, driver

LIMIT = 256
"""Segments of one peer that are mapped here at once, unless more are in use."""
_MAX_KNOWN = 4096
_ALREADY_MAPPED = "CUDA_ERROR_ALREADY_MAPPED"
_CLOSING_S, _POLL_S = 2.0, 0.0005


class Exports:
    """The segments of this process that peers were told of. Thread-safe."""

    def __init__(self) -> None:
        self._handles: dict[int, bytes] = {}

    def find(self, pointer: int) -> tuple[int, int, bytes]:
        """Base and number of the segment that a device pointer lies in, and the handle by which peers open it.
        ``NotSupported`` for memory that cannot be exported (virtual memory of expandable segments, pools of
        ``cudaMallocAsync``)."""
        base, _, number = driver().allocation(pointer)
        handle = self._handles.get(number)
        if handle is None:
            try:
                handle = driver().ipc_handle(base)
            except RdmaError as error:
                hint = "PYTORCH_CUDA_ALLOC_CONF without expandable_segments and cudaMallocAsync gives memory that can"
                raise NotSupported(
                    f"this GPU memory cannot be shared: {error.message}", device="cuda", status=error.status, hint=hint
                ) from None
            if len(self._handles) >= _MAX_KNOWN:
                self._handles.clear()
            self._handles[number] = handle
        return base, number, handle


@dataclass(slots=True)
class _Mapping:
    base: int
    index: int
    """The index of the device in whose context it is mapped."""
    uses: list[Callable[[], bool]] = field(default_factory=list)
    """One function for each copy that may still be under way: it returns whether the copy is over."""

    def idle(self) -> bool:
        self.uses = [over for over in self.uses if not over()]
        return not self.uses


class Imports:
    """The segments of one peer that are mapped here. Thread-safe."""

    def __init__(self) -> None:
        self._mappings: OrderedDict[tuple[int, int], _Mapping] = OrderedDict()
        self._lock = threading.Lock()
        self.opened = 0
        """How often a segment was opened."""

    def base(self, number: int, handle: bytes, index: int, over: Callable[[], bool]) -> int:
        """The address at which a segment (the driver's ``number``) is mapped for copies to and from device ``index``.
        ``over()`` tells whether the copies that the caller is about to start are over. Raises ``RdmaError`` with the driver's
        error if the segment cannot be opened."""
        with self._lock:
            found = self._mappings.get((number, index))
            if found is None:
                found = self._open(handle, index)
                self._mappings[number, index] = found
                self._shrink()
            else:
                self._mappings.move_to_end((number, index))
                found.idle()
            found.uses.append(over)
            return found.base

    def _open(self, handle: bytes, index: int) -> _Mapping:
        limit = time.monotonic() + _CLOSING_S
        while True:
            try:
                return self._open_somewhere(handle, index)
            except RdmaError as error:
                if error.status != _ALREADY_MAPPED or time.monotonic() > limit:
                    raise
            if not self._close_idle():
                time.sleep(_POLL_S)

    def _open_somewhere(self, handle: bytes, index: int) -> _Mapping:
        cuda = driver()
        # In the context of the device that copies; where that has no way to the owner's device, in that device's own, if it is
        # to be seen here: the driver then copies from the one to the other.
        others = [other for other in range(count()) if other != index]
        first: RdmaError | None = None
        for at in (index, *others):
            try:
                with cuda.on(at):
                    base = cuda.ipc_open(handle)
            except RdmaError as error:
                first = first or error
                if error.status == _ALREADY_MAPPED:
                    break
                continue
            self.opened += 1
            return _Mapping(base, at)
        assert first is not None
        raise first

    def _shrink(self) -> None:
        excess = len(self._mappings) - LIMIT
        for key in list(self._mappings)[: max(excess, 0)]:
            if self._mappings[key].idle():
                _close(driver(), self._mappings.pop(key))

    def close(self) -> bool:
        """Unmap all segments that no copy uses. Returns whether no mapping is left; call it again until it returns true."""
        with self._lock:
            self._close_idle()
            return not self._mappings

    def _close_idle(self) -> int:
        found = [key for key, mapping in self._mappings.items() if mapping.idle()]
        for key in found:
            _close(driver(), self._mappings.pop(key))
        return len(found)


def imports_of(owner: int) -> Imports:
    """The one table of a peer, by the ``owner`` of its descriptors."""
    with _peers_lock:
        return _peers.setdefault(owner, Imports())


_peers: weakref.WeakValueDictionary[int, Imports] = weakref.WeakValueDictionary()
_peers_lock = threading.Lock()


def _close(cuda: Driver, mapping: _Mapping) -> None:
    with contextlib.suppress(RdmaError), cuda.on(mapping.index):  # of a context that is lost, with all that was in it
        cuda.attempt("cuIpcCloseMemHandle", mapping.base)
