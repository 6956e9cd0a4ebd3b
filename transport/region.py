"""Regions: memory that peers may touch, and the descriptors that name it."""

from __future__ import annotations

import contextlib
import struct
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.dlpack import DLDeviceType

from .errors import RemoteAccessError

_WIRE = struct.Struct("<4sBQIIQQQ")
LENT = 0xFFFFFFFF
"""Region number of memory lent to one peer for READs (``Device.lend``). ``shm``: the offset is an address of the owner, who
vouches for it; ``tcp``: the key names the loan, the offset begins with it."""
_MAGIC, _VERSION = b"RRGN", 1
OTHERS = "the descriptor was exported by another device, or in an earlier life of this one"
READ_ONLY = "may only be read"


class RemoteRegion:
    """A descriptor of a peer's memory: 45 bytes of plain numbers in a fixed layout, without code. ``Region.export`` makes it.
    Treat it as immutable.

    ``owner`` and ``epoch`` name the life of the memory that exported it, ``region`` and ``key`` the registered memory,
    ``offset`` and ``nbytes`` the range of bytes inside. Copies between a ``RemoteRegion`` and local memory need equal sizes;
    slices name parts: ``remote[lo:hi]`` (bytes). A descriptor keeps nothing alive at the owner.
    """

    __slots__ = ("epoch", "key", "nbytes", "offset", "owner", "region", "resolved")

    def __init__(self, owner: int, epoch: int, region: int, key: int, offset: int, nbytes: int) -> None:
        self.owner, self.epoch, self.region = owner, epoch, region
        self.key, self.offset, self.nbytes = key, offset, nbytes
        self.resolved: tuple[object, int, bool] | None = None
        """A channel's note to itself: this range was checked, where it is mapped, whether it was checked for writing."""

    def __getitem__(self, part: slice) -> RemoteRegion:
        start, stop, step = part.indices(self.nbytes)
        outside = any(end is not None and abs(end) > self.nbytes for end in (part.start, part.stop))
        if step != 1 or stop < start or outside:
            raise RemoteAccessError(f"bytes {part.start}:{part.stop} are not inside a region of {self.nbytes} bytes")
        return RemoteRegion(self.owner, self.epoch, self.region, self.key, self.offset + start, stop - start)

    def resized(self, nbytes: int) -> RemoteRegion:
        """The same place with another length, which the owner must have promised."""
        return RemoteRegion(self.owner, self.epoch, self.region, self.key, self.offset, nbytes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteRegion) and self.dump() == other.dump()

    def __hash__(self) -> int:
        return hash(self.dump())

    packed = staticmethod(partial(_WIRE.pack, _MAGIC, _VERSION))
    """The ``dump`` of a descriptor of these fields, in the order in which ``RemoteRegion`` takes them."""

    def dump(self) -> bytes:
        return self.packed(self.owner, self.epoch, self.region, self.key, self.offset, self.nbytes)

    @staticmethod
    def load(blob: bytes | bytearray | memoryview) -> RemoteRegion:
        """Parse 45 bytes. Raises ``RemoteAccessError`` if they are no descriptor, or one of another version."""
        if len(blob) != _WIRE.size:
            raise RemoteAccessError(f"a descriptor has {_WIRE.size} bytes, got {len(blob)}")
        magic, version, *fields = _WIRE.unpack(blob)
        if magic != _MAGIC or version != _VERSION:
            raise RemoteAccessError(f"not a region descriptor of version {_VERSION}")
        return RemoteRegion(*fields)

    WIRE_SIZE = _WIRE.size


def barrier(region: int, key: int, offset: int, nbytes: int, known: tuple[int, int] | None, right: str) -> str:
    """Why a range that a descriptor names may not be touched; empty if it may. ``known``: bytes and key of the memory that is
    registered under that number, ``right``: what keeps the peer from it whatever its key."""
    if known is None:
        return f"region {region} is not registered (any more)"
    if right:
        return f"region {region} {right}"
    if key != known[1]:
        return f"wrong key for region {region}"
    if offset + nbytes > known[0]:
        return f"bytes {offset}:{offset + nbytes} of a region of {known[0]} bytes"
    return ""


def refusal(why: str, peer: str, device: str) -> RemoteAccessError:
    """The error of a copy that its descriptor does not permit."""
    return RemoteAccessError(why, peer=peer, device=device, status="REM_ACCESS_ERR")


class Region(contextlib.AbstractContextManager["Region"]):
    """Local bytes that connected peers may read and write for as long as this object is open. ``Device.register`` makes it.

    It keeps its tensor alive. Regions over arena tensors are free. For other memory ``close`` tells every peer, and returns
    when no copy of theirs is under way. Idempotent, usable as a context manager.
    """

    def __init__(self, memory: Any, tensor: torch.Tensor, region: int, key: int, offset: int, foreign: bool) -> None:
        """``memory``: what registered it, a ``memory.Memory`` or a device that stands on one; it has ``deregister``."""
        self.tensor = tensor
        self.nbytes = tensor.numel() * tensor.element_size()
        self.remote = RemoteRegion(memory.uid, memory.epoch, region, key, offset, self.nbytes)
        self._memory = memory if foreign else None

    def export(self) -> bytes:
        """The descriptor to hand to a peer, by any way you like."""
        return self.remote.dump()

    def close(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.deregister(self)

    def __exit__(self, *exc: object) -> None:
        self.close()


class Array(Protocol):
    """An array of another library (cupy, numpy) whose memory torch can share, by the protocol of DLPack."""

    def __dlpack__(self, **options: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, int]: ...


def as_tensor(array: torch.Tensor | Array) -> torch.Tensor:
    """A tensor as it is; for an array of another library a tensor over its memory. On a GPU torch's current stream follows what
    that library's current stream was given. Raises ``ValueError`` for what torch cannot share; its text says why."""
    if isinstance(array, torch.Tensor):
        return array
    name = f"{type(array).__module__}.{type(array).__name__}"
    if not hasattr(array, "__dlpack__"):
        raise ValueError(f"the local side is a tensor, an array that torch.from_dlpack takes, or a Region, got {name}")
    try:
        kind, index = array.__dlpack_device__()
        # Within the array's device: the current stream that cupy looks at is one of the current device.
        with contextlib.nullcontext() if kind == DLDeviceType.kDLCPU else torch.accelerator.device_index(index):
            return torch.from_dlpack(array)
    except (AssertionError, BufferError, RuntimeError, TypeError, ValueError) as error:  # of torch, and of the other library
        dtype = getattr(array, "dtype", "unknown")
        raise ValueError(f"torch cannot share the memory of this {name} of dtype {dtype}: {error}") from error


def local_bytes(tensor: torch.Tensor, gpu: str = "") -> tuple[int, int]:
    """Address and size in bytes of a dense, contiguous tensor on the CPU, or on a device of type ``gpu``. Raises ``ValueError``
    for any other tensor; its text says what to do."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError(f"only dense tensors can be copied, got layout {tensor.layout}")
    if tensor.device.type not in ("cpu", gpu):
        raise ValueError(f"this device copies {f'CPU and {gpu}' if gpu else 'CPU'} memory, got a tensor on {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"a one-sided copy needs contiguous memory, got shape {tuple(tensor.shape)} with strides {tensor.stride()}; "
            "call .contiguous() first"
        )
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()
