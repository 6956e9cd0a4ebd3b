"""Imported once by the process that all worker processes of the tests are forked from: what every one of them would import.

No thread of ours and no kernel runs in it, so a fork of it is as good as a fresh process.
"""

import contextlib
import gc
import importlib
import os
import pkgutil

import hypothesis  # noqa: F401
import numpy  # noqa: F401
import psutil  # noqa: F401
import pytest  # noqa: F401
import torch
import torch._dynamo  # noqa: F401 (the first optimizer of a process imports it, which takes seconds)

import rdmarpc
import rdmarpc.graph
import rdmarpc.transport
from rdmarpc.transport.words.compiled import kernels

for _package in (rdmarpc, rdmarpc.graph, rdmarpc.transport):
    for _module in pkgutil.walk_packages(_package.__path__, _package.__name__ + "."):
        importlib.import_module(_module.name)

for _kernel in kernels:
    _kernel.load()

# Half a minute in a guest (tests/vm), where no test needs them.
_JOBS = ("hydra", "matplotlib.pyplot", "rich", "sklearn.datasets", "torch.export._trace")
for _name in ("torch.distributed.rpc", *(() if "RDMARPC_VM_BOX" in os.environ else _JOBS)):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)

gc.collect()
gc.freeze()  # else each worker's collector writes to, and so copies, everything that was imported
