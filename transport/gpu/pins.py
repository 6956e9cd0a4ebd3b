"""Host memory that the driver has pinned, so that GPUs copy to and from it by themselves, and streams wait for words in it.

Whole segments are pinned: of our arena, and of peers' arenas that are mapped here. The driver refuses to pin a page twice. It
also refuses a copy that begins in one registration and leaves it, even a copy that torch makes for a user. So all parts of a
process share one registration, which lives for as long as any of them holds it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from ctypes import c_uint64, c_void_p

from ..errors import ArenaFull, RdmaError
from ..memory.arena import Segment
from .driver import CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_READ_ONLY, driver


class _Registration:
    def __init__(self, address: int, nbytes: int, index: int, refused: str, *, writable: bool) -> None:
        self.address, self.nbytes, self.index, self.holds, self.refused = address, nbytes, index, 0, refused
        if refused:
            return
        flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
        if not writable:
            flags |= CU_MEMHOSTREGISTER_READ_ONLY
        with driver().on(index):
            self.refused = driver().attempt("cuMemHostRegister_v2", c_void_p(address), nbytes, flags)


_registrations: dict[int, _Registration] = {}
_lock = threading.RLock()  # of the table; a finalizer may run inside


class Pin:
    """Holds the registration of ``[address, address + nbytes)`` for all GPUs, made by way of device ``index`` if there is none.
    ``keep`` is the mapping, which lives as long; ``writable``: whether it may be written. ``refused``: why it is not even to be
    tried. Thread-safe."""

    def __init__(
        self, address: int, nbytes: int, index: int, keep: object, refused: str = "", *, writable: bool = True
    ) -> None:
        with _lock:
            found = _registrations.get(address)
            if found is None:
                found = _registrations[address] = _Registration(address, nbytes, index, refused, writable=writable)
            found.holds += 1
        self._registration = found
        self._pointers: dict[int, int] = {}
        self.release = weakref.finalize(self, _drop, found, keep)
        """Let go of it; nothing that the driver does may use it any more."""
        self.release.atexit = False  # then the driver goes by itself

    @property
    def nbytes(self) -> int:
        """How much is pinned."""
        return 0 if self.refused else self._registration.nbytes

    @property
    def refused(self) -> str:
        """The driver's word, where it did not pin that."""
        return self._registration.refused

    def pointer(self, address: int, index: int) -> int:
        """The device pointer of an address in the pinned memory. Raises ``RdmaError`` if the memory could not be pinned."""
        found, base = self._pointers.get(index), self._registration.address
        if found is None:
            if self.refused:
                raise RdmaError(f"host memory cannot be pinned: {self.refused}", device="cuda", status=self.refused)
            cuda = driver()
            with cuda.on(index):
                found = self._pointers[index] = cuda.asked(c_uint64, "cuMemHostGetDevicePointer_v2", base, 0)
        return found + address - base


def _drop(registration: _Registration, keep: object) -> None:
    with _lock:
        registration.holds -= 1
        if registration.holds:
            return
        del _registrations[registration.address]
        if not registration.refused:
            with contextlib.suppress(RdmaError), driver().on(registration.index):
                driver().attempt("cuMemHostUnregister", c_void_p(registration.address))


def pin_segment(segment: Segment, index: int) -> Pin:
    """A segment of our arena, which has all its pages from then on."""
    refused = ""
    try:
        segment.reserve(segment.nbytes)
    except ArenaFull as error:
        refused = error.message
    return Pin(segment.address, segment.nbytes, index, segment.view, refused)


class Pins:
    """The pins that one part of the process holds, until ``close``. Thread-safe."""

    def __init__(self) -> None:
        self._held: dict[int, Pin] = {}
        self._lock = threading.Lock()
        self.refused = ""
        """Why the driver did not pin a segment; empty: it pinned all. Copies of such a segment go through the driver's own
        buffers, and the post waits for them."""

    def segment(self, segment: Segment, index: int) -> Pin:
        """See ``pin_segment``."""
        return self._held.get(segment.address) or self._add(segment.address, lambda: pin_segment(segment, index))

    def hold(self, address: int, nbytes: int, index: int, keep: object, *, writable: bool) -> Pin:
        """Pin this whole mapping, once."""
        return self._held.get(address) or self._add(address, lambda: Pin(address, nbytes, index, keep, writable=writable))

    def _add(self, address: int, make: Callable[[], Pin]) -> Pin:
        with self._lock:
            found = self._held.get(address)
            if found is None:
                found = self._held[address] = make()
                self.refused = found.refused or self.refused
        return found

    def let_go(self, address: int) -> None:
        """Release the pin of the mapping that begins at this address, if there is one. Call it before the mapping is unmapped,
        when no copy uses it."""
        with self._lock:
            found = self._held.pop(address, None)
        if found is not None:
            found.release()

    @property
    def nbytes(self) -> int:
        return sum(pin.nbytes for pin in list(self._held.values()))

    def close(self) -> None:
        """Release all pins. Call it before the memory is unmapped, when no copy uses it any more."""
        with self._lock:
            held, self._held = self._held, {}
        for pin in held.values():
            pin.release()
