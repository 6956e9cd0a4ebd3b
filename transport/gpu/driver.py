"""The CUDA driver, as far as we need it: its own functions under their own names, called without the GIL.

We call the driver and not the runtime, because torch carries its own copy of the runtime. Both stand on the one driver and on
the primary context of each device, so pointers, streams and device indices are the same as torch's. The library is opened by
the first ``driver()``, so importing this module needs no GPU.

The driver is that of torch's accelerator. For ``cuda`` it is ``libcuda.so.1``. An accelerator from outside torch whose driver
speaks this interface says so by two attributes of its device module (``torch.get_device_module``): ``driver_library`` (path)
and ``raw_stream(index)`` (the handle of this thread's current stream).

The signatures are those of CUDA 12 and 13 (CUDA Driver API reference manual); these functions have not changed since 11.7.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any

import torch

from ..errors import NotSupported, RdmaError

# Constants of cuda.h.
CU_STREAM_NON_BLOCKING = 1
CU_EVENT_DISABLE_TIMING = 2
CU_STREAM_WAIT_VALUE_GEQ = 0
CU_STREAM_WRITE_VALUE_DEFAULT = 0
CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1
CU_STREAM_CAPTURE_MODE_RELAXED = 2
CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_READ_ONLY = 1, 2, 8
CU_POINTER_ATTRIBUTE_SYNC_MEMOPS = 6
CU_POINTER_ATTRIBUTE_BUFFER_ID = 7
CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1
CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED = 116
CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS = 117
CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING = 118
CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED = 124
CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX = 0
CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER = 100
IPC_HANDLE_BYTES = 64


class IpcMemHandle(ctypes.Structure):
    """``CUipcMemHandle``: 64 opaque bytes, passed by value."""

    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


_POINTER, _STREAM, _EVENT, _CONTEXT = c_uint64, c_void_p, c_void_p, c_void_p  # CUdeviceptr is a number, the others are handles

_SIGNATURES: dict[str, tuple[object, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cuDeviceGetUuid_v2": (c_char_p, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(_CONTEXT), c_int),
    "cuCtxSetCurrent": (_CONTEXT,),
    "cuCtxPushCurrent_v2": (_CONTEXT,),
    "cuCtxPopCurrent_v2": (POINTER(_CONTEXT),),
    "cuMemGetAddressRange_v2": (POINTER(_POINTER), POINTER(c_size_t), _POINTER),
    "cuMemGetHandleForAddressRange": (c_void_p, _POINTER, c_size_t, c_int, c_uint64),
    "cuPointerGetAttribute": (c_void_p, c_int, _POINTER),
    "cuPointerSetAttribute": (c_void_p, c_int, _POINTER),
    "cuIpcGetMemHandle": (POINTER(IpcMemHandle), _POINTER),
    "cuIpcOpenMemHandle_v2": (POINTER(_POINTER), IpcMemHandle, c_uint),
    "cuIpcCloseMemHandle": (_POINTER,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (POINTER(_POINTER), c_void_p, c_uint),
    "cuMemcpyAsync": (_POINTER, _POINTER, c_size_t, _STREAM),
    "cuStreamCreate": (POINTER(_STREAM), c_uint),
    "cuStreamDestroy_v2": (_STREAM,),
    "cuStreamSynchronize": (_STREAM,),
    "cuStreamQuery": (_STREAM,),
    "cuStreamWaitEvent": (_STREAM, _EVENT, c_uint),
    "cuStreamIsCapturing": (_STREAM, POINTER(c_int)),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuStreamWriteValue32_v2": (_STREAM, _POINTER, c_uint32, c_uint),
    "cuStreamWaitValue32_v2": (_STREAM, _POINTER, c_uint32, c_uint),
    "cuLaunchHostFunc": (_STREAM, c_void_p, c_void_p),
    "cuEventCreate": (POINTER(_EVENT), c_uint),
    "cuEventRecord": (_EVENT, _STREAM),
    "cuEventQuery": (_EVENT,),
    "cuEventDestroy_v2": (_EVENT,),
    "cuFlushGPUDirectRDMAWrites": (c_int, c_int),
}


class Driver:
    """One process's view of the driver. Thread-safe. ``call`` and ``attempt`` call the functions of ``_SIGNATURES`` by
    name."""

    def __init__(self, library: str) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise NotSupported(f"no CUDA driver: {error}", device="cuda", hint="install the GPU's driver") from None
        self._pid = os.getpid()
        self._contexts: dict[int, c_void_p] = {}
        self._functions: dict[str, Callable[..., int]] = {}
        for name, arguments in _SIGNATURES.items():
            found = getattr(self._library, name, None)
            if found is not None:
                found.argtypes, found.restype = arguments, c_int
                self._functions[name] = found
        self.call("cuInit", 0)
        self.push, self.pop = self._functions["cuCtxPushCurrent_v2"], self._functions["cuCtxPopCurrent_v2"]
        self.exchange = self._functions["cuThreadExchangeStreamCaptureMode"]
        self.popped = c_void_p()
        """Where ``pop`` stores the context that it took off; nobody reads it."""

    def call(self, name: str, *args: object) -> None:
        """Call a function. Raises ``RdmaError`` for any result but ``CUDA_SUCCESS``, ``NotSupported`` where the driver lacks
        it."""
        if status := self.attempt(name, *args):
            raise _failed(name, status)

    def asked(self, kind: type[Any], name: str, *args: object) -> int:
        """As ``call``, of a function that stores a value of this kind at its first argument: the value."""
        found = kind()
        self.call(name, byref(found), *args)
        return found.value or 0

    def attempt(self, name: str, *args: object) -> str:
        """Call a function. Returns the name of its error, empty for success. ``NotSupported`` where the driver lacks it."""
        function = self._functions.get(name)
        if function is None:
            raise NotSupported(f"this driver has no {name}", device="cuda", hint="update the GPU's driver (CUDA 12 or newer)")
        result = function(*args)
        return self.name(result) if result else ""

    def name(self, result: int) -> str:
        """The name of an error, as ``"CUDA_ERROR_NOT_READY"``."""
        text = c_char_p()
        self._library.cuGetErrorName(c_int(result), byref(text))
        return text.value.decode() if text.value else f"CUDA error {result}"

    # -- devices

    def version(self) -> int:
        """The CUDA version that the driver supports: 1000 * major + 10 * minor."""
        return self.asked(c_int, "cuDriverGetVersion")

    def attribute(self, index: int, attribute: int) -> int:
        """A ``CU_DEVICE_ATTRIBUTE``; 0 for one that this driver does not know."""
        value = c_int()
        return 0 if self.attempt("cuDeviceGetAttribute", byref(value), attribute, index) else value.value

    def uuid(self, index: int) -> str:
        """The UUID of a device, which is the same in all processes of the host, whatever index the device has there."""
        text = ctypes.create_string_buffer(16)
        self.call("cuDeviceGetUuid_v2", text, index)
        return text.raw.hex()

    def pci_bus_id(self, index: int) -> str:
        """As in ``/sys/bus/pci/devices``."""
        text = ctypes.create_string_buffer(32)
        self.call("cuDeviceGetPCIBusId", text, 32, index)
        return text.value.decode().lower()

    def context(self, index: int) -> int:
        """The primary context of a device. It is torch's: made, if need be, and kept."""
        context = self._contexts.get(index)
        if context is None:
            context = c_void_p()
            self.call("cuDevicePrimaryCtxRetain", byref(context), index)
            self._contexts[index] = context
        return context.value or 0

    def function(self, name: str) -> int:
        """Address of a function of the driver, for kernels."""
        return ctypes.cast(getattr(self._library, name), c_void_p).value or 0

    def on(self, index: int) -> AbstractContextManager[None]:
        """Inside the block the primary context of a device is current in this thread, and the thread is ``relaxed``. Raises
        ``RdmaError`` if the GPU has failed."""
        return _On(self, self.context(index))

    def stay(self, index: int) -> None:
        """Make the primary context of a device current in this thread for good, if that is its device: libraries that look for
        a context (cuBLAS) warn where ``on`` has left none."""
        if index == torch.accelerator.current_device_index():
            self.call("cuCtxSetCurrent", self.context(index))

    def relax(self) -> None:
        """Make this thread ``relaxed`` for as long as it lives."""
        self.call("cuThreadExchangeStreamCaptureMode", byref(c_int(CU_STREAM_CAPTURE_MODE_RELAXED)))

    def relaxed(self) -> AbstractContextManager[None]:
        """Inside the block this thread's calls belong to no CUDA graph. Otherwise even a look at an event would spoil a graph
        that another thread captures."""
        return _On(self, 0)

    # -- memory

    def allocation(self, pointer: int) -> tuple[int, int, int]:
        """Base, size in bytes, and number of the allocation that a device pointer lies in. The number is never given again."""
        base, nbytes, number = c_uint64(), c_size_t(), c_uint64()
        self.call("cuMemGetAddressRange_v2", byref(base), byref(nbytes), pointer)
        self.call("cuPointerGetAttribute", byref(number), CU_POINTER_ATTRIBUTE_BUFFER_ID, pointer)
        return base.value, nbytes.value, number.value

    def ipc_handle(self, base: int) -> bytes:
        handle = IpcMemHandle()
        self.call("cuIpcGetMemHandle", byref(handle), base)
        return bytes(handle)

    def ipc_open(self, handle: bytes) -> int:
        """Map another process's allocation in the current context, and return its address. It stays mapped until
        ``cuIpcCloseMemHandle``."""
        found = IpcMemHandle.from_buffer_copy(handle)
        return self.asked(c_uint64, "cuIpcOpenMemHandle_v2", found, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)

    def new_stream(self) -> int:
        """A stream in the current context that does not wait for the default stream."""
        return self.asked(c_void_p, "cuStreamCreate", CU_STREAM_NON_BLOCKING)

    def new_event(self) -> int:
        return self.asked(c_void_p, "cuEventCreate", CU_EVENT_DISABLE_TIMING)


