"""Host pages that the driver has pinned, so that a GPU copies to and from them by itself.

Pages are pinned by grains, when something on them is first to be copied, and stay so until ``close``. What is pinned twice is
an error of the driver, and a copy must not cross from one registration to the next: so whoever copies asks for ``pieces``.
"""

from __future__ import annotations

import threading
from ctypes import c_void_p

from .cuda_driver import CU_MEMHOSTREGISTER_PORTABLE, driver

GRAIN = 1 << 20
_ALREADY = "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"


class Pins:
    """Of some segments that are mapped in this process and stay so until ``close``. Thread-safe."""

    def __init__(self) -> None:
        self._runs: dict[int, list[tuple[int, int, bool]]] = {}  # by segment: (start, end, pinned), sorted, disjoint
        self._lock = threading.Lock()
        self._index = 0
        self.nbytes = 0
        self.refused = ""
        """Why the driver did not pin something: copies of that go through its own buffers, and make a post wait."""

    def pieces(self, segment: int, segment_bytes: int, address: int, nbytes: int, index: int) -> list[int]:
        """Pin ``[address, address + nbytes)`` inside the segment that starts at ``segment`` (a page's start), for every GPU, by
        way of device ``index``. Returned are the sizes of the parts to copy one by one."""
        with self._lock:
            self._index = index
            self._pin(segment, segment_bytes, address, address + nbytes, index)
            ends = [end for _, end, _ in self._runs[segment] if address < end]
        sizes, at = [], address
        for end in ends:
            stop = min(end, address + nbytes)
            sizes.append(stop - at)
            at = stop
            if stop == address + nbytes:
                break
        return sizes

    def _pin(self, segment: int, segment_bytes: int, start: int, end: int, index: int) -> None:
        runs = self._runs.setdefault(segment, [])
        at = segment + (start - segment) // GRAIN * GRAIN
        stop = min(segment + -(-(end - segment) // GRAIN) * GRAIN, segment + segment_bytes)
        fresh = []
        for low, high, _ in [*runs, (stop, stop, True)]:
            if at < min(low, stop):
                fresh.append((at, min(low, stop), self._register(at, min(low, stop) - at, index)))
            at = max(at, high)
        if fresh:
            self._runs[segment] = sorted([*runs, *fresh])

    def _register(self, address: int, nbytes: int, index: int) -> bool:
        with driver().on(index):
            status = driver().attempt("cuMemHostRegister_v2", c_void_p(address), nbytes, CU_MEMHOSTREGISTER_PORTABLE)
        if status and status != _ALREADY:  # else another part of this process has pinned it
            self.refused = status
        elif not status:
            self.nbytes += nbytes
        return not status

    def close(self, index: int | None = None) -> None:
        """Before the memory is unmapped, when no copy uses it any more. By way of that device, or the one that pinned last."""
        with self._lock:
            runs, self._runs, self.nbytes = self._runs, {}, 0
        if not runs:
            return
        with driver().on(self._index if index is None else index):
            for start, _, pinned in [run for found in runs.values() for run in found]:
                if pinned:
                    driver().attempt("cuMemHostUnregister", c_void_p(start))
