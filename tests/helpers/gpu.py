"""The GPU of the tests marked ``gpu``: CUDA where this host has it (``make test-cuda``), else the one in software
(``softgpu``).

Worker processes call ``load()`` before anything else. The process of the tests itself uses no GPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

import torch

# ``device_count`` asks NVML. ``is_available`` would ask the driver, and no child that is forked afterwards could use it.
TYPE = "cuda" if torch.version.cuda is not None and torch.cuda.device_count() else "softgpu"


def why_not() -> str:
    """Nothing, or why there is no GPU of either kind."""
    if TYPE == "cuda":
        return ""
    import softgpu

    missing = softgpu.available()
    return f"no CUDA device, and no software GPU: {missing}" if missing else ""


class _FindsCupy:
    """Has ``import cupy`` find the stand-in, at the end of ``sys.meta_path``."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return spec_from_file_location(name, Path(__file__).with_name("softcupy.py")) if name == "cupy" else None


@functools.cache
def load() -> None:
    """Have the GPU in this process; where it is software, with ``SOFTCUPY`` in the environment, a stand-in of cupy, too."""
    if TYPE == "softgpu":
        import softgpu

        softgpu.load()
        if os.environ.get("SOFTCUPY"):
            sys.meta_path.append(_FindsCupy)
        return
    torch.backends.cudnn.deterministic = True  # tests compare bits


def build() -> None:
    """Compile the software GPU, if it is the one, so that time limits of tests are those of the work."""
    if TYPE == "softgpu":
        import softgpu

        softgpu.build()


def count() -> int:
    return int(torch.get_device_module(TYPE).device_count())


def other() -> int:
    """The index of a second device, or the first one's where there is one only."""
    return 1 if count() > 1 else 0


def device(index: int = 0) -> torch.device:
    return torch.device(TYPE, index)


def sleep(ms: float, index: int = 0) -> None:
    """Keep the current stream of a device busy; returns at once."""
    if TYPE == "softgpu":
        torch.get_device_module(TYPE).sleep(ms, index)
        return
    with torch.cuda.device(index):
        torch.cuda._sleep(int(ms * _cycles_per_ms(index)))


@functools.cache
def _cycles_per_ms(index: int) -> float:
    cycles = 20_000_000
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(cycles)  # the clock rises
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / start.elapsed_time(end)


def fill_later(tensor: torch.Tensor, value: float, ms: float) -> None:
    """A slow kernel on the current stream: after ``ms`` the float32 tensor holds ``value``. Returns at once."""
    if TYPE == "softgpu":
        torch.get_device_module(TYPE).fill_later(tensor, value, ms)
        return
    sleep(ms, tensor.device.index)
    tensor.fill_(value)


def fail() -> None:
    """A kernel touches what it may not: no call of this process for a GPU succeeds any more."""
    if TYPE == "softgpu":
        torch.get_device_module(TYPE).fail()
        return
    index = torch.tensor([1 << 40], device=device())
    torch.zeros(4, device=device())[index] = 1.0
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()


@contextlib.contextmanager
def capture(stream: torch.Stream | None = None) -> Iterator[None]:
    """This thread captures a CUDA graph, on this stream of torch's pool, or on the one that torch takes."""
    if TYPE == "softgpu":
        with torch.get_device_module(TYPE).capture(stream=stream):
            yield
        return
    static = torch.zeros(16, device=device())
    on = stream and torch.cuda.Stream(stream_id=stream.stream_id, device_index=0, device_type=stream.device_type)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=on):
        static.add_(1)
        yield


def host_waits() -> int:
    """How often this process has waited for a stream, an event or a device; 0 on CUDA, which does not count."""
    if TYPE == "cuda":
        return 0
    module = torch.get_device_module(TYPE)
    return sum(module.count(name) for name in ("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"))
