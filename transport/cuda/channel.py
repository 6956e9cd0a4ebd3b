"""The connection between two processes of one host of which at least one has a GPU: that of ``shm``, and copies on side
streams.

The peer announces its GPU memory. A ``GPU_SEGMENT`` is an allocation of its driver (number, key, its address there, bytes; the
file that comes with it holds the GPU's UUID and the IPC handle). A ``GPU_PART`` is a foreign region on a segment (the upper
half of the number is the segment's). ``GONE`` withdraws either; it is answered when no copy of ours on it is under way.

A segment is mapped when it is first copied to or from, once for each GPU that copies, and stays so until it is gone, or until
the channel has ended and its lanes are idle.

The GPU of the local tensor does a copy; if the local tensor lies on the CPU, the GPU of the remote memory does it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from ..channel import Local, Pair, Transfer, Window, Work, check_notify, sort_pair
from ..errors import NotSupported, RdmaError, TransferTimeout
from ..gpu.arena import GpuSegment
from ..gpu.driver import count, driver, kind
from ..gpu.ipc import imports_of
from ..gpu.pins import Pins
from ..memory.mapping import check_sealed, memfd
from ..region import LENT, RemoteRegion, local_bytes
from ..shm.channel import GONE_ACK, ShmChannel
from ..shm.memory import PeerMemory
from ..shm.transfer import ShmMapped
from .lane import Lane, Lanes
from .transfer import Copies, CudaJob, CudaTransfer, Side

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
        self.places: dict[int, PeerSegment] = {}  # of segments and foreign regions, by number

    def add_segment(self, fds: list[int], number: int, key: int, address: int, nbytes: int) -> None:
        """Enter a segment. ``address``: in the peer's process."""
        if not fds or number in self._segments:  # which may be told twice
            return
        check_sealed(fds[0], PASS.size)
        uuid, handle, allocation = PASS.unpack(os.pread(fds[0], PASS.size, 0))
        segment = PeerSegment(self, address, uuid.decode("ascii", "replace"), handle, allocation)
        self._segments[number] = self.places[number] = segment
        self.memory.parts[number] = (0, nbytes, key)

    def add_part(self, segment: int, number: int, key: int, offset: int, nbytes: int) -> None:
        """Enter a foreign region on a segment."""
        if (found := self._segments.get(segment)) is not None:
            self.places[number] = found
            self.memory.parts[number] = (offset, nbytes, key)

    def remove(self, number: int) -> PeerSegment | None:
        """Take out a segment, which is returned, or a foreign region. No thread is still posting a copy on it when this
        returns."""
        with self.lock:
            self.memory.parts.pop(number, None)
            self.places.pop(number, None)
            return self._segments.pop(number, None)

    def still_there(self, remote: RemoteRegion) -> None:
        """Raise ``RemoteAccessError`` if a region was withdrawn. Call it with ``lock`` held: it does not ask the peer."""
        if remote.region not in self.memory.parts:
            raise self.memory.refuse(f"region {remote.region} is not registered (any more)")

    def withdrawable(self, remote: RemoteRegion) -> bool:
        """Whether the peer may withdraw a remote range while it lives: so if the range is in a foreign region."""
        segment = self.places.get(remote.region)
        return segment is not None and self._segments.get(remote.region) is not segment


GPU_SEGMENT, GPU_PART = 8, 9


