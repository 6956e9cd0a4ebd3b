"""Cross-memory attach: copies between our memory and memory of another process that we have not mapped."""

from __future__ import annotations

import ctypes
import errno
import os

from ..errors import NotSupported, PeerLost, RdmaError, RemoteAccessError


class _Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


_libc = ctypes.CDLL(None, use_errno=True)
_calls = {True: _libc.process_vm_writev, False: _libc.process_vm_readv}
for _call in _calls.values():
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = [
        ctypes.c_int,
        ctypes.POINTER(_Iovec),
        ctypes.c_ulong,
        ctypes.POINTER(_Iovec),
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]


def _error(code: int, pid: int) -> RdmaError:
    status = errno.errorcode.get(code, str(code))
    if code in (errno.EPERM, errno.ENOSYS):
        return NotSupported(
            "this system does not let a process read or write the memory of another",
            device="shm",
            status=status,
            hint="kernel.yama.ptrace_scope=0 or CAP_SYS_PTRACE allows it; or make the tensor with device.empty()",
        )
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
