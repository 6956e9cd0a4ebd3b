"""Imported once by the process that all worker processes of the tests are forked from: what every one of them would import."""

import contextlib
import importlib
import pkgutil

import ancestor
import hypothesis  # noqa: F401
import numpy  # noqa: F401
import psutil  # noqa: F401
import pytest  # noqa: F401
import torch  # noqa: F401

import rdmarpc
import rdmarpc.graph
import rdmarpc.transport

for _package in (rdmarpc, rdmarpc.graph, rdmarpc.transport):
    for _module in pkgutil.walk_packages(_package.__path__, _package.__name__ + "."):
        if _module.name != "rdmarpc.places.owners" or not ancestor.GUEST:  # it imports torch.distributed.checkpoint
            importlib.import_module(_module.name)

# Minutes in a guest, where tests need one of them at most: the first optimizer of a process imports torch._dynamo.
_HOST = ("torch._dynamo", "hydra", "matplotlib.pyplot", "rich", "sklearn.datasets", "torch.export._trace")
for _name in ("torch.distributed.rpc", *(() if ancestor.GUEST else _HOST)):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)

ancestor.prepare()