class CudaChannel(ShmChannel):
    device: Any
    """The ``CudaDevice``."""
    gpus = True

    def __init__(self, device: Any, *args: Any) -> None:
        super().__init__(device, *args)
        self.peer_gpus = PeerGpus(self.peer_memory)
        self.pins = Pins()
        """The segments of the peer's arena that are mapped and pinned here."""
        self.lanes = Lanes(device.gpu)
        self._mapped = self.peer_memory.segments
        self._after: dict[tuple[int, int], CudaJob] = {}

    # -- copies

    def prepare(self, pairs: Sequence[Pair], *, notify: int | None = None) -> Transfer:
        self.check()
        check_notify(notify)
        sides = [sort_pair(dst, src, self.peer_gpus.kind) for dst, src in pairs]
        if not any(self._on_gpu(side) for side in sides):
            return super().prepare(pairs, notify=notify)
        return CudaTransfer(self, sides, notify)

    def memcpy(self, dst: Local | RemoteRegion, src: Local | RemoteRegion, *, notify: int | None = None) -> Work:
        remote, local = (dst, src) if isinstance(dst, RemoteRegion) else (src, dst)
        if (
            isinstance(remote, RemoteRegion)
            and remote.region in self._mapped
            and isinstance(local, torch.Tensor)
            and local.is_cpu
        ):
            return super().memcpy(dst, src, notify=notify)
        side = sort_pair(dst, src, self.peer_gpus.kind)
        if not self._on_gpu(side):
            return super().memcpy(dst, src, notify=notify)
        self.check()
        check_notify(notify)
        return CudaTransfer(self, [side], notify).post()

    def _on_gpu(self, side: Side) -> bool:
        """Whether a GPU has to copy. ``RemoteAccessError``."""
        remote, tensor, _ = side
        return not tensor.is_cpu or (self.look_up(remote) is not None)

    def look_up(self, remote: RemoteRegion) -> PeerSegment | None:
        """The segment of a remote range in GPU memory; ``None`` for a range in host memory. Asks the peer about a region that
        it has not announced yet. Raises ``RemoteAccessError``."""
        if remote.nbytes == 0 or remote.region == LENT or remote.region in self._mapped:
            return None
        self.resolve(remote)
        return self.peer_gpus.places.get(remote.region)

    def place(self, side: Side) -> tuple[Lane | None, Copies]:
        """The lane that does a copy (``None``: the processor does it), and its pieces. Raises ``NotSupported`` where it cannot
        be done in one step."""
        remote, tensor, write = side
        address, nbytes = local_bytes(tensor, self.peer_gpus.kind)
        segment = self.look_up(remote)
        if tensor.is_cpu and segment is None:
            far, mapped = self.resolve(remote, write=write)
            if not mapped:
                why = "memory outside the arenas cannot be in one list with GPU memory"
                raise NotSupported(why, peer=self.peer, device="cuda", hint="prepare a transfer for each")
            return None, [_ordered(far, address, nbytes, write)] if nbytes else []
        index = segment.index if segment is not None and tensor.is_cpu else tensor.device.index
        lane = self.lane(index)
        if nbytes == 0:
            return lane, []
        if segment is not None:
            far = segment.at(index) + self.resolve(remote)[0]
            if tensor.is_cpu and (found := self.device.arena.find(address, nbytes)) is not None:
                self.device.gpu.pins.segment(found[0], index)
        else:
            far, mapped = self.resolve(remote, write=write)
            if not mapped:
                raise NotSupported(
                    "between GPU memory and the peer's host memory outside its arena there is no direct copy",
                    peer=self.peer,
                    device="cuda",
                    hint="let the peer make it with device.empty()",
                )
            memory, number = self.peer_memory, remote.region
            base, total, _ = memory.segments[number]
            self.pins.hold(base, total, index, memory.views[number], writable=number not in memory.read_only)
        return lane, [_ordered(far, address, nbytes, write)]

    def lane(self, index: int) -> Lane:
        """Our side stream on a device."""
        found = self.lanes.find(self, index)
        self.device.watch()
        return found

    def notify_after(self, imm: int, device: torch.device | str) -> Work:
        self.check()
        check_notify(imm)
        index = self._index_of(device, self.peer_gpus.kind)
        job = self._after.get((imm, index))
        if job is None or job.failed:
            job = self._after[imm, index] = CudaJob(self, [(self.lane(index), [])], [], imm)
        return job.post(None)

    def fence(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        super().fence(timeout)
        for lane in self.lanes.all():
            lane.wait(lane.sent, None if deadline is None else max(0.0, deadline - time.monotonic()))

    # -- what needs memory that the processor reaches

    def _window(self, remote: RemoteRegion, local: torch.Tensor, notify: int) -> Window | None:
        self._host_only(remote)
        return super()._window(remote, local, notify)

    def adopt(self, remote: RemoteRegion, release: RemoteRegion) -> torch.Tensor:
        self._host_only(remote)
        return super().adopt(remote, release)

    def map(self, remote: RemoteRegion) -> ShmMapped | None:
        return None if self.look_up(remote) is not None else super().map(remote)

    def _host_only(self, remote: RemoteRegion) -> None:
        if self.look_up(remote) is not None:
            raise NotSupported("GPU memory cannot be used in place by a processor", peer=self.peer, device="cuda")

    # -- what the peer tells

    def tell(self, segment: GpuSegment) -> None:
        """Announce a segment of ours to the peer."""
        memory, fd = memfd("rdmarpc-gpu", PASS.size)
        try:
            PASS.pack_into(memory, 0, segment.uuid.encode(), segment.handle, segment.allocation)
            self.send(GPU_SEGMENT, segment.number, segment.key, segment.base, segment.nbytes, fd)
        finally:
            memory.close()
            os.close(fd)

    def tell_part(self, number: int, key: int, segment: int, offset: int, nbytes: int) -> None:
        """Announce a foreign region of ours to the peer."""
        self.send(GPU_PART, segment << 32 | number, key, offset, nbytes)

    def _hear_more(self, kind: int, number: int, key: int, address: int, nbytes: int, fds: list[int]) -> None:
        if kind == GPU_SEGMENT:
            self.peer_gpus.add_segment(fds, number, key, address, nbytes)
        elif kind == GPU_PART:
            self.peer_gpus.add_part(number >> 32, number & 0xFFFFFFFF, key, address, nbytes)

    def _gone(self, number: int) -> None:
        if number not in self.peer_memory.parts:
            super()._gone(number)
            return
        # Copies may still be under way, and unmapping may wait for anything that a GPU does. This thread serves all channels,
        # so another one waits.
        with contextlib.suppress(RuntimeError):  # no more threads: the process ends
            threading.Thread(target=self._forget, args=(number,), name="rdmarpc-gone", daemon=True).start()

    def _forget(self, number: int) -> None:
        segment = self.peer_gpus.remove(number)
        marks = [(lane, lane.sent) for lane in self.lanes.all()]
        try:
            for lane, ticket in marks:
                lane.wait(ticket, None)
            if segment is not None:
                segment.gone = True
                self.peer_gpus.imports.close()
            self.send(GONE_ACK, number)
        except RdmaError:
            pass  # the channel has ended, and its waiters have been told
        except BaseException as error:
            self.device.break_off(self, error, "letting go of a peer's GPU memory")

    # -- the end

    def tend(self) -> None:
        """Release finished copies, and see whether a GPU has failed. Called from time to time."""
        for lane in self.lanes.all():
            lane.sweep()
            lane.look()

    def _abort(self, timeout: float) -> None:
        failed: TransferTimeout | None = None
        try:
            super()._abort(timeout)
        except TransferTimeout as error:
            failed = error
        if self.inboxes.copying:
            why = "a copy of ours is still under way: what its stream was given before it has not ended"
            raise TransferTimeout(why, peer=self.peer, device="cuda") from None
        if failed is not None:
            raise failed

    def _close(self) -> None:
        if self.error is None:  # what was posted is still to arrive
            self.lanes.idle(self.device.close_deadline())
        super()._close()
        self._leave(now=True)

    def lose(self, error: RdmaError) -> None:
        super().lose(error)
        self._leave(now=False)

    def fail(self, error: RdmaError) -> None:
        """End the channel because a GPU of ours failed, and tell the peer."""
        self.device.lost(self, error)

    def _leave(self, *, now: bool) -> None:
        """Give up streams and mappings as soon as no copy of ours is under way. ``now``: this thread may call the driver."""
        self.lanes.leave(self._release, now=now, needed=bool(self.peer_gpus.imports.opened))

    def _release(self) -> None:
        self.peer_gpus.released = True
        for close in (self.pins.close, self.peer_gpus.imports.close, self.device.gpu.release):
            with contextlib.suppress(RdmaError):  # of a context that is lost, with all that was in it
                close()


def _ordered(far: int, near: int, nbytes: int, write: bool) -> tuple[int, int, int]:
    return (far, near, nbytes) if write else (near, far, nbytes)
