"""Mapped memory: private, or a file that another process can map too.

A file descriptor of a peer is mapped only when nothing that the peer does later can do harm: if it cut the file short, SIGBUS
would end every process that touches the lost pages. So the maker seals the memory (``memfd``), and only sealed memory is
mapped.

Memory of another process that we have not mapped is copied by cross-memory attach (``transfer``).

Forked children see in memory that peers may touch what it held when they were forked, as in any other memory. A mapping that is
shared stays shared over a fork: the child would see what the parent writes there later, also when it uses the memory for other
tensors, and the parent would see what the child writes. So the pages of live tensors are copied before a fork, and the child
moves the copies to where they belong. The parent lets go of them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ..errors import NotSupported, PeerLost, RdmaError, RemoteAccessError
from ..peers.guard import REFUSED, naming

_CLOEXEC, _ALLOW_SEALING = 1, 2
# Not every Python has them by name.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEALS = 0x1 | 0x2 | 0x4  # SEAL, SHRINK, GROW
"""The seals of shared memory: its size can never change again."""
_SEAL_FUTURE_WRITE = 0x0010
"""From Linux 5.1 on: the memory can be written only through the mappings that exist already."""
_MADV_REMOVE = 9
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def memfd(name: str, nbytes: int, *, read_only: bool = False) -> tuple[mmap.mmap, int]:
    """Memory that can be handed to another process, and its file descriptor; ``name`` is for people. It is sealed, so that no
    holder of the descriptor can take mapped pages away. With ``read_only`` no holder can write it either, not even after
    opening it again (``/proc/self/fd``): only the returned mapping can be written. Raises ``NotSupported`` where the kernel
    cannot."""
    fd, call = -1, "memfd_create"
    try:
        fd = _create(name)
        os.ftruncate(fd, nbytes)
        memory = mmap.mmap(fd, nbytes)
        call = "fcntl with F_ADD_SEALS"
        fcntl.fcntl(fd, _ADD_SEALS, _SEALS | (_SEAL_FUTURE_WRITE if read_only else 0))
        call = "fcntl with F_GET_SEALS"  # without which nobody's memory can be mapped here
        fcntl.fcntl(fd, _GET_SEALS)
        return memory, fd
    except BaseException as error:
        if fd >= 0:
            os.close(fd)
        if isinstance(error, OSError) and error.errno in (errno.EINVAL, *REFUSED):
            why = f"this system gives no sealed shared memory ({call}): {error}"
            raise NotSupported(why, device="shm", hint='use tcp (transport="tcp")') from error
        raise


def _create(name: str) -> int:
    """``os.memfd_create``, which Pythons that were built for an old libc do not have; the system may all the same."""
    found = _libc.memfd_create(name.encode(), _CLOEXEC | _ALLOW_SEALING)
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def anonymous(nbytes: int) -> mmap.mmap:
    """Private memory of this process."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def address_of(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8, count=1).ctypes.data)  # torch warns of memory that may only be read


def check_sealed(fd: int, nbytes: int) -> None:
    """Whether this is memory of that size for good. ``PeerLost`` if not, ``NotSupported`` if the system does not tell."""
    try:
        with naming("fcntl with F_GET_SEALS", device="shm"):
            seals = fcntl.fcntl(fd, _GET_SEALS)
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


