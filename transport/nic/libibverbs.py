"""The libibverbs of this process, for what the Python packages do not make."""

from __future__ import annotations

import ctypes
import errno
import os
from ctypes import c_int, c_size_t, c_uint32, c_uint64, c_void_p

from ..words import layout as at
from .status import failure

HOP_LIMIT = 64
"""How many routers a packet on a global route may pass. IP packets usually start with as many."""
LINK_LAYERS = ("UNSPECIFIED", "INFINIBAND", "ETHERNET")
_FORK_UNNEEDED = 2


def library() -> ctypes.CDLL:
    """The libibverbs that the packages use as well: a process has one of that name."""
    lib = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    lib.ibv_get_async_event.argtypes = (c_void_p, c_void_p)
    lib.ibv_ack_async_event.argtypes = (c_void_p,)
    lib.ibv_ack_async_event.restype = None
    if hasattr(lib, "ibv_reg_dmabuf_mr"):
        lib.ibv_reg_dmabuf_mr.argtypes = (c_void_p, c_uint64, c_size_t, c_uint64, c_int, c_int)
        lib.ibv_reg_dmabuf_mr.restype = c_void_p
    lib.ibv_dereg_mr.argtypes = (c_void_p,)
    return lib


def fork_init() -> None:
    """Keep registered memory the parent's in a fork. Call it before the first device is opened. Kernels from 5.12 on do this by
    themselves (a fork copies pinned pages), and so do some older ones of distributions; libibverbs knows. On other kernels
    libibverbs keeps registered pages out of children (``madvise(MADV_DONTFORK)``): a child that touches anything in such a page
    dies. So this asks for that only where it is needed."""
    lib = library()
    if hasattr(lib, "ibv_is_fork_initialized") and lib.ibv_is_fork_initialized() == _FORK_UNNEEDED:
        return
    if code := lib.ibv_fork_init():
        raise failure("", "ibv_fork_init", code, hint="call rdmarpc before anything else registers memory")


def release() -> str:
    """The file name of the loaded libibverbs, for people: ``"libibverbs.so.1.14.44.0"``."""
    with open("/proc/self/maps") as maps:
        names = {line.rsplit("/", 1)[1].strip() for line in maps if "/libibverbs.so" in line}
    return ", ".join(sorted(names))


class DmaBufMR:
    """An ``ibv_mr`` over a dma-buf, for packages that make none. Named after that of pyverbs, and as there the first byte is
    called by its offset in the buffer. Raises ``OSError``."""

    def __init__(self, lib: ctypes.CDLL, pd: int, length: int, access: int, fd: int, offset: int) -> None:
        if not hasattr(lib, "ibv_reg_dmabuf_mr"):
            raise OSError(errno.ENOSYS, "this libibverbs has no ibv_reg_dmabuf_mr")
        self._lib = lib
        ctypes.set_errno(0)
        self._mr = lib.ibv_reg_dmabuf_mr(pd, offset, length, offset, fd, access)
        if not self._mr:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.lkey = c_uint32.from_address(self._mr + at.MR_LKEY).value
        self.rkey = c_uint32.from_address(self._mr + at.MR_RKEY).value

    def close(self) -> None:
        if code := self._lib.ibv_dereg_mr(self._mr):
            raise OSError(code, os.strerror(code))
