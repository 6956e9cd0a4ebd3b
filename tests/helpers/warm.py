"""Imported once by the process that all worker processes of the tests are forked from: what every one of them would import.

No thread of ours and no kernel runs in it, so a fork of it is as good as a fresh process.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import pkgutil
from pathlib import Path

import hypothesis  # noqa: F401
import numpy  # noqa: F401
import psutil  # noqa: F401
import pytest  # noqa: F401
import torch  # noqa: F401

import rdmarpc
import rdmarpc.graph
import rdmarpc.transport
from rdmarpc.transport.words.compiled import kernels

_GUEST = "RDMARPC_VM_BOX" in os.environ
"""Of tests/vm, where an import takes twenty times as long."""
_HUGE = 2 << 20
_MADV_COLLAPSE = 25


def huge_pages() -> None:
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


for _package in (rdmarpc, rdmarpc.graph, rdmarpc.transport):
    for _module in pkgutil.walk_packages(_package.__path__, _package.__name__ + "."):
        if _module.name != "rdmarpc.places.owners" or not _GUEST:  # it imports torch.distributed.checkpoint
            importlib.import_module(_module.name)

for _kernel in kernels:
    _kernel.load()

# The last one a worker imports when it first uses a key.
_ALL = ("torch.distributed.rpc", "cryptography.hazmat.backends.openssl.backend")
# Minutes in a guest, where tests need one of them at most: the first optimizer of a process imports torch._dynamo.
_HOST = ("torch._dynamo", "hydra", "matplotlib.pyplot", "rich", "sklearn.datasets", "torch.export._trace")
for _name in (*_ALL, *(() if _GUEST else _HOST)):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)

gc.collect()
gc.freeze()  # else each worker's collector writes to, and so copies, everything that was imported
if not _GUEST:  # there it was not seen to help
    huge_pages()
