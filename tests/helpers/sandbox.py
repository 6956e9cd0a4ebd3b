"""Sandboxes for processes of tests: system calls that the kernel refuses to one process (seccomp), as container runtimes do."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

_X86, _ARM = "x86_64", "aarch64"
_NUMBERS = {
    _X86: {
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "memfd_create": 319,
        "pidfd_open": 434,
        "sched_getaffinity": 204,
        "eventfd2": 290,
        "epoll_create1": 291,
    },
    _ARM: {
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "memfd_create": 279,
        "pidfd_open": 434,
        "sched_getaffinity": 123,
        "eventfd2": 19,
        "epoll_create1": 20,
    },
}
_NO_NEW_PRIVS, _SECCOMP, _FILTER = 38, 22, 2
_LOAD_NUMBER, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_CLONE_NEWPID, _CLONE_NEWNS = 0x20000000, 0x00020000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def why_not() -> str:
    """Why system calls cannot be refused here, or empty."""
    if platform.machine() not in _NUMBERS:
        return f"the numbers of system calls of {platform.machine()} are not known"
    # Without a program EFAULT: the kernel knows filters; else EINVAL.
    known = _libc.prctl(_SECCOMP, _FILTER, None) != 0 and ctypes.get_errno() == errno.EFAULT
    return "" if known else "no seccomp filters here"


def forbid(*calls: str, code: int = errno.EPERM) -> None:
    """The kernel refuses these calls to this process and its children, from now on and for good. Before other threads start."""
    numbers = [_NUMBERS[platform.machine()][call] for call in calls]
    rows = [(_LOAD_NUMBER, 0, 0, 0)]
    rows += [(_IF_EQUAL, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    rows += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | code)]
    code_of = b"".join(struct.pack("<HBBI", *row) for row in rows)
    program = _Program(len(rows), code_of)
    if _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or _libc.prctl(_SECCOMP, _FILTER, ctypes.byref(program)):
        raise OSError(ctypes.get_errno(), "prctl")


def children_apart() -> None:
    """Children of this process live in a PID namespace of their own from now on. Needs root."""
    if _libc.unshare(_CLONE_NEWPID):
        raise OSError(ctypes.get_errno(), "unshare")


def hide(path: str) -> None:
    """An empty folder lies over this one, for this process and its children alone. Needs root."""
    flags = _MS_REC | _MS_PRIVATE
    if _libc.unshare(_CLONE_NEWNS) or _libc.mount(None, b"/", None, flags, None):
        raise OSError(ctypes.get_errno(), "unshare")
    if _libc.mount(b"none", os.fsencode(path), b"tmpfs", 0, None):
        raise OSError(ctypes.get_errno(), f"mount over {path}")
