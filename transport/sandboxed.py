"""What a sandbox may forbid this process beyond POSIX: another way, or an error that names it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from .errors import NotSupported

REFUSED = errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT
"""The errors by which sandboxes and old systems refuse a system call."""
_HINT = "a sandbox (seccomp, systemd, SELinux) forbids it: allow it there"


def processors() -> set[int]:
    """The processors that this process may run on; all of the host where it may not ask."""
    try:
        return os.sched_getaffinity(0)
    except OSError:
        return set(range(os.cpu_count() or 1))


@contextlib.contextmanager
def naming(what: str, *, device: str, hint: str = _HINT) -> Iterator[None]:
    """A refusal in the block is ``NotSupported`` that names ``what`` was refused."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        raise NotSupported(f"this system does not let a process use {what}: {error}", device=device, hint=hint) from error