def _failed(name: str, status: str) -> RdmaError:
    return RdmaError(f"{name} failed: the driver says {status}", device="cuda", status=status)


class _On:
    """See ``Driver.on``. Entered several times in a message: no generator, and no look-up by name."""

    __slots__ = ("_context", "_driver", "_mode")

    def __init__(self, driver: Driver, context: int) -> None:
        self._driver, self._context = driver, context

    def __enter__(self) -> None:
        cuda = self._driver
        if self._context and (result := cuda.push(self._context)):
            raise _failed("cuCtxPushCurrent_v2", cuda.name(result))
        self._mode = mode = c_int(CU_STREAM_CAPTURE_MODE_RELAXED)
        cuda.exchange(mode)

    def __exit__(self, *_: object) -> None:
        cuda = self._driver
        cuda.exchange(self._mode)
        if self._context:
            cuda.pop(cuda.popped)


def kind() -> str:
    """The type of the devices that this process's driver serves, as torch names it: ``"cuda"``, or that of an accelerator from
    outside torch with a driver of this interface; empty without one. Does not initialise a GPU."""
    found = torch.accelerator.current_accelerator()
    if found is None or found.type == "cuda":
        return "cuda" if torch.version.cuda is not None else ""
    return found.type if hasattr(torch.get_device_module(found), "driver_library") else ""


