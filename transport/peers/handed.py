"""Descriptors and identities of processes, which processes hand each other over a Unix socket."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator

from ..errors import PeerLost
from ..sandboxed import naming

_CREDENTIALS, _DESCRIPTOR = struct.Struct("3i"), struct.Struct("i")


def credentials(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel noted them when it connected, or listened. Raises ``NotSupported``."""
    with naming("SO_PEERCRED (getsockopt), which tells whose process the peer is", device="shm"):
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


@contextlib.contextmanager
def received(sock: socket.socket, nbytes: int, count: int, flags: int = 0) -> Iterator[tuple[bytes, list[int]]]:
    """One message of up to ``nbytes``, and up to ``count`` descriptors, which are closed at the end of the ``with``.
    ``OSError``, also if a descriptor was lost."""
    # Not ``socket.recv_fds``, which forgets the flags.
    data, rights, told, _ = sock.recvmsg(nbytes, socket.CMSG_LEN(4 * count), flags | socket.MSG_CMSG_CLOEXEC)
    fds = [fd for _, _, found in rights for (fd,) in _DESCRIPTOR.iter_unpack(found[: len(found) // 4 * 4])]
    try:
        if told & socket.MSG_CTRUNC and len(fds) >= count:
            raise PeerLost(f"the peer handed over more than {count} descriptors at once", device="shm", status="PROTOCOL")
        if told & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, "no descriptor is left for memory of the peer, or a sandbox (SELinux) took it away")
        yield data, fds
    finally:
        for fd in fds:
            os.close(fd)
