"""The GPU memory of a process that peers of its host may touch: allocations of the driver (*segments*), each exported once.

Tensors made here (``empty``) are born registered. For ``cuda`` they come from a ``torch.cuda.MemPool``, whose segments are kept
for the life of the process, so memory that a peer has mapped is never given back; another accelerator makes them with its own
allocator. Their segments stay registered for as long as the memory they belong to. Other GPU memory, also that of other
libraries which a tensor shares, is announced as a *foreign* region. Its segment is announced with the first such region,
and withdrawn with the last.

The driver's number of an allocation tells whether a segment is known: it is never given again in a process.

A peer's copies do not wait for the streams of this process. So ``register`` and ``export`` return when the caller's current
stream of that GPU has done what it was given: then neither the operations that made the tensor nor those that used its memory
before it are under way. Afterwards order comes from notifications alone.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import RegistrationError
from ..memory.memory import Memory, withdraw
from ..region import Region, local_bytes
from .driver import current_stream, driver, kind
from .ipc import Exports
from .pins import Pins


class GpuSegment:
    """An allocation of this process that peers may map. ``number`` and ``key`` as of any region, ``allocation`` is the
    driver's number; ``uuid`` names the GPU."""

    def __init__(self, number: int, key: int, base: int, nbytes: int, uuid: str, handle: bytes, allocation: int) -> None:
        self.number, self.key, self.allocation = number, key, allocation
        self.base, self.nbytes, self.uuid, self.handle = base, nbytes, uuid, handle
        self.lasting = False
        """Whether born registered tensors lie in it."""
        self.regions = 0
        """How many foreign ones are open."""