def count() -> int:
    """How many devices there are."""
    return torch.get_device_module(kind()).device_count() if kind() else 0


def active() -> bool:
    """Whether this process uses its GPUs already. Looking does not make it do so."""
    type_ = kind()
    return bool(type_) and bool(getattr(torch.get_device_module(type_), "is_initialized", lambda: True)())


def has_context(index: int) -> bool:
    """Whether this process uses a device already. For an accelerator from outside torch this returns true."""
    return kind() != "cuda" or bool(torch._C._cuda_hasPrimaryContext(index))  # type: ignore[attr-defined]


@functools.cache
def driver() -> Driver:
    """This process's driver. ``NotSupported`` where there is none."""
    type_ = kind()
    if not type_:
        raise NotSupported("torch has no CUDA here", device="cuda", hint="install a CUDA build of torch")
    return Driver("libcuda.so.1" if type_ == "cuda" else torch.get_device_module(type_).driver_library)


@functools.cache
def _raw_stream() -> Callable[[int], int]:
    type_ = kind()
    return torch._C._cuda_getCurrentRawStream if type_ == "cuda" else torch.get_device_module(type_).raw_stream


def as_torch(index: int, stream: int) -> torch.Stream:
    """A stream of the driver's, for torch."""
    return torch.get_device_module(kind()).ExternalStream(stream, device=index)


@functools.cache
def _is_capturing() -> Callable[[], bool]:
    return torch.get_device_module(kind()).is_current_stream_capturing


def capturing() -> bool:
    """Whether what this thread enqueues on its current stream goes into a CUDA graph, and is not done."""
    return bool(_is_capturing()())


def current_stream(index: int) -> int:
    """Handle of this thread's current stream on a device."""
    return _raw_stream()(index)


def same_device() -> AbstractContextManager[None]:
    """The current device is the same afterwards: ``set_stream`` changes it. Setting it back would begin to use it (half a
    gigabyte on a GPU); this does not."""
    return torch.accelerator.device_index(torch.accelerator.current_device_index())


@contextmanager
def on_streams(streams: Sequence[torch.Stream]) -> Iterator[None]:
    """With these as the current streams of their devices, in this thread."""
    others = [(stream, now) for stream in streams if (now := torch.accelerator.current_stream(stream.device)) != stream]
    if not others:
        yield
        return
    try:
        with same_device():
            for stream, _ in others:
                torch.accelerator.set_stream(stream)
        yield
    finally:
        with same_device():
            for _, now in others:
                torch.accelerator.set_stream(now)