def discard(address: int, nbytes: int) -> None:
    """Give the whole pages of a part of a shared mapping back to the system, for all processes that map it. What they held is
    lost; whoever touches them gets new ones. Where the kernel cannot, nothing happens."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length > 0:
        _libc.madvise(start, length, _MADV_REMOVE)


class _Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


_calls = {True: _libc.process_vm_writev, False: _libc.process_vm_readv}
_vector = ctypes.POINTER(_Iovec)
for _call in _calls.values():
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = [ctypes.c_int, _vector, ctypes.c_ulong, _vector, ctypes.c_ulong, ctypes.c_ulong]


def _error(code: int, pid: int) -> RdmaError:
    status = errno.errorcode.get(code, str(code))
    if code in (errno.EPERM, errno.ENOSYS):
        why = "this system does not let a process read or write the memory of another"
        hint = "kernel.yama.ptrace_scope=0 or CAP_SYS_PTRACE allows it; or make the tensor with device.empty()"
        return NotSupported(why, device="shm", status=status, hint=hint)
    if code == errno.ESRCH:
        return PeerLost(f"process {pid} is gone", device="shm", status=status)
    return RemoteAccessError(f"process {pid} has no such memory", device="shm", status=status)


def transfer(pid: int, local: int, remote: int, nbytes: int, *, write: bool) -> None:
    """Copy ``nbytes`` between ``local`` (our address) and ``remote`` (an address of process ``pid``). Without the GIL."""
    call = _calls[write]
    done = 0
    while done < nbytes:
        here = _Iovec(local + done, nbytes - done)
        there = _Iovec(remote + done, nbytes - done)
        copied = call(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if copied <= 0:
            raise _error(ctypes.get_errno() or errno.EFAULT, pid)
        done += copied


def why_not(pid: int, probe: int) -> str:
    """Empty if we may read the memory of ``pid``, else the reason. ``probe``: 8 readable bytes there."""
    if pid == os.getpid():
        return ""
    if pid == 0:
        return "the peer's process is in another PID namespace, and not seen in ours"
    word = ctypes.c_int64()
    try:
        transfer(pid, ctypes.addressof(word), probe, 8, write=False)
    except RdmaError as error:
        return str(error)
    return ""


COPIED_AT_MOST = 1 << 30
"""The bytes that are copied for a forked child at most; beyond that all of it stays shared, with a warning."""
_MOST_RANGES = 1 << 13  # the system gives a process some 65,000 mappings, and each range takes up to two
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAYMOVE_FIXED = 3


class Shown(NamedTuple):
    """A live tensor that code of the user may see. Whoever has this keeps it alive."""

    address: int
    nbytes: int
    view: memoryview


_taken = threading.local()
"""``copy``: that for the child that this thread forks, or ``None``: start, bytes, and its parts (where it belongs, bytes)."""
_owners: weakref.WeakSet[Any] = weakref.WeakSet()
_left: weakref.WeakValueDictionary[tuple[int, int], memoryview] = weakref.WeakValueDictionary()
"""The tensors that outlived their owners, by address and bytes, which are theirs for as long as they live."""


def watch(owner: Any) -> None:
    """Copy what ``owner.shown()`` gives (``Shown``; it takes no lock) before every fork, while ``owner`` exists."""
    _owners.add(owner)


def leave(tensors: Iterable[Shown]) -> None:
    """Copy these before every fork, for as long as they live: their owner ends."""
    for address, nbytes, view in tensors:
        _left[address, nbytes] = view


def _pages(tensors: Iterable[Shown]) -> list[tuple[int, int]]:
    """The ranges of whole pages in which these lie: start and end, in order, none touching the next one."""
    found: list[tuple[int, int]] = []
    for start, nbytes in sorted([(address, nbytes) for address, nbytes, _ in tensors]):
        first, end = start // mmap.PAGESIZE * mmap.PAGESIZE, -(-(start + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        if found and first <= found[-1][1]:
            first, end = found[-1][0], max(end, found.pop()[1])
        found.append((first, end))
    return found


def _before() -> None:
    _taken.copy = None
    tensors = [each for owner in list(_owners) for each in owner.shown()]
    tensors += [Shown(*left.key, view) for left in _left.valuerefs() if (view := left()) is not None]
    pages = _pages(tensors)
    if not pages:
        return
    total = sum(end - start for start, end in pages)
    copy = _MAP_FAILED
    if total <= COPIED_AT_MOST and len(pages) <= _MOST_RANGES:
        copy = _libc.mmap(None, total, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if copy == _MAP_FAILED or copy is None:
        warnings.warn(
            f"{total:,} bytes of tensors that came from other workers are too much to copy for a forked child: it shares them "
            "with this process, so each sees what the other writes there, also when the memory is used for something else. "
            "Fork before, use spawn, or clone() what the child uses and let the rest go",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    at = copy
    for start, end in pages:
        ctypes.memmove(at, start, end - start)
        at += end - start
    _taken.copy = copy, total, [(start, end - start) for start, end in pages]


def _in_parent() -> None:
    copy, _taken.copy = _taken.copy, None
    if copy is not None:
        start, nbytes, _ = copy
        _libc.munmap(start, nbytes)


def _in_child() -> None:
    copy, _taken.copy = _taken.copy, None
    if copy is None:
        return
    at, _, ranges = copy
    for start, nbytes in ranges:
        if _libc.mremap(at, nbytes, nbytes, _MAYMOVE_FIXED, start) == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), "tensors that came from other workers stay shared with the parent")
        at += nbytes


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
