"""The GPU memory of a peer, as the peer announced it: allocations of its driver (*segments*), and foreign regions on them.

A segment is mapped when it is first copied to or from, once for each GPU that copies, and stays so until it is gone, or until
the channel has ended and its lanes are idle.
"""

from __future__ import annotations

import functools
import os
import struct
import threading
from collections.abc import Callable

from ..errors import NotSupported, RdmaError
from ..gpu.driver import count, driver, kind
from ..gpu.ipc import imports_of
from ..memory.mapping import check_sealed
from ..region import LENT, RemoteRegion
from ..shm.memory import PeerMemory

PASS = struct.Struct("<32s64sQ")
"""The file that comes with a segment: UUID in hexadecimal, IPC handle, the driver's number of the allocation."""


class PeerSegment:
    """An allocation of the peer."""

    def __init__(self, gpus: PeerGpus, base: int, uuid: str, handle: bytes, allocation: int) -> None:
        self._gpus, self._base, self._handle, self._allocation = gpus, base, handle, allocation
        self.uuid = uuid
        self.gone = False
        self._at: dict[int, int] = {}

    @functools.cached_property
    def index(self) -> int:
        """The GPU that it lies on, if this process sees that, else any."""
        return next((index for index in range(count()) if driver().uuid(index) == self.uuid), 0)

    def at(self, index: int) -> int:
        """The address at which the segment is mapped for copies by a device. Raises ``NotSupported`` if it cannot be mapped."""
        found = self._at.get(index)
        if found is None:
            gpus = self._gpus
            if gpus.memory.pid == os.getpid():  # a handle cannot be opened where it comes from, and need not be
                found = self._base
            else:
                try:
                    found = gpus.imports.base(self._allocation, self._handle, index, self._idle)
                except RdmaError as error:
                    gpus.no_ipc = error.status
                    raise NotSupported(
                        f"the peer's GPU memory cannot be mapped here: {error.message}",
                        peer=gpus.memory.peer,
                        device="cuda",
                        status=error.status,
                        hint="CUDA IPC needs GPUs that reach each other, and containers that share them, IPC and PIDs",
                    ) from None
            self._at[index] = found
        return found

    def _idle(self) -> bool:
        return self.gone or self._gpus.released


class PeerGpus:
    """The announced GPU memory of one channel's peer. It does not refer to the channel. It enters what it knows in the
    ``parts`` of ``memory``, which holds the rest of the peer's memory."""

    def __init__(self, memory: PeerMemory) -> None:
        self.memory, self.kind = memory, kind()
        self.lock = threading.Lock()
        """Held while a copy is posted from or to memory that may be withdrawn, and while memory is withdrawn."""
        self.imports = imports_of(memory.uid)
        self.no_ipc = ""
        """The driver's error when a segment could not be mapped; empty: none so far."""
        self.released = False
        """Whether the channel has ended and its lanes are gone."""
        self._segments: dict[int, PeerSegment] = {}
        self._places: dict[int, PeerSegment] = {}  # of segments and foreign regions, by number

    def add_segment(self, fds: list[int], number: int, key: int, address: int, nbytes: int) -> None:
        """Enter a segment. ``address``: in the peer's process."""
        if not fds or number in self._segments:  # which may be told twice
            return
        check_sealed(fds[0], PASS.size)
        uuid, handle, allocation = PASS.unpack(os.pread(fds[0], PASS.size, 0))
        segment = PeerSegment(self, address, uuid.decode("ascii", "replace"), handle, allocation)
        self._segments[number] = self._places[number] = segment
        self.memory.parts[number] = (0, nbytes, key)

    def add_part(self, segment: int, number: int, key: int, offset: int, nbytes: int) -> None:
        """Enter a foreign region on a segment."""
        if (found := self._segments.get(segment)) is not None:
            self._places[number] = found
            self.memory.parts[number] = (offset, nbytes, key)

    def remove(self, number: int) -> PeerSegment | None:
        """Take out a segment, which is returned, or a foreign region. No thread is still posting a copy on it when this
        returns."""
        with self.lock:
            self.memory.parts.pop(number, None)
            self._places.pop(number, None)
            return self._segments.pop(number, None)

    def look_up(self, remote: RemoteRegion, hear_of: Callable[[RemoteRegion], object]) -> PeerSegment | None:
        """The segment of a remote range in GPU memory; ``None`` for a range in host memory. ``hear_of`` asks the peer about a
        region that it has not announced yet. Raises ``RemoteAccessError``."""
        if remote.nbytes == 0 or remote.region == LENT:
            return None
        if remote.region in self.memory.segments:
            return None
        hear_of(remote)
        return self._places.get(remote.region)

    def still_there(self, remote: RemoteRegion) -> None:
        """Raise ``RemoteAccessError`` if a region was withdrawn. Call it with ``lock`` held: it does not ask the peer."""
        if remote.region not in self.memory.parts:
            raise self.memory.refuse(f"region {remote.region} is not registered (any more)")

    def withdrawable(self, remote: RemoteRegion) -> bool:
        """Whether the peer may withdraw a remote range while it lives: so if the range is in a foreign region."""
        segment = self._places.get(remote.region)
        return segment is not None and self._segments.get(remote.region) is not segment
