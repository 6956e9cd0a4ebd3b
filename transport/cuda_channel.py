"""The connection between two processes of one host of which at least one has a GPU: that of ``shm``, and copies on side
streams.

What the peer tells besides: a ``GPU_SEGMENT`` is an allocation of its driver (number, key, its address there, bytes; the file
that comes with it holds the GPU's UUID and the IPC handle), a ``GPU_PART`` a foreign region on one (the upper half of the
number is the segment's). Both end by ``GONE``, which is answered when no copy of ours on it is under way.

A segment is mapped when it is first copied to or from, once for each GPU that copies, and stays so until it is gone, or until
the channel has ended and its lanes are idle.

Which GPU copies: that of the local tensor; for a local tensor on the CPU, that of the remote memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import kernels
from .channel import Local, Pair, Transfer, Window, Work, check_notify, sort_pair
from .cuda_arena import GpuSegment
from .cuda_driver import count, driver, kind
from .cuda_ipc import imports_of
from .cuda_lane import Lane
from .cuda_pins import Pins
from .cuda_transfer import Copies, CudaJob, CudaTransfer, Side
from .errors import NotSupported, RdmaError, TransferTimeout
from .mapping import check_sealed, memfd
from .region import LENT, RemoteRegion, local_bytes
from .shm_channel import GONE_ACK, INFLIGHT_AT, ShmChannel, ShmMapped

if TYPE_CHECKING:
    from .cuda import CudaDevice

GPU_SEGMENT, GPU_PART = 8, 9
_PASS = struct.Struct("<32s64sQ")  # UUID in hexadecimal, IPC handle, the driver's number of the allocation


class PeerSegment:
    """An allocation of the peer."""

    def __init__(self, channel: CudaChannel, base: int, uuid: str, handle: bytes, allocation: int) -> None:
        self._channel, self._base, self._handle, self._allocation = channel, base, handle, allocation
        self.uuid = uuid
        self.gone = False
        self._at: dict[int, int] = {}

    @functools.cached_property
    def index(self) -> int:
        """The GPU that it lies on, if this process sees that, else any."""
        return next((index for index in range(count()) if driver().uuid(index) == self.uuid), 0)

    def at(self, index: int) -> int:
        """Where it is mapped for copies by a device. ``NotSupported`` if it cannot be."""
        found = self._at.get(index)
        if found is None:
            channel = self._channel
            if channel.pid == os.getpid():  # a handle cannot be opened where it comes from, and need not be
                found = self._base
            else:
                try:
                    found = channel.imports.base(self._allocation, self._handle, index, self._idle)
                except RdmaError as error:
                    channel.no_ipc = error.status
                    raise NotSupported(
                        f"the peer's GPU memory cannot be mapped here: {error.message}",
                        peer=channel.peer,
                        device="cuda",
                        status=error.status,
                        hint="CUDA IPC needs GPUs that reach each other, and containers that share them, IPC and PIDs",
                    ) from None
            self._at[index] = found
        return found

    def _idle(self) -> bool:
        return self.gone or self._channel.released


class CudaChannel(ShmChannel):
    device: CudaDevice
    gpus = maps_gpus = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kind = kind()
        self.gpu_lock = threading.Lock()
        self.imports = imports_of(self.peer_uid)
        self.no_ipc = ""
        """The driver's word when a segment of the peer could not be mapped."""
        self.left = self.released = False
        """Whether the end has come; whether the lanes are gone, as they are when they are idle after that."""
        self._pins = Pins()  # of the peer's arena, mapped here
        self._lanes: dict[int, Lane] = {}
        self._lanes_lock = threading.Lock()
        self._segments: dict[int, PeerSegment] = {}
        self._parts: dict[int, tuple[int, int, int]] = {}  # GPU regions by number: (offset in the segment, bytes, key)
        self._places: dict[int, PeerSegment] = {}  # and their segments
        self._after: dict[tuple[int, int], CudaJob] = {}

    # -- copies

    def prepare(self, pairs: Sequence[Pair], *, notify: int | None = None) -> Transfer:
        self.check()
        check_notify(notify)
        sides = [sort_pair(dst, src, self.kind) for dst, src in pairs]
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
        side = sort_pair(dst, src, self.kind)
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
        """The segment of a remote range in GPU memory; ``None`` for one in host memory. ``RemoteAccessError``."""
        if remote.nbytes == 0 or remote.region == LENT:
            return None
        if remote.region in self._mapped:
            return None
        self.resolve(remote)  # asks the peer about what is unknown
        return self._places.get(remote.region)

    def still_there(self, remote: RemoteRegion) -> None:
        """``RemoteAccessError`` if a region was withdrawn. With ``gpu_lock``: asks nobody."""
        if remote.region not in self._parts:
            raise self._refuse(f"region {remote.region} is not registered (any more)")

    def withdrawable(self, remote: RemoteRegion) -> bool:
        """Whether it may be withdrawn while the peer lives: a foreign region."""
        segment = self._places.get(remote.region)
        return segment is not None and self._segments.get(remote.region) is not segment

    def place(self, side: Side) -> tuple[Lane | None, Copies]:
        """Who copies this (``None``: the processor), and what. Raises ``NotSupported`` where it cannot be copied in one
        step."""
        remote, tensor, write = side
        address, nbytes = local_bytes(tensor, self.kind)
        segment = self.look_up(remote)
        if tensor.is_cpu and segment is None:
            far, mapped = self.resolve(remote, write=write)
            if not mapped:
                raise NotSupported(
                    "memory outside the arenas cannot be in one list with GPU memory", peer=self.peer, device="cuda"
                )
            return None, [self._ordered(far, address, nbytes, write)] if nbytes else []
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
            base, total, _ = self._mapped[remote.region]
            writable = remote.region not in self._read_only
            self._pins.hold(base, total, index, self._maps[remote.region], writable=writable)
        return lane, [self._ordered(far, address, nbytes, write)]

    @staticmethod
    def _ordered(far: int, near: int, nbytes: int, write: bool) -> tuple[int, int, int]:
        return (far, near, nbytes) if write else (near, far, nbytes)

    def lane(self, index: int) -> Lane:
        """Our side stream on a device."""
        found = self._lanes.get(index)
        if found is not None and not self.left:
            return found
        # Made without the lock, which who hears of the peer's end must not wait for.
        made = Lane(self, self.device.gpu, index)
        try:
            with self._lanes_lock:
                self.check()
                found = self._lanes.setdefault(index, made)
        finally:
            if found is not made:
                made.destroy()
        self.device.watch()
        return found

    def notify_after(self, imm: int, device: torch.device | str) -> Work:
        self.check()
        check_notify(imm)
        place = torch.device(device)
        if place.type != self.kind:
            raise NotSupported(f"{place} is no GPU of this process", peer=self.peer, device="cuda")
        index = torch.accelerator.current_device_index() if place.index is None else place.index
        job = self._after.get((imm, index))
        if job is None or job.failed:
            job = self._after[imm, index] = CudaJob(self, [(self.lane(index), [])], [], imm)
        return job.post(None)

    def fence(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        super().fence(timeout)
        for lane in list(self._lanes.values()):
            lane.wait(lane.sent, None if deadline is None else max(0.0, deadline - time.monotonic()))

    # -- what needs memory that the processor reaches

    def window(self, remote: RemoteRegion, local: torch.Tensor, *, notify: int) -> Window:
        self._host_only(remote)
        return super().window(remote, local, notify=notify)

    def adopt(self, remote: RemoteRegion, release: RemoteRegion) -> torch.Tensor:
        self._host_only(remote)
        return super().adopt(remote, release)

    def map(self, remote: RemoteRegion) -> ShmMapped | None:
        return None if self.look_up(remote) is not None else super().map(remote)

    def _host_only(self, remote: RemoteRegion) -> None:
        if self.look_up(remote) is not None:
            raise NotSupported("GPU memory cannot be used in place by a processor", peer=self.peer, device="cuda")

    # -- what the peer tells

    def _look_up(self, number: int) -> tuple[dict[int, tuple[int, int, int]], tuple[int, int, int] | None]:
        entry = self._parts.get(number)
        return (self._parts, entry) if entry is not None else super()._look_up(number)

    def tell(self, segment: GpuSegment) -> None:
        """Of a segment of ours."""
        memory, fd = memfd("rdmarpc-gpu", _PASS.size)
        try:
            _PASS.pack_into(memory, 0, segment.uuid.encode(), segment.handle, segment.allocation)
            self.send(GPU_SEGMENT, segment.number, segment.key, segment.base, segment.nbytes, fd)
        finally:
            memory.close()
            os.close(fd)

    def tell_part(self, number: int, key: int, segment: int, offset: int, nbytes: int) -> None:
        """Of a foreign region of ours."""
        self.send(GPU_PART, segment << 32 | number, key, offset, nbytes)

    def _hear_more(self, kind: int, number: int, key: int, address: int, nbytes: int, fds: list[int]) -> None:
        if kind == GPU_SEGMENT and fds and number not in self._segments:  # which may be told twice
            check_sealed(fds[0], _PASS.size)
            uuid, handle, allocation = _PASS.unpack(os.pread(fds[0], _PASS.size, 0))
            segment = PeerSegment(self, address, uuid.decode("ascii", "replace"), handle, allocation)
            self._segments[number] = self._places[number] = segment
            self._parts[number] = (0, nbytes, key)
        elif kind == GPU_PART and (found := self._segments.get(number >> 32)) is not None:
            number &= 0xFFFFFFFF
            self._places[number] = found
            self._parts[number] = (address, nbytes, key)

    def _gone(self, number: int) -> None:
        if number not in self._parts:
            super()._gone(number)
            return
        # A copy that is being posted, or was, is still to end, and to unmap may wait for whatever a GPU does. This thread
        # serves everybody.
        with contextlib.suppress(RuntimeError):  # no more threads: the process ends
            threading.Thread(target=self._forget, args=(number,), name="rdmarpc-gone", daemon=True).start()

    def _forget(self, number: int) -> None:
        with self.gpu_lock:
            self._parts.pop(number, None)
            self._places.pop(number, None)
            segment = self._segments.pop(number, None)
        marks = [(lane, lane.sent) for lane in list(self._lanes.values())]
        try:
            for lane, ticket in marks:
                lane.wait(ticket, None)
            if segment is not None:
                segment.gone = True
                self.imports.close()
            self.send(GONE_ACK, number)
        except RdmaError:
            pass  # the channel has ended: who waits there hears that
        except BaseException as error:
            self.device.break_off(self, error, "letting go of a peer's GPU memory")

    # -- the end

    def tend(self) -> None:
        """Let go of what is over, and see whether a GPU has failed. Now and then."""
        for lane in list(self._lanes.values()):
            lane.sweep()
            lane.look()

    @property
    def unpinned(self) -> str:
        """Why the driver did not pin pages of the peer's arena."""
        return self._pins.refused

    @property
    def copying(self) -> bool:
        """Whether a copy of ours is under way."""
        return kernels.load(self.peer_inbox + INFLIGHT_AT) > 0

    def abort(self, timeout: float = 5.0) -> None:
        failed: TransferTimeout | None = None
        try:
            super().abort(timeout)
        except TransferTimeout as error:
            failed = error
        if os.getpid() == self.device.pid and self.copying:
            why = "a copy of ours is still under way: what its stream was given before it has not ended"
            raise TransferTimeout(why, peer=self.peer, device="cuda") from None
        if failed is not None:
            raise failed

    def close(self) -> None:
        if os.getpid() != self.device.pid:
            return
        if self.error is None:  # what was posted is still to arrive
            self._settle(self.device.close_deadline())
        super().close()
        self._leave(now=True)

    def lose(self, error: RdmaError) -> None:
        super().lose(error)
        self._leave(now=False)

    def fail(self, error: RdmaError) -> None:
        """``lose``, and tell the peer: our GPU failed."""
        self.device._break(self, error)

    def _settle(self, deadline: float) -> bool:
        idle = [lane.idle(deadline) for lane in list(self._lanes.values())]
        return all(idle)

    def _leave(self, *, now: bool) -> None:
        """Give up streams and mappings, as soon as nothing of ours is under way. ``now``: this thread may ask the driver."""
        with self._lanes_lock:
            first, self.left = not self.left, True
            idle = not self._lanes and not self.imports.opened
        if idle or (now and self._settle(0.0)):
            self._release()
        elif first:
            with contextlib.suppress(RuntimeError):  # no more threads: the process ends
                threading.Thread(target=self._linger, name="rdmarpc-side-streams", daemon=True).start()

    def _linger(self) -> None:
        while not self._settle(time.monotonic() + 1.0):
            pass
        self._release()

    def _release(self) -> None:
        with self._lanes_lock:
            lanes, self._lanes = list(self._lanes.values()), {}
            self.released = True
        for lane in lanes:
            lane.destroy()
        for close in (self._pins.close, self.imports.close, self.device.gpu.release):
            with contextlib.suppress(RdmaError):  # of a context that is lost, with all that was in it
                close()
