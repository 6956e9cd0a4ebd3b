"""Tensors as the collectives take them: what is refused, what lies flat in memory already; and what a call of a group reads and
writes, as flat contiguous memory of the host (``Ends``). Tensors on GPUs go through host memory, in the order of streams
(``Staging``).

A call copies what it reads to pinned memory of the arena, exchanges that, and copies what came to the GPU. The copies run on
two streams of ours for each device, one for each way. Both wait for what the caller's current stream had been given when it
made the call: so for what made the tensors, and for what still reads the old values of those that are written. The thread that
runs the call waits for its copies, so a call that has ended is there for every stream.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from ..base.here import lies_elsewhere
from ..message.layout import span
from ..transport import Device, Event, NotSupported, Pins, cuda_driver

Flat = torch.Tensor


def check(tensors: Sequence[torch.Tensor], what: str) -> None:
    """Raise unless these are dense tensors of one type, on the CPU or on GPUs that this process's driver serves."""
    for tensor in tensors:
        if not tensor.is_cpu and tensor.device.type != cuda_driver.kind():
            hint = "the backend rdmarpc takes tensors on the CPU and on CUDA devices"
            raise NotSupported(f"{what} of a tensor on {tensor.device}", hint=hint)
        if tensor.layout is not torch.strided:
            raise NotSupported(f"{what} of a tensor with layout {tensor.layout}", hint="give tensor.to_dense()")
        if tensor.is_nested or tensor.is_quantized:
            kind_of = "nested" if tensor.is_nested else "quantized"
            raise NotSupported(f"{what} of a {kind_of} tensor", hint="give its parts: memory does not say all of it")
        if not _has_memory(tensor, span(tensor.shape, tensor.stride())):
            what = f"{what} of a {type(tensor).__name__} without memory of its own"
            raise NotSupported(what, hint="give the tensor that holds the values")
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(f"{what} of tensors of several types: {tensors[0].dtype} and {tensor.dtype}")


def plain(tensor: torch.Tensor, other: torch.Tensor | None = None) -> bool:
    """Whether these are dense, on the CPU, of one type, and what their memory says: what most calls are made with."""
    dense = tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    one = dense and literal(tensor) and _has_memory(tensor, tensor.numel())
    return one and (other is None or (other.dtype == tensor.dtype and plain(other)))


