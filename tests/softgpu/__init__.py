"""A GPU in software: what Soft-RoCE is for RDMA, for code that drives CUDA and torch's streams.

`driver.c` stands in for libcuda.so.1, `backend.cpp` makes a torch device "softgpu" of it. Streams are threads, device memory
faults under the host's hand, memory handles open in other processes, freed memory is poisoned: races and lifetime errors
show, without a GPU.

A process that has called `load()` has an accelerator for good: autograd starts a thread for each device, and may then not be
used in forked children. So tests take the device in processes of their own:

    with softgpu.Process() as gpu:
        gpu.run(function, *arguments)  # a function of a module; load() has been called there
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import functools
import hashlib
import importlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from forks import forks

HERE = Path(__file__).parent
DRIVER = ["gcc", "-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wl,-soname,libsoftcuda.so"]
BACKEND = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-rpath,$ORIGIN"]
BUILD_TIMEOUT = 600


def available() -> str:
    """Nothing, or why there is no software GPU on this host."""
    for compiler in ("gcc", "g++"):
        if not shutil.which(compiler):
            return f"no {compiler}"
    return ""


def _compile(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


@functools.cache
def build() -> Path:
    """The folder of both libraries: of these sources, this torch and this compiler, built once per user."""
    import torch

    version = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, timeout=60).stdout
    sources = [(HERE / name).read_bytes() for name in ("driver.c", "backend.cpp")]
    parts = [*sources, version, repr((torch.__version__, DRIVER, BACKEND)).encode()]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rdmarpc-softgpu"
    folder = caches / key
    if folder.exists():
        return folder
    caches.mkdir(parents=True, exist_ok=True)
    with open(caches / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one builds, the others wait for it
        if folder.exists():
            return folder
        torch_at = Path(torch.__file__).parent
        include = [f"-I{torch_at / 'include'}", f"-I{torch_at / 'include/torch/csrc/api/include'}"]
        with tempfile.TemporaryDirectory(dir=caches) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            _compile([*DRIVER, str(HERE / "driver.c"), "-o", str(made / "libsoftcuda.so")])
            libraries = [f"-L{made}", "-lsoftcuda", f"-L{torch_at / 'lib'}", "-ltorch_cpu", "-lc10"]
            _compile([*BACKEND, *include, str(HERE / "backend.cpp"), "-o", str(made / "libsoftgpu.so"), *libraries])
            made.rename(folder)  # whole or not at all
    return folder


@functools.cache
def load() -> ModuleType:
    """Makes "softgpu" a device of torch in this process, and gives its module, which is `torch.softgpu` too."""
    import torch

    device = importlib.import_module(".device", __name__)
    device.attach(build())
    torch.utils.rename_privateuse1_backend("softgpu")
    torch._register_device_module("softgpu", device)
    torch.utils.generate_methods_for_privateuse1_backend()
    # A thread of autograd's lets go of the graph only after backward() has returned, and aborts the process if the
    # interpreter is being taken down by then. That is torch's, with every kind of GPU; here it would be a matter of luck.
    atexit.register(time.sleep, 0.05)
    return device


def _serve(pipe: Connection, environment: dict[str, str]) -> None:
    """The life of a `Process`: load, then one function after the other."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # for a parent that has lost patience
    os.environ.update(environment)
    load()
    pipe.send((True, None))
    with contextlib.suppress(EOFError):
        while True:
            function, arguments = pipe.recv()
            try:
                answer = (True, function(*arguments))
            except BaseException:
                answer = (False, traceback.format_exc())
            pipe.send(answer)


class Process:
    """A process with the device. The environment is set before the driver reads it."""

    def __init__(self, **environment: str) -> None:
        build()  # here, so that the time limits are those of the work
        self.pipe, other = forks().Pipe()
        self.process = forks().Process(target=_serve, args=(other, environment))
        self.process.start()
        other.close()
        self.pid = self.process.pid
        self.pending = True

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Begins a function there; `result()` waits for it."""
        if self.pending:
            self.result()
        self.pipe.send((function, arguments))
        self.pending = True

    def result(self, timeout: float = 60.0) -> Any:
        if not self.pipe.poll(timeout):
            os.kill(self.process.pid or 0, signal.SIGUSR1)
            self.process.join(1.0)
            self.close()
            raise TimeoutError(f"no answer within {timeout} s; the stacks of the process are on standard error")
        try:
            fine, value = self.pipe.recv()
        except EOFError:
            self.process.join(5.0)
            raise RuntimeError(f"the process ended with {self.process.exitcode}") from None
        self.pending = False
        if not fine:
            raise AssertionError(f"in the process with the device:\n{value}")
        return value

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> Any:
        self.start(function, *arguments)
        return self.result(timeout)

    def close(self) -> None:
        self.pipe.close()
        self.process.join(3.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(5.0)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
