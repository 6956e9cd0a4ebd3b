"""The device module of "softgpu": `torch.softgpu` after `softgpu.load()`."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

driver_library: str = ""
"""The stand-in for libcuda.so.1, to be opened by whoever calls the driver."""

_driver: ctypes.CDLL
_backend: ctypes.CDLL


def attach(folder: Path) -> None:
    global driver_library, _driver, _backend
    driver_library = str(folder / "libsoftcuda.so")
    _driver = ctypes.CDLL(driver_library)
    _driver.softcuda_sleep.argtypes = [ctypes.c_void_p, ctypes.c_uint]
    _driver.softcuda_fill32.argtypes = [ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_uint32, ctypes.c_size_t]
    _driver.softcuda_drain.argtypes = [ctypes.c_void_p]
    _driver.softcuda_shadow.argtypes = [ctypes.c_ulonglong]
    _driver.softcuda_shadow.restype = ctypes.c_void_p
    for name in ("cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuStreamIsCapturing"):
        getattr(_driver, name).argtypes = [ctypes.c_void_p, ctypes.c_int if "Begin" in name else ctypes.c_void_p]
    _driver.softcuda_count.argtypes = [ctypes.c_char_p]
    _driver.softcuda_count.restype = ctypes.c_long
    _backend = ctypes.CDLL(str(folder / "libsoftgpu.so"))
    _backend.softgpu_handle.restype = ctypes.c_void_p
    _backend.softgpu_raw_stream.restype = ctypes.c_int64


def _index(device: torch.device | str | int | None) -> int:
    if device is None or isinstance(device, int):
        return -1 if device is None else device
    index = torch.device(device).index
    return -1 if index is None else index


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"softgpu: CUDA error {code}")


def init() -> None:
    """Nothing is left to do. torch 2.15 calls it, and 2.11 the other, or it waits for no device."""


_lazy_init = init


def is_initialized() -> bool:
    return True


def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    number = ctypes.c_int()  # of the driver: torch.accelerator asks here, perhaps before anything else has been done
    return 0 if _driver.cuInit(0) or _driver.cuDeviceGetCount(ctypes.byref(number)) else number.value


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: torch.device | str | int) -> None:
    torch.accelerator.set_device_index(_index(device))


def current_stream(device: torch.device | str | int | None = None) -> torch.Stream:
    return torch.accelerator.current_stream(None if device is None else _index(device))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def synchronize(device: torch.device | str | int | None = None) -> None:
    torch.accelerator.synchronize(None if device is None else _index(device))


def empty_cache() -> None:
    torch.accelerator.memory.empty_cache()


def Stream(device: torch.device | str | int | None = None, priority: int = 0) -> torch.Stream:
    """A stream of the pool, which is gone round: the 33rd is the first again."""
    return torch.Stream(torch.device("softgpu", current_device() if device is None else _index(device)))


def Event() -> torch.Event:
    """On the current device, as torch.cuda.Event."""
    return torch.Event("softgpu")


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """With this as the current stream of its device."""
    with stream or contextlib.nullcontext():
        yield


def ExternalStream(handle: int, device: torch.device | str | int | None = None) -> torch.Stream:
    """A stream that the driver was asked for."""
    kind = int(torch.Stream(torch.device("softgpu", 0)).device_type)
    index = current_device() if device is None else _index(device)
    return torch.Stream(stream_id=handle, device_index=index, device_type=kind)


class device:
    """The current device, for a scope."""

    def __init__(self, device: torch.device | str | int) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = current_device()
        set_device(self.index)

    def __exit__(self, *_: object) -> None:
        set_device(self.before)


def raw_stream(device: torch.device | str | int | None = None) -> int:
    """The CUstream of the current stream, as a driver takes it: 0 is the default stream of the current context."""
    return int(_backend.softgpu_raw_stream(_index(device)))


def is_current_stream_capturing() -> bool:
    status = ctypes.c_int()
    return not _driver.cuStreamIsCapturing(_backend.softgpu_handle(-1), ctypes.byref(status)) and status.value != 0


# Random numbers are the CPU's, which torch seeds itself.
default_generators = (torch.default_generator,) * 64  # as many devices as there may be


def manual_seed_all(seed: int) -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def get_rng_state(device: torch.device | str | int | None = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: torch.device | str | int | None = None) -> None:
    torch.set_rng_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


# Control, for tests.


def sleep(ms: float, device: torch.device | str | int | None = None) -> None:
    """Keeps the current stream busy; returns at once."""
    _check(_driver.softcuda_sleep(_backend.softgpu_handle(_index(device)), round(ms * 1000)))


def fill_later(tensor: torch.Tensor, value: float, ms: float) -> None:
    """A slow kernel on the current stream: after `ms` the tensor holds `value` everywhere. Returns at once."""
    if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.device.type != "softgpu":
        raise ValueError("fill_later takes contiguous float32 of the device")
    bits = struct.unpack("I", struct.pack("f", value))[0]
    stream = _backend.softgpu_handle(tensor.device.index)
    _check(_driver.softcuda_sleep(stream, round(ms * 1000)))
    _check(_driver.softcuda_fill32(stream, tensor.data_ptr(), bits, tensor.numel()))


_words: list[mmap.mmap] = []
"""Memory that streams wait for; it stays."""


def hold(stream: int | None = None, device: torch.device | str | int | None = None) -> Callable[[], None]:
    """Has a stream (of the driver; else the current one) wait until what this returns is called."""
    _words.append(mmap.mmap(-1, mmap.PAGESIZE))
    word = ctypes.c_uint32.from_buffer(_words[-1])
    handle = _backend.softgpu_handle(_index(device)) if stream is None else stream
    address = ctypes.addressof(word)
    context = ctypes.c_void_p()  # this thread may have none yet
    _check(_driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    _check(_driver.cuCtxPushCurrent_v2(context))
    _check(_driver.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), 0))
    _check(_driver.cuStreamWaitValue32_v2(ctypes.c_void_p(handle), ctypes.c_ulonglong(address), 1, 0))
    _check(_driver.cuCtxPopCurrent_v2(ctypes.byref(context)))
    return lambda: setattr(word, "value", 1)


@contextlib.contextmanager
def held(device: torch.device | str | int | None = None) -> Iterator[None]:
    """The current stream waits until the block ends: what it is given within is certainly not done there."""
    release = hold(device=device)
    try:
        yield
    finally:
        release()


def fail() -> None:
    """A kernel touches what it may not: from now on every call of this process fails."""
    _driver.softcuda_break()


@functools.cache
def _stream_of_captures(device: torch.device | str | int | None) -> torch.Stream:
    return Stream(device)


@contextlib.contextmanager
def capture(device: torch.device | str | int | None = None, stream: torch.Stream | None = None) -> Iterator[None]:
    """As `torch.cuda.graph`, on a stream of the pool, always the same if none is given: what is enqueued on it is dropped.
    RuntimeError at the end if a call of this process has spoilt it."""
    with stream or _stream_of_captures(device):
        handle = _backend.softgpu_handle(_index(device))
        _check(_driver.cuStreamBeginCapture_v2(handle, 0))
        try:
            yield
        finally:
            code = _driver.cuStreamEndCapture(handle, ctypes.byref(ctypes.c_void_p()))
        _check(code)


def drain(device: torch.device | str | int | None = None) -> None:
    """Waits for the current stream, uncounted."""
    _check(_driver.softcuda_drain(_backend.softgpu_handle(_index(device))))


def peek(tensor: torch.Tensor) -> torch.Tensor:
    """What a contiguous tensor's memory holds at this moment, waiting for nothing."""
    where = _driver.softcuda_shadow(tensor.data_ptr())
    raw = bytearray(ctypes.string_at(where, tensor.numel() * tensor.element_size()))
    return torch.frombuffer(raw, dtype=tensor.dtype).reshape(tensor.shape)


def count(name: str) -> int:
    """A counter of the driver, see the names in driver.c; those that begin with torch_ are torch's own work."""
    number = int(_driver.softcuda_count(name.encode()))
    if number < 0:
        raise KeyError(name)
    return number