def _has_memory(tensor: torch.Tensor, extent: int) -> bool:
    """Whether there is memory where a tensor's values are. Subclasses that wrap other tensors have none, nor do fake tensors,
    those of ``torch.func``, and those whose storage was given back, or shrunk. A view of a storage that was given back has an
    address."""
    try:
        if not extent or lies_elsewhere(tensor):  # that has a worker's, and goes by way of a copy
            return True
        held = tensor.untyped_storage().nbytes()
        return tensor.data_ptr() != 0 and held >= (tensor.storage_offset() + extent) * tensor.itemsize
    except RuntimeError:
        return False


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or, of the result of a functional collective (``DTensor.to_local`` gives such), the tensor that it
    stands for, once it is there."""
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


def literal(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor holds its values, one after the other. A view may be the conjugate or the negative of what
    lies there; what lies at a worker has no memory here."""
    return not lies_elsewhere(tensor) and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def writing(tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """What the writing of results runs in: no graph, and the mode of inference if one of them was made in it. The thread that
    writes is not always the caller's."""
    return torch.inference_mode() if any(each.is_inference() for each in tensors) else torch.no_grad()


def values(tensor: torch.Tensor) -> Flat:
    """The values of a tensor, in its memory if they lie there."""
    found = tensor.detach()
    return found.view(-1) if literal(found) else found.cpu().resolve_conj().resolve_neg().contiguous().view(-1)


def check_apart(tensors: Sequence[torch.Tensor], what: str) -> None:
    """Raise if two of these whose values lie flat in memory have some of it in common: which of them it holds in the end would
    depend on timing."""
    spans = sorted((each.data_ptr(), each.nbytes) for each in tensors if each.numel() and literal(each))
    if any(after < start + nbytes for (start, nbytes), (after, _) in pairwise(spans)):
        raise ValueError(f"{what} into tensors that share memory with each other: clone them before")


def check_own(place: Flat, part: Flat, what: str) -> None:
    """Raise unless what stays at this rank fits its place. What peers send is compared when it comes."""
    if place.numel() != part.numel():
        raise ValueError(f"{what} of {part.numel()} elements into a tensor of {place.numel()}")


def split(tensor: torch.Tensor, sizes: Sequence[int], count: int, what: str) -> list[Flat]:
    """A flat contiguous tensor cut along dimension 0 of its original, whose rows are ``sizes`` (empty: ``count`` equal
    parts)."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if sizes:
        if len(sizes) != count or sum(sizes) != rows:
            why = f"{what}: the split sizes {list(sizes)} do not add up to the {rows} rows, one for each of {count} ranks"
            raise ValueError(why)
        each = tensor.numel() // rows if rows else 0
        return list(tensor.detach().view(-1).split([size * each for size in sizes]))
    if tensor.numel() % count or (tensor.dim() and rows % count and tensor.numel()):
        raise ValueError(f"{what}: {tuple(tensor.shape)} is not divisible by {count} ranks")
    part = tensor.numel() // count
    return list(tensor.detach().view(-1).split(part)) if part else [tensor.detach().view(-1)] * count


class _Lane:
    """One way between a device and the host."""

    def __init__(self, index: int) -> None:
        self._index = index
        with cuda_driver.driver().on(index):
            self.handle = cuda_driver.driver().new_stream()
        self._stream = cuda_driver.as_torch(index, self.handle)

    def copy(self, begin: Event, target: torch.Tensor, source: torch.Tensor) -> Event:
        """Enqueue a copy behind ``begin``. The event of its end."""
        begin.follow(self.handle)
        with cuda_driver.driver().on(self._index), cuda_driver.on_streams((self._stream,)):
            target.copy_(source, non_blocking=True)
        return Event(self._index, self.handle)


class Staging:
    """Of one group. Thread-safe."""

    def __init__(self, device: Device | None) -> None:
        """``device``: whose arena has the buffers; ``None`` in a group of one."""
        self._device = device
        self._pins = Pins()
        self._lanes: dict[tuple[int, bool], _Lane] = {}
        self._lock = threading.Lock()

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Flat host memory for the values of a tensor on a GPU."""
        if self._device is None or not tensor.nbytes:
            return torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
        host = self._device.empty(tensor.numel(), dtype=tensor.dtype)
        found = self._device.arena.find(host.data_ptr(), host.nbytes)
        if found is not None:  # else the driver copies through memory of its own
            self._pins.segment(found[0], tensor.device.index)
        return host

    def read(self, tensor: torch.Tensor, host: torch.Tensor) -> Event:
        """Copy the values of a tensor to the host. They are there when the event has come."""
        begin = self._begin(tensor)
        self._count(tensor)
        return self._lane(tensor, out=True).copy(begin, host.view(tensor.shape), tensor.detach())

    def write(self, tensor: torch.Tensor, host: torch.Tensor) -> Callable[[], Event]:
        """The call that copies what is in host memory then into a tensor."""
        begin, lane = self._begin(tensor), self._lane(tensor, out=False)
        self._count(tensor)
        return lambda: lane.copy(begin, tensor.detach(), host.view(tensor.shape))

    def close(self) -> None:
        """Let go of what is pinned. No call is under way."""
        self._pins.close()

    def _begin(self, tensor: torch.Tensor) -> Event:
        """What the caller's current stream has been given until now."""
        if cuda_driver.capturing():
            raise NotSupported("a thread that captures a CUDA graph calls a collective", hint="call it outside of the graph")
        index = tensor.device.index
        return Event(index, cuda_driver.current_stream(index))

    def _lane(self, tensor: torch.Tensor, *, out: bool) -> _Lane:
        key = tensor.device.index, out
        with self._lock:
            found = self._lanes.get(key)
            if found is None:
                found = self._lanes[key] = _Lane(tensor.device.index)
            return found

    def _count(self, tensor: torch.Tensor) -> None:
        if self._device is not None:
            self._device.count_staged(tensor.nbytes)


def staged(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies on a GPU that this process's driver serves."""
    return not tensor.is_cpu and tensor.device.type == cuda_driver.kind()


def come(events: list[Event], limit: float) -> None:
    """Wait for these, so many seconds at most. Raises ``TransferTimeout``, or ``RdmaError`` if a GPU has failed."""
    deadline = time.monotonic() + limit
    for event in events:
        late = f"a GPU did not come to the tensors of a collective within {limit:g} s"
        event.wait(deadline - time.monotonic(), late, "cuda")


class Ends:
    """Of one call. ``source`` and ``target`` are called when it is made; ``begin`` and ``end`` by the thread that runs it."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._read: list[Event] = []
        self._writes: list[Callable[[], Event]] = []
        self._back: list[Callable[[], object]] = []
        self._kept: list[torch.Tensor] = []
        """Tensors that copies of a GPU may still read."""

    def source(self, tensor: torch.Tensor) -> Flat:
        """The values of a tensor, in its memory if they lie there. ``begin`` waits for them."""
        return self._fetched(tensor) if staged(tensor) else values(tensor)

    def target(self, tensor: torch.Tensor, *, read: bool = False) -> Flat:
        """Where a tensor's new values go: its memory if they may lie there, else a buffer that ``end`` copies into the tensor.
        ``read``: the values are read before."""
        plain = tensor.detach()
        if not staged(plain) and literal(plain):
            return plain.view(-1)
        if plain.numel() > 1 and any(step == 0 and count > 1 for step, count in zip(plain.stride(), plain.shape)):
            raise ValueError("a collective into a tensor several of whose elements are one place in memory: clone it before")
        if staged(plain):
            host = self._fetched(plain) if read else self._staging.host(plain)
            self._writes.append(self._staging.write(plain, host))
            return host
        buffer = values(plain).view(plain.shape) if read else torch.empty(plain.shape, dtype=plain.dtype, device="cpu")
        self._back.append(lambda: plain.copy_(buffer))
        return buffer.view(-1)

    def _fetched(self, tensor: torch.Tensor) -> Flat:
        host = self._staging.host(tensor)
        self._read.append(self._staging.read(tensor, host))
        self._kept.append(tensor)
        return host

    def begin(self, limit: float) -> None:
        """What the call reads is there. ``limit``: seconds. Raises ``TransferTimeout``, ``RdmaError``."""
        come(self._read, limit)
        self._kept.clear()

    def end(self, limit: float) -> None:
        """The exchange is over: what came goes to where it belongs, and is there when this returns. Raises as ``begin``."""
        for back in self._back:
            back()
        come([write() for write in self._writes], limit)
