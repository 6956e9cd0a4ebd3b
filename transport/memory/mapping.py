"""Mapped memory: private, or a file that another process can map too.

A descriptor of memory is mapped only when nothing that its sender does later can hurt: a file that its sender cuts short ends
whoever touches the lost pages with SIGBUS. So memory is sealed by its maker (``memfd``), and mapped only if it is.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

import numpy as np

from ..errors import NotSupported, PeerLost

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Of shared memory: its size is what it is, for good."""
_SEAL_FUTURE_WRITE = 0x0010
"""Linux 5.1: nobody can write it any more but by the mappings that there are."""


def memfd(name: str, nbytes: int, *, read_only: bool = False) -> tuple[mmap.mmap, int]:
    """Memory that can be handed to another process, and its file descriptor; ``name`` is for people. Sealed, so that nobody
    who has the descriptor can take pages away that somebody has mapped; with ``read_only`` nor write it, not even after opening
    it again (``/proc/self/fd``): only the mapping that is returned can be written. ``NotSupported`` where the kernel cannot."""
    fd = -1
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        memory = mmap.mmap(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | (_SEAL_FUTURE_WRITE if read_only else 0))
        return memory, fd
    except BaseException as error:
        if fd >= 0:
            os.close(fd)
        if isinstance(error, OSError) and error.errno in (errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EACCES):
            why = f"this system gives no sealed shared memory: {error}"
            raise NotSupported(why, device="shm", hint='use tcp (transport="tcp")') from error
        raise


def anonymous(nbytes: int) -> mmap.mmap:
    """Private memory of this process."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def address_of(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8, count=1).ctypes.data)  # torch warns of memory that may only be read


def check_sealed(fd: int, nbytes: int) -> None:
    """Whether this is memory of that size for good. ``PeerLost`` if not."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise PeerLost("what the peer handed over is no memfd", device="shm", status="PROTOCOL") from None
    if seals & _SEALS != _SEALS:
        raise PeerLost("memory of the peer is not sealed: it could be cut short later", device="shm", status="UNSEALED")
    if (size := os.fstat(fd).st_size) != nbytes:
        raise PeerLost(f"the peer told of {nbytes} bytes and handed over {size}", device="shm", status="PROTOCOL")


def mapped(fd: int, nbytes: int, *, writable: bool = True) -> mmap.mmap:
    """Memory of a peer. ``PeerLost`` as ``check_sealed``, ``OSError`` if it cannot be mapped."""
    check_sealed(fd, nbytes)
    return mmap.mmap(fd, nbytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
