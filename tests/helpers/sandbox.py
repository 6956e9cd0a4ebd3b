"""Sandboxes for processes of tests: system calls that the kernel refuses to one process (seccomp), as container runtimes do."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

_MACHINES = "x86_64", "aarch64"
_NUMBERS = {
    "accept4": (288, 242),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "eventfd2": (290, 19),
    "fallocate": (285, 47),
    "fcntl": (72, 25),
    "getcpu": (309, 168),
    "getrandom": (318, 278),
    "getsockopt": (55, 209),
    "ioctl": (16, 29),
    "kill": (62, 129),
    "madvise": (28, 233),
    "membarrier": (324, 283),
    "memfd_create": (319, 279),
    "mlock": (149, 228),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "pidfd_open": (434, 434),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "sched_getaffinity": (204, 123),
    "sched_setaffinity": (203, 122),
    "sched_yield": (24, 124),
    "setsockopt": (54, 208),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "statx": (332, 291),
    "sysinfo": (99, 179),
    "tgkill": (234, 131),
}
"""Of each system call on each machine."""
_ANY = 0xFFFFFFFF
_PARTS = {
    "fcntl(F_ADD_SEALS)": (1, _ANY, 1033),
    "fcntl(F_GET_SEALS)": (1, _ANY, 1034),
    "getsockopt(SO_PEERCRED)": (2, _ANY, 17),
    "mprotect(PROT_EXEC)": (2, 4, 4),
    "socket(AF_UNIX)": (0, _ANY, 1),
    "socket(AF_INET)": (0, _ANY, 2),
    "socket(AF_INET6)": (0, _ANY, 10),
    "socket(AF_NETLINK)": (0, _ANY, 16),
}
"""A part of what a system call does: the number of an argument, a mask, and the value under it."""
_NO_NEW_PRIVS, _SECCOMP, _FILTER = 38, 22, 2
_LOAD, _AND, _IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ARGUMENTS = 16
"""Where they lie in what a filter sees, behind the number of the call."""
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_CLONE_NEWPID, _CLONE_NEWNS = 0x20000000, 0x00020000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def why_not() -> str:
    """Why system calls cannot be refused here, or empty."""
    if platform.machine() not in _MACHINES:
        return f"the numbers of system calls of {platform.machine()} are not known"
    # Without a program EFAULT: the kernel knows filters; else EINVAL.
    known = _libc.prctl(_SECCOMP, _FILTER, None) != 0 and ctypes.get_errno() == errno.EFAULT
    return "" if known else "no seccomp filters here"


def forbid(*calls: str, code: int = errno.EPERM) -> None:
    """The kernel refuses these calls, or parts of them (``"socket(AF_UNIX)"``), to this thread and to what it starts, from now
    on and for good."""
    rows: list[tuple[int, int, int, int]] = []
    for call in calls:
        number = _NUMBERS[call.partition("(")[0]][_MACHINES.index(platform.machine())]
        refused = [(_RETURN, 0, 0, _ERRNO | code)]
        if call in _PARTS:
            argument, mask, value = _PARTS[call]
            at = _ARGUMENTS + 8 * argument
            refused = [(_LOAD, 0, 0, at), (_AND, 0, 0, mask), (_IF_EQUAL, 0, 1, value), *refused]
        rows += [(_LOAD, 0, 0, 0), (_IF_EQUAL, 0, len(refused), number), *refused]
    rows.append((_RETURN, 0, 0, _ALLOW))
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
