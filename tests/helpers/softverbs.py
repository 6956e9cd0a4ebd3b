"""What an adapter's driver would do with GPU memory, for Soft-RoCE, whose own takes none: it finds the host's memory behind a
dma-buf or a device pointer of the software GPU (``softgpu``), and registers that."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>

struct ibv_pd;
struct ibv_mr { void *context, *pd, *addr; uint64_t length; uint32_t handle, lkey, rkey; };
typedef struct ibv_mr *(*Reg)(struct ibv_pd *, void *, size_t, uint64_t, int);

static struct ibv_mr *reg(struct ibv_pd *pd, void *at, size_t length, uint64_t iova, int access) {
    Reg real = (Reg)dlsym(dlopen("libibverbs.so.1", RTLD_NOW), "ibv_reg_mr_iova2");
    return real(pd, at, length, iova, access);
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
    if (fd < 0) { errno = EBADF; return 0; }
    char *at = mmap(0, offset + length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? 0 : reg(pd, at + offset, length, iova, access);
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned access) {
    void *driver = dlopen("libsoftcuda.so", RTLD_NOW | RTLD_NOLOAD);
    void *(*shadow)(unsigned long long) = driver ? dlsym(driver, "softcuda_shadow") : 0;
    void *behind = shadow ? shadow((uintptr_t)addr) : 0;
    return reg(pd, behind ? behind : addr, length, iova, access);
}
"""
"""What ``play`` calls in place of libibverbs."""
PATH = ("pci0000:16", "0000:16:02.0", "0000:17:00.0")
"""Where on the bus an adapter and a GPU may be."""


def compiled(folder: Path, name: str, source: str) -> Path:
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    (folder / f"{name}.c").write_text(source)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-o", folder / f"{name}.so", folder / f"{name}.c", "-ldl"], check=True, timeout=120
    )
    return folder / f"{name}.so"


def library(folder: Path) -> str:
    return str(compiled(folder, "softverbs", SOURCE))


played = False
"""Whether ``play`` was called in this process."""


def play(library: str) -> None:
    """Have the adapters of this process take dma-bufs and device pointers by that library, whichever package opens them."""
    global played
    played = True
    from rdmarpc.transport.nic import libibverbs, native
    from rdmarpc.transport.nic.native import Context, MemoryRegion
    from rdmarpc.transport.nic.packages import Ibverbs, Pyverbs
    from rdmarpc.transport.verbs import gpudirect

    real, ours = libibverbs.library(), ctypes.CDLL(library, use_errno=True)
    ours.ibv_reg_dmabuf_mr.argtypes = real.ibv_reg_dmabuf_mr.argtypes
    ours.ibv_reg_dmabuf_mr.restype = real.ibv_reg_dmabuf_mr.restype
    ours.ibv_dereg_mr = real.ibv_dereg_mr  # type: ignore[misc]
    ours.ibv_reg_mr_iova2.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint]
    ours.ibv_reg_mr_iova2.restype = ctypes.c_void_p
    by_pointer = SimpleNamespace(
        ibv_reg_dmabuf_mr=lambda pd, at, length, iova, fd, access: ours.ibv_reg_mr_iova2(pd, at, length, iova, access),
        ibv_dereg_mr=real.ibv_dereg_mr,
    )
    register = Context.register

    def register_there(self: Any, address: int, nbytes: int, access: int, *, device_memory: bool = False) -> Any:
        if not device_memory:
            return register(self, address, nbytes, access)
        flags = native._ACCESS[access]
        made = self.call("ibv_reg_mr", lambda: libibverbs.DmaBufMR(by_pointer, self.pd_address, nbytes, flags, -1, address))
        return self.add(MemoryRegion, made, address)

    Context.register = register_there  # type: ignore[method-assign]

    def new_dma_buf_region(self: Any, pd: Any, pd_address: int, fd: int, offset: int, nbytes: int, access: int) -> Any:
        try:
            return libibverbs.DmaBufMR(ours, pd_address, nbytes, access, fd, offset)
        except OSError as error:
            error.error_code = error.errno  # type: ignore[attr-defined]  # as pyverbs names it
            raise

    for package in (Ibverbs, Pyverbs):
        package.new_dma_buf_region = new_dma_buf_region  # type: ignore[method-assign]
    gpudirect.pci_path = lambda device: PATH
