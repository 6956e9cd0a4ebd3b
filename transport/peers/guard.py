"""Unexpected errors in a thread that serves many peers: the thread reports them and goes on.

A loop catches each error where it still knows what the error concerns (one peer, one call), ends just that, and leaves the
telling to its ``Guard``. No thread of the package may end because something raised
(``tests/transport/contract/test_threads.py``).

What the system has too little of, and what a sandbox may forbid beyond POSIX, has another way here, or an error that names it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import threading
from collections.abc import Iterator

from ..errors import NotSupported, PeerLost, RdmaError

REFUSED = errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT
"""The errors by which sandboxes and old systems refuse a system call."""
_HINT = "a sandbox (seccomp, systemd, SELinux) forbids it: allow it there"
_log = logging.getLogger("rdmarpc")
_KINDS = 1000
"""So many kinds are counted one by one, all further ones as one."""
_OTHERS = "one of many things", BaseException


class Guard:
    """Logs the unexpected errors of one thread or device: the first of a kind with its traceback, or, where the system had too
    little of something, with a hint; then the count each time it has grown tenfold. Any thread; raises nothing."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._counts: dict[tuple[str, type[BaseException]], int] = {}
        self._lock = threading.RLock()
        self.total = 0
        """How many errors were noted."""

    def note(self, error: BaseException, doing: str, *, ours: bool = True) -> None:
        """Log an error. ``doing`` names the action that failed; with the error's type it is the kind, so it must not contain
        values that vary. ``ours``: not of a user's function, whose traceback is always of use."""
        kind: tuple[str, type[BaseException]] = doing, type(error)
        with self._lock:
            self.total += 1
            if kind not in self._counts and len(self._counts) >= _KINDS:
                kind = _OTHERS
            count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count == 1:
            hint = hint_for(error) if ours else ""
            lacks = f": {error} ({hint})" if hint else ""
            _log.error("%s: %s failed; it goes on%s", self._who, kind[0], lacks, exc_info=None if hint else error)
        elif count == 10 ** (len(str(count)) - 1):
            _log.error("%s: %s failed %d times, the last time with %r", self._who, kind[0], count, error)


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


def have_standard_streams() -> None:
    """Open the null device as each standard stream that this process was started without: what a library prints would else go
    into memory, or to a peer, whose descriptor took that number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def need_descriptors(count: int) -> None:
    """Raise ``OSError`` if this process may not open ``count`` more files."""
    held: list[int] = []
    try:
        while len(held) < count:
            held.extend(os.pipe2(os.O_CLOEXEC))
    finally:
        for fd in held:
            os.close(fd)


def hint_for(error: BaseException) -> str:
    """The hint for an error of a system that had too little of something; empty if none is known."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and os.strerror(errno.EMFILE) in str(error):  # of a library
        number = errno.EMFILE
    if "can't start new thread" in str(error):
        return "this process, or its user, may have no more threads: raise the limit (ulimit -u; ulimit -v counts their stacks)"
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    hints = {
        errno.EMFILE: f"this process may have {files} files open: raise the limit (ulimit -n)",
        errno.ENFILE: "this host has too many files open (sysctl fs.file-max)",
        errno.ENOMEM: "this process cannot map more memory: see ulimit -v, vm.max_map_count and the limit of its container",
        errno.EFBIG: "this process may not make a file of that size, and shared memory is one: raise the limit (ulimit -f)",
    }
    return hints.get(number or 0, "")


def broken_by(error: BaseException, doing: str, *, peer: str, device: str) -> RdmaError:
    """The error for the users of a channel that ended because ``error`` was raised while it was served."""
    if isinstance(error, RdmaError):
        if error.peer:
            return error
        named = type(error)(error.message, peer=peer, device=error.device or device, status=error.status, hint=error.hint)
        named.__cause__ = error
        return named
    status = errno.errorcode.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    why = f"{doing} failed here: {type(error).__name__}: {error}"
    lost = PeerLost(why, peer=peer, device=device, status=status or "INTERNAL", hint=hint_for(error))
    lost.__cause__ = error
    return lost


def nobody(*_: object) -> None:
    """A callback that does nothing. It replaces the callback of an owner that has ended, which would else be kept alive."""
