"""The ``cuda`` device: ``shm``, and GPU memory besides.

Between processes of one host, GPU memory is mapped by CUDA IPC, and a WRITE or a READ is an asynchronous copy on a side stream,
one a channel and GPU. No thread waits for a GPU in a post: a copy starts when what the poster's current stream was given before
is done, and the notification is sent by the driver's own thread when it is over. At the receiver a counted notification means
that the data is in the GPU's memory: any stream may use it. What is between host memories goes as on ``shm``.

Such a copy ends later than its post. So a post that needs no GPU, as a bare notification does, may arrive before the copies
that were posted earlier: what announces a copy is the notification of its own post, or one that is sent after ``Work.wait`` or
``fence``. Copies of one GPU over one channel arrive in the order of their posts.

What a GPU copies to or from host memory is pinned where it lies in an arena, by whole segments. Other host memory goes through
buffers of the driver, and the post may last as long as the copy. A stream that is being captured into a CUDA graph cannot be
posted from.

For people who keep to streams: ``Work.block_current_stream`` orders a stream after a copy, ``Channel.notify_after`` a
notification after a stream. What a peer READs or WRITEs is ordered by notifications alone.

Arrays of cupy are copied and registered like tensors, behind what cupy's current stream was given; ``block_current_stream`` and
``notify_after`` know torch's streams only. For Numba's, ``torch.as_tensor(array, device="cuda")`` shares the memory.

Never assume a device type: ``cuda_driver.kind()``. Tested over a software driver; not run on hardware.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import torch

from ..channel import Channel
from ..device import DeviceOptions
from ..errors import NotSupported, PeerLost, RegistrationError
from ..gpu import driver
from ..gpu.arena import GpuArena, settle
from ..memory.arena import PINNED_SEGMENT_BYTES
from ..region import Array, Region, RemoteRegion, as_tensor
from ..shm.channel import ShmChannel
from ..shm.device import ShmDevice
from .channel import CudaChannel

_LOOK_S = 0.5


class CudaDevice(ShmDevice):
    """See the module, and ``ShmDevice``, with which it shares addresses: a peer without a GPU may connect, and be connected to.
    Opening it does not touch a GPU; ``NotSupported`` where there is none."""

    kind = "cuda"
    channel_type = CudaChannel

    def __init__(self, options: DeviceOptions) -> None:
        if why := why_not():
            raise NotSupported(why, device="cuda", hint="open shm, or auto, which is shm here")
        super().__init__(options)

    def _attach(self) -> None:
        arena = self.memory.gpu
        if not isinstance(arena, GpuArena):
            arena = self.memory.gpu = GpuArena(self.memory)
        self.gpu = arena
        # The driver pins whole segments.
        self.arena.segment_bytes = min(self.arena.segment_bytes, PINNED_SEGMENT_BYTES)
        self.gpu.devices.append(self)
        self._over = threading.Event()
        self._watching = False
        super()._attach()

    # -- memory

    def _on_gpu(self, sizes: tuple[int, ...], dtype: torch.dtype, place: torch.device) -> torch.Tensor:
        """Born registered: every peer may read and write it. Raises ``NotSupported`` where the GPU's memory cannot be
        exported, and torch's ``OutOfMemoryError``."""
        if place.type != self.gpu.kind:
            raise NotSupported(f"there is no memory of {place} here", device="cuda", hint=f"cpu or {self.gpu.kind}")
        return self.gpu.empty(sizes, dtype, place)

    def register(self, tensor: torch.Tensor | Array) -> Region:
        """As for any device, also for GPU memory: free for tensors of ``empty``; then returns when what the caller's current
        stream was given is done (``gpu/arena``)."""
        self.check()
        tensor = as_tensor(tensor)
        return self.gpu.register(tensor) if self.gpu.of(tensor) else super().register(tensor)

    def export(self, tensor: torch.Tensor) -> bytes:
        """As for any device, also for GPU tensors of ``empty``. See ``register``."""
        if not self.gpu.of(tensor):
            return super().export(tensor)
        self.check()
        remote = self._describe(tensor)
        settle(tensor.device.index)
        return remote.dump()

    def _describe(self, tensor: torch.Tensor) -> RemoteRegion:
        segment, nbytes = self.gpu.find(tensor), tensor.numel() * tensor.element_size()
        if segment is not None:
            offset = tensor.data_ptr() - segment.base
            return RemoteRegion(self.uid, self.epoch, segment.number, segment.key, offset, nbytes)
        if nbytes == 0:
            return RemoteRegion(self.uid, self.epoch, 0, 0, 0, 0)
        hint = "make it with device.empty(device=), or keep device.register(tensor)"
        raise RegistrationError("this tensor is not in the GPU arena", device="cuda", hint=hint)

    def lend(self, tensor: torch.Tensor, channel: Channel) -> RemoteRegion:
        """As for any device. A READ of GPU memory does not wait for our streams: tell the peer of it by ``notify_after``."""
        return self._describe(tensor) if self.gpu.of(tensor) else super().lend(tensor, channel)

    def can_lend(self, tensor: torch.Tensor, channel: Channel) -> bool:
        if not self.gpu.of(tensor):
            return super().can_lend(tensor, channel)
        return isinstance(channel, CudaChannel) and self.gpu.find(tensor) is not None

    # -- announcements

    def _introduce(self, channel: ShmChannel) -> None:
        assert isinstance(channel, CudaChannel)
        segments, parts = self.gpu.registered()
        for segment in segments:
            channel.tell(segment)
        for part in parts:
            channel.tell_part(*part)

    def tell_all(self, tell: Callable[[CudaChannel], None]) -> None:
        """Announce something to every peer with a GPU."""
        for channel in self.opened():
            try:
                tell(channel)
            except PeerLost as error:
                channel.lose(error)

    # -- for people, and the end

    def explain(self) -> str:
        return "\n".join((super().explain().replace("shm:", "cuda: as shm,", 1), *self._explain_gpus()))

    def _explain_gpus(self) -> list[str]:
        kind = self.gpu.kind
        if not driver.active():
            return [f"  gpus           {driver.count()} of type {kind}, not used by this process yet"]
        cuda = driver.driver()
        version = cuda.version()
        lines = [f"  driver         CUDA {version // 1000}.{version % 1000 // 10}"]
        lines += [f"  {kind}:{index:<12} at PCI {cuda.pci_bus_id(index)}" for index in range(driver.count())]
        lines += self.gpu.explain()
        for channel in self.opened():
            peer = channel.peer_gpus
            state = f"refused ({peer.no_ipc})" if peer.no_ipc else f"{peer.imports.opened} segments mapped"
            lines.append(f"  ipc            {channel.peer}: {state}")
            if channel.pins.refused:
                lines.append(f"                 its arena is not pinned: {channel.pins.refused}; copies of it wait in the post")
        return lines

    def watch(self) -> None:
        """Look after the GPUs from time to time from now on. This happens on a thread of its own, because any call of the
        driver may have to wait for another thread's, even for a peer that is lost."""
        with self._lock:
            if not self._watching and not self._over.is_set():
                with contextlib.suppress(RuntimeError):  # no more threads: the process ends
                    threading.Thread(target=self._watch, name="rdmarpc-gpus", daemon=True).start()
                    self._watching = True

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            for channel in self.opened():
                try:
                    channel.tend()
                except BaseException as error:
                    self.break_off(channel, error, "looking after copies of a GPU")

    def _shut(self) -> None:
        self._over.set()
        super()._shut()
        if self in self.gpu.devices:
            self.gpu.devices.remove(self)
        self.gpu.release()


def why_not() -> str:
    """Why there is no such device here; empty if there is. Does not touch a GPU."""
    kind = driver.kind()
    if not kind:
        return "torch has no GPU's driver here"
    return "" if driver.count() else f"there is no GPU of type {kind}"