class GpuArena:
    """The GPU memory of a ``Memory``, for all ``CudaDevice`` on it. Thread-safe. Nothing touches a GPU before ``empty`` or
    ``register``."""

    def __init__(self, memory: Memory) -> None:
        self.memory, self.uid, self.epoch = memory, memory.uid, memory.epoch
        self.kind = kind()
        self.pins = Pins()
        """The pinned segments of the host arena."""
        self.devices: list[Any] = []
        """The ``CudaDevice`` that stand on it, by which peers are told what is registered here."""
        self.lanes: set[object] = set()
        """The side streams of the devices on this arena. Copies may be under way until they are gone."""
        self._exports = Exports()
        self._segments: dict[int, GpuSegment] = {}  # by the driver's number
        self._regions: dict[int, tuple[GpuSegment, int, int, int, torch.Tensor]] = {}  # foreign: segment, offset, bytes, key
        self._making = threading.RLock()  # held until peers have been told; taken before ``_lock``
        self._lock = threading.Lock()  # guards the tables; devices may take their own locks before it

    def of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on a GPU of the kind whose memory this arena registers."""
        return bool(self.kind) and tensor.device.type == self.kind

    def empty(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor, born registered. ``NotSupported`` where the GPU's memory cannot be exported."""
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        place = torch.device(device.type, index)
        if device.type != "cuda":
            tensor = torch.empty(tuple(sizes), dtype=dtype, device=place)
        else:
            with _pool_lock, torch.cuda.use_mem_pool(_pool(index), place):
                tensor = torch.empty(tuple(sizes), dtype=dtype, device=place)
        if tensor.numel():
            self._segment(tensor, lasting=True)
        return tensor

    def register(self, tensor: torch.Tensor) -> Region:
        """See ``Device.register``. ``NotSupported`` for memory that cannot be exported."""
        address, nbytes = local_bytes(tensor, self.kind)
        if nbytes == 0:
            return Region(self, tensor, 0, 0, 0, foreign=False)
        with self._making:
            segment = self._segment(tensor, lasting=False)
            offset = address - segment.base
            if segment.lasting:
                region = Region(self, tensor, segment.number, segment.key, offset, foreign=False)
            else:
                region = self._announce(tensor, segment, offset, nbytes)
        settle(tensor.device.index)
        return region

    def find(self, tensor: torch.Tensor) -> GpuSegment | None:
        """The segment of born registered tensors in which this one lies."""
        address, nbytes = local_bytes(tensor, self.kind)
        with self._lock:
            lasting = [segment for segment in self._segments.values() if segment.lasting]
        return next((each for each in lasting if each.base <= address and address + nbytes <= each.base + each.nbytes), None)

    def _segment(self, tensor: torch.Tensor, *, lasting: bool) -> GpuSegment:
        address, nbytes = local_bytes(tensor, self.kind)
        index = tensor.device.index
        with self._making, driver().on(index):
            base, size, number = driver().allocation(address)
            with self._lock:
                segment = self._segments.get(number)
                if segment is not None:
                    segment.lasting |= lasting
                    return segment
            if address + nbytes > base + size:
                raise RegistrationError(
                    "this GPU tensor lies in more than one allocation of the driver",
                    device="cuda",
                    hint="PYTORCH_CUDA_ALLOC_CONF without expandable_segments gives memory in one",
                )
            _, _, handle = self._exports.find(address)
            segment = GpuSegment(*self.memory.take_number(), base, size, driver().uuid(index), handle, number)
            segment.lasting = lasting
            with self._lock:
                self._segments[number] = segment
            for device in self._listeners():
                device.tell_all(lambda channel: channel.tell(segment))
        self.memory.count("registrations")
        return segment

    def _announce(self, tensor: torch.Tensor, segment: GpuSegment, offset: int, nbytes: int) -> Region:
        number, key = self.memory.take_number()
        with self._lock:
            segment.regions += 1
            self._regions[number] = (segment, offset, nbytes, key, tensor)
        for device in self._listeners():
            device.tell_all(lambda channel: channel.tell_part(number, key, segment.number, offset, nbytes))
        self.memory.count("registrations")
        return Region(self, tensor, number, key, 0, foreign=True)

    def deregister(self, region: Region) -> None:
        """Returns when no peer's copy on it is under way; raises what a device raised (``TransferTimeout``)."""
        number = region.remote.region
        gone = [number]
        with self._making, self._lock:
            known = self._regions.pop(number, None)  # with its tensor, which lives until all peers have been told
            if known is None:
                return
            segment = known[0]
            segment.regions -= 1
            if not segment.regions and not segment.lasting:
                gone.append(segment.number)
                self._segments = {other: each for other, each in self._segments.items() if each is not segment}
        withdraw(self._listeners(), gone)

    def registered(self) -> tuple[list[GpuSegment], list[tuple[int, int, int, int, int]]]:
        """All segments, and all foreign regions as (number, key, segment, offset, bytes), to be announced to a new peer."""
        with self._lock:
            parts = [
                (number, key, segment.number, at, nbytes) for number, (segment, at, nbytes, key, _) in self._regions.items()
            ]
            return list(self._segments.values()), parts

    def _listeners(self) -> list[Any]:
        return [device for device in list(self.devices) if not device.closed]

    def release(self) -> None:
        """Unpin the host arena, if no device stands on this any more and nothing of theirs is under way."""
        if not self.devices and not self.lanes:
            self.pins.close()

    def explain(self) -> list[str]:
        with self._lock:
            segments = list(self._segments.values())
        total = sum(segment.nbytes for segment in segments)
        refused = f"; not pinned: {self.pins.refused}, such copies wait in the post" if self.pins.refused else ""
        return [
            f"  gpu memory     {len(segments)} segments exported, {total} bytes",
            f"  host memory    {self.pins.nbytes} bytes of our arena pinned for the driver{refused}",
        ]


def settle(index: int) -> None:
    """Return when what the current stream of a GPU has been given is done."""
    with driver().on(index):
        driver().call("cuStreamSynchronize", current_stream(index))


_pool_lock = threading.Lock()  # torch lets one thread at a time into a pool


@functools.cache
def _pool(index: int) -> Any:
    """The memory pool of a GPU, for the life of the process."""
    torch.cuda.init()
    with torch.cuda.device(index):  # it belongs to the device that is current when it is made
        return torch.cuda.MemPool()
