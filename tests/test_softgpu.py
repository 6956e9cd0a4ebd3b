"""The equipment itself: what it promises to other tests. Everything that uses the device runs in processes of its own."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import softgpu
import torch
from torch import nn

pytestmark = pytest.mark.skipif(bool(softgpu.available()), reason=softgpu.available())

SLOW = 300.0
"""Milliseconds of a slow kernel. Where one has to be running still when a line is reached, its stream is ``held``."""


@pytest.fixture(scope="module")
def gpu() -> Iterator[softgpu.Process]:
    with softgpu.Process() as process:
        process.run(current_device)
        yield process


@pytest.fixture(scope="module")
def other() -> Iterator[softgpu.Process]:
    with softgpu.Process() as process:
        process.run(current_device)
        yield process


def current_device() -> int:
    return softgpu.load().current_device()


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


class Cuda:
    """The driver, called as code under test would call it."""

    def __init__(self, device: int = 0) -> None:
        self.library = ctypes.CDLL(softgpu.load().driver_library)
        self("cuInit", 0)
        self.context = self.make(ctypes.c_void_p, "cuDevicePrimaryCtxRetain", device)
        self("cuCtxSetCurrent", self.context)

    def code(self, name: str, *arguments: Any) -> int:
        words = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments]
        return int(getattr(self.library, name)(*words))

    def __call__(self, name: str, *arguments: Any) -> None:
        code = self.code(name, *arguments)
        assert code == 0, f"{name}: {code}"

    def make(self, kind: type, name: str, *arguments: Any) -> Any:
        made = kind()
        self(name, ctypes.byref(made), *arguments)
        return made if kind is Handle else made.value

    def allocate(self, size: int) -> int:
        return self.make(ctypes.c_uint64, "cuMemAlloc_v2", size)

    def stream(self) -> int:
        return self.make(ctypes.c_uint64, "cuStreamCreate", 1)

    def read(self, pointer: int, size: int, stream: int = 0) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        self("cuMemcpyDtoHAsync_v2", buffer, pointer, size, stream)
        self("cuStreamSynchronize", stream)
        return buffer.raw


class Handle(ctypes.Structure):
    _fields_ = [("data", ctypes.c_char * 64)]

    def __reduce__(self) -> tuple[Any, ...]:
        return Handle.from_buffer_copy, (bytes(self),)


# ---- torch's side ----


def asynchrony() -> None:
    gpu = softgpu.load()
    x = torch.zeros(1000, device="softgpu")
    with gpu.held():  # whoever waits for this stream here waits for ever
        gpu.fill_later(x, 7.0, SLOW)
        with torch.Stream(device="softgpu"):
            assert x.sum().item() == 0
    assert x.sum().item() == 7000, "its own stream did not wait"


def events() -> None:
    gpu = softgpu.load()
    x = torch.zeros(1000, device="softgpu")
    side = torch.Stream(device="softgpu:0")
    before, after = (torch.Event(device="softgpu:0", enable_timing=True) for _ in range(2))
    assert before.query(), "an event that was not recorded is complete"
    before.record()
    with gpu.held():
        gpu.fill_later(x, 7.0, SLOW)
        after.record()
        assert not after.query()
        assert not torch.accelerator.current_stream().query()
        with side:
            assert torch.accelerator.current_stream() == side
            assert gpu.raw_stream() == side.stream_id != 0
            assert x.sum().item() == 0
    with side:
        side.wait_event(after)
        assert x.sum().item() == 7000
    assert gpu.raw_stream() == 0
    assert after.query()
    assert SLOW * 0.9 < before.elapsed_time(after) < SLOW * 200
    gpu.fill_later(x, 8.0, SLOW)
    side.wait_stream(torch.accelerator.current_stream())
    side.synchronize()
    assert gpu.peek(x)[0] == 8
    gpu.sleep(SLOW)
    torch.accelerator.synchronize()
    assert torch.accelerator.current_stream().query()


def poison() -> None:
    gpu = softgpu.load()
    side = torch.Stream(device="softgpu:0")
    x = torch.ones(64, device="softgpu")
    where, shadow = x.data_ptr(), gpu._driver.softcuda_shadow(x.data_ptr())
    del x
    gpu.drain()
    assert ctypes.string_at(shadow, 256) == b"\xdb" * 256, "a freed block keeps its content"
    y = torch.empty(64, device="softgpu")
    assert y.data_ptr() == where, "the block was not used again"
    # Another stream that still reads: without record_stream it meets the poison, with it it does not.
    for recorded in (False, True):
        y = torch.ones(64, device="softgpu")
        where = y.data_ptr()
        gpu.drain()
        with contextlib.ExitStack() as slow:
            with side:
                slow.enter_context(gpu.held())
                got = torch.empty(64, device="softgpu")
                got.copy_(y, non_blocking=True)
                if recorded:
                    y.record_stream(side)
            del y
            taken = [torch.empty(64, device="softgpu") for _ in range(16)]
            assert any(z.data_ptr() == where for z in taken) != recorded
            gpu.drain()
        with side:
            assert torch.equal(got.cpu().view(torch.int32), torch.ones(64).view(torch.int32)) == recorded
        del taken, got
        torch.accelerator.synchronize()


def host_access() -> None:
    ctypes.string_at(torch.ones(3, device="softgpu").data_ptr(), 4)


def models() -> list[tuple[nn.Module, torch.Tensor]]:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.LayerNorm(32), nn.Linear(32, 4))
    convolution = nn.Sequential(  # no bias before a norm: its gradient is rounding alone
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 4),
    )
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    shapes: list[tuple[int, ...]] = [(16, 8), (5, 3, 8, 8), (2, 3, 8)]
    return [(model, torch.randn(shape)) for model, shape in zip([dense, convolution, attention], shapes)]


def train(device: str) -> list[torch.Tensor]:
    results = []
    for number, (model, x) in enumerate(models()):
        model, x = model.to(device), x.to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9) if number != 1 else torch.optim.Adam(model.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        results += [loss.detach().cpu(), *[p.detach().cpu() for p in model.parameters()]]
    return results


def training() -> None:
    for ours, theirs in zip(train("softgpu:0"), train("cpu")):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


class Where(torch.autograd.Function):
    threads: ClassVar[list[tuple[int, int]]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Where.threads.append((threading.get_ident(), torch.accelerator.current_stream().stream_id))
        return gradient * 2


def autograd_threads() -> None:
    x = torch.ones(3, device="softgpu:0", requires_grad=True)
    side = torch.Stream(device="softgpu:0")
    with side:
        Where.apply(x).sum().backward()
    (thread, stream), *_ = Where.threads
    assert thread != threading.get_ident(), "a device's nodes run on a thread of autograd's"
    assert stream == side.stream_id, "backward runs on the stream of forward"
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]


def two_devices() -> None:
    assert torch.accelerator.device_count() == 2
    x = torch.zeros(4, device="softgpu:0")
    softgpu.load().fill_later(x, 5.0, SLOW)
    assert x.to("softgpu:1").tolist() == [5] * 4, "a copy is ordered with both current streams"
    with pytest.raises(RuntimeError, match="same device"):
        x + x.to("softgpu:1")
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(4, 4, device="softgpu:0") @ torch.ones(4, 4)


@pytest.mark.parametrize("test", [asynchrony, events, poison, training, autograd_threads, two_devices])
def test_torch(gpu: softgpu.Process, test: Callable[[], None]) -> None:
    gpu.run(test)


def test_random_delays_change_nothing() -> None:
    with softgpu.Process(SOFTCUDA_DELAY_US="200") as process:
        process.run(training, timeout=100)


def test_device_memory_is_out_of_the_hosts_reach() -> None:
    with softgpu.Process() as process, pytest.raises(RuntimeError, match="ended with -11"):
        process.run(host_access)


# ---- the driver's side ----


def driver_copies() -> None:
    gpu, cuda = softgpu.load(), Cuda()
    names = ["memcpy", "bytes_h2d", "bytes_d2d", "bytes_d2h", "cuStreamSynchronize", "allocations", "torch_memcpy"]
    before = {name: gpu.count(name) for name in names}
    a, b, s = cuda.allocate(100), cuda.allocate(100), cuda.stream()
    source = ctypes.create_string_buffer(b"x" * 100, 100)
    release = gpu.hold(s)
    cuda("cuMemcpyHtoDAsync_v2", a, source, 100, s)
    ctypes.memset(source, 0, 100)  # pageable memory was taken at once
    cuda("cuMemcpyDtoDAsync_v2", b, a, 100, s)
    assert cuda.code("cuStreamQuery", s) == 600
    release()
    assert cuda.read(b, 100, s) == b"x" * 100
    # Registered memory is read when the stream is there.
    cuda("cuMemHostRegister_v2", source, 100, 0)
    assert cuda.code("cuMemHostRegister_v2", source, 100, 0) == 712
    release = gpu.hold(s)
    cuda("cuMemcpyHtoDAsync_v2", a, source, 100, s)
    ctypes.memset(source, ord("y"), 100)
    release()
    assert cuda.read(a, 100, s) == b"y" * 100
    cuda("cuMemHostUnregister", source)
    assert cuda.code("cuMemHostUnregister", source) == 713
    assert cuda.code("cuMemcpyDtoDAsync_v2", b, a + 1, 100, s) == 1, "it leaves the allocation"
    assert cuda.make(ctypes.c_int, "cuPointerGetAttribute", 9, a) == 0
    changes = {name: gpu.count(name) - number for name, number in before.items()}
    assert changes == {
        "memcpy": 5, "bytes_h2d": 200, "bytes_d2d": 100, "bytes_d2h": 200, "cuStreamSynchronize": 2, "allocations": 2,
        "torch_memcpy": 0,
    }  # fmt: skip
    for pointer in (a, b):
        cuda("cuMemFree_v2", pointer)
    assert gpu.count("allocations") == before["allocations"]
    cuda("cuStreamDestroy_v2", s)
    assert cuda.code("cuStreamSynchronize", s) == 400


def stream_memory_operations() -> None:
    gpu, cuda = softgpu.load(), Cuda()
    flag = mmap.mmap(-1, mmap.PAGESIZE)
    word = ctypes.c_uint32.from_buffer(flag)
    address = ctypes.addressof(word)
    s, x = cuda.stream(), torch.zeros(4, device="softgpu")
    gpu.drain()
    assert cuda.code("cuStreamWaitValue32_v2", s, address, 1, 0) == 1, "memory the driver does not know"
    cuda("cuMemHostRegister_v2", address, mmap.PAGESIZE, 0)
    word.value = 0xFFFFFFFE
    cuda("cuStreamWaitValue32_v2", s, address, 1, 0 | 1 << 30)  # cyclic: still to come
    cuda("cuMemsetD8Async", x.data_ptr(), 1, 16, s)
    cuda("cuStreamWriteValue32_v2", s, address + 4, 77, 0)
    time.sleep(0.05)
    assert cuda.code("cuStreamQuery", s) == 600
    word.value = 2
    until(lambda: ctypes.c_uint32.from_buffer(flag, 4).value == 77)
    assert gpu.peek(x).view(torch.int32).tolist() == [0x01010101] * 4
    cuda("cuStreamSynchronize", s)
    cuda("cuMemHostUnregister", address)


def host_functions() -> None:
    cuda = Cuda()
    seen: list[int] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def function(data: int) -> None:
        seen.append(data)
        seen.append(cuda.code("cuStreamQuery", 0))

    cuda("cuLaunchHostFunc", 0, function, 5)
    cuda("cuStreamSynchronize", 0)
    assert seen == [5, 800], "a host function may not call the driver"


def forked() -> None:
    cuda = Cuda()
    child = os.fork()
    if not child:
        os._exit(cuda.code("cuCtxSynchronize"))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def no_context() -> None:
    cuda = Cuda()
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(cuda.code("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), 8)))
    thread.start()
    thread.join(10)
    assert codes == [201], "a context is current in one thread only"


def graphs() -> None:
    """A look at an event by any thread spoils a capture, unless that thread says that it may."""
    gpu, cuda = softgpu.load(), Cuda()
    x = torch.zeros(4, device="softgpu")
    event = x.device and torch.accelerator.current_stream().record_event()
    event.synchronize()
    for relaxed in (True, False):
        codes: list[Any] = []

        def look(relaxed: bool = relaxed, codes: list[Any] = codes) -> None:
            mode = ctypes.c_int(2)
            if relaxed:
                cuda("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
                assert mode.value == 0
            try:
                codes.append(event.query())
            except RuntimeError as error:
                codes.append(str(error))

        with contextlib.nullcontext() if relaxed else pytest.raises(RuntimeError, match="901"), gpu.capture():
            assert gpu.is_current_stream_capturing()
            x.fill_(1)
            thread = threading.Thread(target=look)
            thread.start()
            thread.join(10)
        assert codes == [True] if relaxed else "900" in str(codes)
    assert not gpu.is_current_stream_capturing()


def a_failure() -> None:
    gpu, cuda = softgpu.load(), Cuda()
    x = torch.zeros(4, device="softgpu")
    gpu.fail()
    with pytest.raises(RuntimeError, match="700"):
        x.cpu()
    assert cuda.code("cuStreamQuery", 0) == 700


def test_a_failure_is_for_good() -> None:
    with softgpu.Process() as process:
        process.run(a_failure)


@pytest.mark.parametrize("test", [driver_copies, stream_memory_operations, host_functions, forked, no_context, graphs])
def test_driver(gpu: softgpu.Process, test: Callable[[], None]) -> None:
    gpu.run(test)


kept: list[torch.Tensor] = []
"""What a process keeps from one of its calls to the next."""


def export() -> tuple[Handle, int]:
    cuda = Cuda()
    x = torch.arange(1000.0, device="softgpu")
    kept.append(x)
    torch.accelerator.synchronize()
    handle = cuda.make(Handle, "cuIpcGetMemHandle", x.data_ptr())
    assert cuda.code("cuIpcOpenMemHandle_v2", ctypes.byref(ctypes.c_uint64()), handle, 1) == 201, "not in its own process"
    return handle, x.data_ptr() - cuda.make(ctypes.c_uint64, "cuMemGetAddressRange_v2", None, x.data_ptr())


def write_there(handle: Handle, offset: int) -> None:
    gpu, cuda = softgpu.load(), Cuda()
    before = gpu.count("ipc_open")
    base, again = (cuda.make(ctypes.c_uint64, "cuIpcOpenMemHandle_v2", handle, 1) for _ in range(2))
    assert base == again
    assert gpu.count("ipc_open") - before == 2
    x = torch.full((10,), 5.0, device="softgpu")
    cuda("cuMemcpyAsync", base + offset, x.data_ptr(), 40, 0)
    cuda("cuStreamSynchronize", 0)
    for _ in range(2):
        cuda("cuIpcCloseMemHandle", base)
    assert cuda.code("cuMemcpyDtoDAsync_v2", x.data_ptr(), base, 4, 0) == 1
    assert cuda.code("cuIpcCloseMemHandle", base) == 1


def opening(handle: Handle) -> int:
    return Cuda().code("cuIpcOpenMemHandle_v2", ctypes.byref(ctypes.c_uint64()), handle, 1)


def written() -> None:
    assert kept.pop().tolist() == [5.0] * 10 + list(range(10, 1000))


def test_memory_of_another_process(gpu: softgpu.Process, other: softgpu.Process) -> None:
    handle, offset = gpu.run(export)
    other.run(write_there, handle, offset)
    gpu.run(written)


def test_memory_of_a_process_that_is_gone(other: softgpu.Process) -> None:
    with softgpu.Process() as process:
        handle, _ = process.run(export)
    assert other.run(opening, handle) == 205


STUCK = """
import softgpu, torch
gpu = softgpu.load()
x = torch.zeros(4, device="softgpu")
gpu.fill_later(x, 1.0, 1e6)
(torch.ones(3, device="softgpu:1", requires_grad=True) * 2).sum().backward()
"""


def test_a_process_ends_although_a_stream_works() -> None:
    softgpu.build()
    tests = softgpu.HERE.parent
    environment = {**os.environ, "PYTHONPATH": str(tests / "helpers")}
    done = subprocess.run([sys.executable, "-c", STUCK], cwd=tests, env=environment, timeout=60, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def header() -> str:
    places: list[ModuleType | Path] = [*Path("/usr/local").glob("cuda*/include"), Path("/usr/include")]
    with contextlib.suppress(ImportError):
        import nvidia  # type: ignore[import-not-found, unused-ignore]

        places += [path for part in nvidia.__path__ for path in Path(part).glob("*/include")]
    return next((str(place) for place in places if isinstance(place, Path) and (place / "cuda.h").exists()), "")


@pytest.mark.skipif(not header() or not shutil.which("gcc"), reason="no cuda.h on this host")
def test_declarations_are_those_of_cuda() -> None:
    command = ["gcc", "-std=gnu11", "-fsyntax-only", "-Wall", "-Werror", "-DSOFTCUDA_CUDA_H", "-I", header()]
    done = subprocess.run([*command, str(softgpu.HERE / "driver.c")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
