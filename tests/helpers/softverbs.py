"""What an adapter's driver would do with GPU memory, for Soft-RoCE, whose own takes none: it finds the host's memory behind a
dma-buf or a device pointer of the software GPU (``softgpu``), and registers that."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

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

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access) {
    void *driver = dlopen("libsoftcuda.so", RTLD_NOW | RTLD_NOLOAD);
    void *(*shadow)(unsigned long long) = driver ? dlsym(driver, "softcuda_shadow") : 0;
    void *behind = shadow ? shadow((uintptr_t)addr) : 0;
    return reg(pd, behind ? behind : addr, length, (uintptr_t)addr, access);
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


def play(library: str) -> None:
    """Have the adapters of this process take dma-bufs and device pointers by that library."""
    from rdmarpc.transport.nic import libibverbs
    from rdmarpc.transport.verbs import gpudirect

    real, ours = libibverbs.library(), ctypes.CDLL(library, use_errno=True)
    for name in ("ibv_reg_mr", "ibv_reg_dmabuf_mr"):
        function = getattr(ours, name)
        function.argtypes, function.restype = getattr(real, name).argtypes, getattr(real, name).restype
        setattr(real, name, function)
    gpudirect.pci_path = lambda device: PATH
