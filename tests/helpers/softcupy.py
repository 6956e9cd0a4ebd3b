"""As much of cupy as the tests of its arrays use, over the GPU in software; what `import cupy` finds where `gpu.load()` was
told so. The real one cannot run there: its CUDA runtime asks the driver for tables that are not documented.

As in cupy: the exchange of memory by DLPack and its orders of streams, current streams of each thread that are not torch's (the
default stream, at first), strides. Otherwise: what is computed is computed by torch, and pickling an array fails, because cupy
would copy it to the host.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

_EXTERNAL = 12  # of DLPack's devices: this one

float32, uint8 = np.float32, np.uint8


class _Current(threading.local):
    def __init__(self) -> None:
        self.streams: dict[int, int] = {}


_current = _Current()


def _device() -> int:
    return torch.accelerator.current_device_index()


def _gpus() -> Any:
    return torch.get_device_module("softgpu")


def _torch_stream(index: int) -> torch.Stream:
    """This thread's current stream of cupy, for torch."""
    return _gpus().ExternalStream(_current.streams.get(index, 0), index)


class Stream:
    def __init__(self, non_blocking: bool = False) -> None:
        from rdmarpc.transport.gpu.driver import driver

        assert non_blocking, "the other kind waits for the default stream, and the GPU in software has none of that kind"
        self.device_id = _device()
        with driver().on(self.device_id):
            self.ptr = driver().new_stream()

    def __enter__(self) -> Stream:
        self._before = _current.streams.get(self.device_id, 0)
        _current.streams[self.device_id] = self.ptr
        return self

    def __exit__(self, *_: object) -> None:
        _current.streams[self.device_id] = self._before

    def synchronize(self) -> None:
        _gpus().ExternalStream(self.ptr, self.device_id).synchronize()


class _Null:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class Device:
    def __init__(self, index: int) -> None:
        self.id = index

    def __enter__(self) -> None:
        self._before = _device()
        torch.accelerator.set_device_index(self.id)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self._before)


def get_current_stream(device_id: int = -1) -> Any:
    return _Null(_current.streams.get(_device() if device_id < 0 else device_id, 0))


class cuda:
    Device, Stream, get_current_stream = Device, Stream, staticmethod(get_current_stream)


class ndarray:
    __slots__ = ("_backward", "_tensor", "dtype")

    def __init__(self, tensor: torch.Tensor, dtype: np.dtype[Any] | None = None, backward: bool = False) -> None:
        """``backward``: the elements are read from the last to the first."""
        self._tensor, self._backward = tensor, backward
        self.dtype = dtype or np.dtype(str(tensor.dtype).removeprefix("torch."))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        sign = -1 if self._backward else 1
        return tuple(sign * stride * self.dtype.itemsize for stride in self._tensor.stride())

    @property
    def nbytes(self) -> int:
        return self._tensor.nbytes

    @property
    def device(self) -> Device:
        return Device(self._tensor.device.index)

    @property
    def T(self) -> ndarray:
        return ndarray(self._tensor.t(), self.dtype)

    def __getitem__(self, at: Any) -> ndarray:
        if at == slice(None, None, -1):
            return ndarray(self._tensor, self.dtype, not self._backward)
        return ndarray(self._tensor[at], self.dtype)

    def reshape(self, *shape: int) -> ndarray:
        return ndarray(self._tensor.view(*shape), self.dtype)

    def copy(self) -> ndarray:
        with _gpus().stream(_torch_stream(self._tensor.device.index)):
            return ndarray(self._tensor.flip(0) if self._backward else self._tensor.clone(), self.dtype)

    def fill(self, value: Any) -> None:
        with _gpus().stream(_torch_stream(self._tensor.device.index)):
            self._tensor.fill_(value)

    def get(self) -> np.ndarray[Any, Any]:
        with _gpus().stream(_torch_stream(self._tensor.device.index)):
            return self._tensor.cpu().numpy()

    def __reduce__(self) -> Any:
        raise AssertionError("an array is pickled, and so copied to the host")

    def __dlpack_device__(self) -> tuple[int, int]:
        return _EXTERNAL, self._tensor.device.index

    def __dlpack__(self, *, stream: int | None = None, max_version: Any = None, dl_device: Any = None, copy: Any = None) -> Any:
        assert not self._backward
        if self.dtype.kind == "V":
            raise BufferError("dtype is not supported for dlpack export")
        index = self._tensor.device.index  # the consumer gives its stream for CUDA alone
        assert index == _device(), "cupy looks at the current stream of the current device"
        torch.accelerator.current_stream(index).wait_event(_torch_stream(index).record_event())
        return self._tensor.__dlpack__(max_version=max_version)


def from_dlpack(tensor: torch.Tensor) -> ndarray:
    index = tensor.device.index
    assert index == _device()
    _torch_stream(index).wait_event(torch.accelerator.current_stream(index).record_event())
    return ndarray(torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor)))


def empty(shape: Any, dtype: Any = float32) -> ndarray:
    kind, place = np.dtype(dtype), torch.device("softgpu", _device())
    with _gpus().stream(_torch_stream(_device())):
        if kind.kind == "V":
            return ndarray(torch.empty(shape, kind.itemsize, dtype=torch.uint8, device=place), kind)
        return ndarray(torch.empty(shape, dtype=getattr(torch, kind.name), device=place))


def asarray(values: np.ndarray[Any, Any]) -> ndarray:
    with _gpus().stream(_torch_stream(_device())):
        return ndarray(torch.from_numpy(np.array(values)).to(torch.device("softgpu", _device())))


def full(shape: Any, value: Any, dtype: Any = float32) -> ndarray:
    made = empty(shape, dtype)
    made.fill(value)
    return made
