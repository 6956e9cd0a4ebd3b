"""For a process that others are forked from: it does once what each of them would do. While it imports, garbage is looked for
seldom: that would take a third of the time. So this module is imported before torch.

No thread of ours and no kernel runs in it, so a fork of it is as good as a fresh process.
"""

import contextlib
import ctypes
import gc
import importlib
import os
from pathlib import Path

_usual = gc.get_threshold()
gc.set_threshold(20_000)  # never would leave holes in pages, which each fork fills in copies of its own

GUEST = "RDMARPC_VM_BOX" in os.environ
"""Of tests/vm, where an import takes twenty times as long."""
_HUGE = 2 << 20
_MADV_COLLAPSE = 25


def settle() -> None:
    """After the imports. What they have made is not looked through again: not here, and not in forks, which would copy it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_usual)


def prepare() -> None:
    """After the imports, where workers are forked."""
    from rdmarpc.transport.words.compiled import kernels

    for kernel in kernels:
        kernel.load()
    with contextlib.suppress(ImportError):  # the last one a worker imports when it first uses a key
        importlib.import_module("cryptography.hazmat.backends.openssl.backend")
    settle()
    if not GUEST:  # there it was not seen to help
        _huge_pages()


def _huge_pages() -> None:
    """Put what this process has in memory into huge pages, where the kernel can: a fork then copies one entry for each rather
    than 512, which was more than half of what a worker process of the tests costs."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, inode, *name = line.split()
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in span.split("-"))
            for address in range(-(-begin // _HUGE) * _HUGE, end // _HUGE * _HUGE, _HUGE):
                madvise(address, _HUGE, _MADV_COLLAPSE)  # fails where nothing is, and on a kernel older than 6.1
